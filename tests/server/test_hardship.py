"""A server under stress: hostile requests, storms, killed engines.

GRAPHDECODE_AT_LENGTH=1 runs all of it at full length.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from mutated_requests import mutated_request
from served import AT_LENGTH, Served, children_of, serving, until

from graphdecode import LLM, SamplingParams
from graphdecode.models import resolve_model_path

SHORT = {"prompt": "12+30=", "max_tokens": 8, "temperature": 0}


CONFIG = """
[capacity]
max_batch_size = 8
max_sequence_length = 128
total_num_pages = 30
[server]
max_answers = 8
max_waiting = 1000
served_model_name = "demo"
trust_request_chat_template = true
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("server") / "server.toml"
    file.write_text(CONFIG)
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose files can be taken away."""
    return Path(shutil.copytree(resolve_model_path("demo"), tmp_path_factory.mktemp("model") / "model"))


@pytest.fixture(scope="module")
def served(config: Path, model: Path) -> Iterator[Served]:
    with serving("--config", str(config), model=str(model)) as server:
        yield server


def no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def complaint(answer: httpx.Response) -> str | None:
    """Return what is wrong with an answer to a hostile request."""
    if answer.status_code >= 500:
        return f"{answer.status_code} {answer.text[:300]}"
    if not answer.content:
        return None
    try:
        if answer.headers["content-type"].startswith("text/event-stream"):
            events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
            if events.pop() != "[DONE]":
                return "the stream does not end"
            told = [json.loads(event, parse_constant=no_number) for event in events]
            return next((str(each)[:300] for each in told if "error" in each), None)
        told = json.loads(answer.content, parse_constant=no_number)
    except ValueError as error:
        return f"{error}: {answer.text[:300]}"
    if answer.status_code >= 400 and not told["error"]["message"]:
        return f"no message: {answer.text[:300]}"
    return None


def test_hostile_requests_are_refused_or_answered_and_the_next_good_one_is_served(served: Served) -> None:
    async def ask(http: httpx.AsyncClient, seed: int, room: asyncio.Semaphore) -> str | None:
        request = mutated_request(seed)
        async with room:
            try:
                wrong = complaint(
                    await http.request(
                        request.method, request.path, content=request.content, headers=request.headers, timeout=120
                    )
                )
            except httpx.HTTPError as error:
                wrong = f"{type(error).__name__}: {error}"
        return wrong and f"seed {seed}: {wrong}\n{request.path} {request.headers} {request.content[:300]!r}"

    async def main() -> list[str]:
        room = asyncio.Semaphore(8)
        async with httpx.AsyncClient(base_url=served.address) as http:
            answers = await asyncio.gather(*(ask(http, seed, room) for seed in range(1000 if AT_LENGTH else 200)))
        return [answer for answer in answers if answer]

    assert "\n\n".join(asyncio.run(main())) == ""
    assert not any("Traceback" in line for line in served.lines)
    with served.client() as http:
        assert http.post("/v1/completions", json=SHORT).json()["choices"][0]["text"].strip() == "42"
    served.until_idle()


def test_in_a_storm_with_cancellations_every_answer_is_the_one_of_the_library(served: Served, config: Path) -> None:
    count, draw = 600 if AT_LENGTH else 60, random.Random(17)
    asked = [
        {
            "prompt": draw.choice(["rev ", "sort ", "", "1+"])
            + "".join(draw.choices("abcdefgh0123", k=draw.randrange(40))),
            "max_tokens": draw.randrange(1, 60),
            "temperature": draw.choice([0.0, 0.7, 1.5]),
            "top_k": draw.choice([0, 5]),
            "seed": number,
            "ignore_eos": True,
            "n": draw.randrange(1, 4),
        }
        for number in range(count)
    ]
    asked[0] |= {"max_tokens": None, "n": 8}  # begins together and outgrows the pages, however slowly the rest comes
    leaves = [draw.random() * 0.2 if draw.random() < 0.4 else None for _ in asked]
    leaves[0] = None
    with LLM("demo", config=config, device="cpu") as llm:
        params = [SamplingParams(**{name: value for name, value in each.items() if name != "prompt"}) for each in asked]
        outputs = llm.generate([each["prompt"] for each in asked], params)
    expected = [[answer.text for answer in output.outputs] for output in outputs]

    async def answer(http: httpx.AsyncClient, number: int) -> list[str]:
        body = asked[number] | {"stream": number % 2 == 0}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        texts = [""] * int(str(asked[number]["n"]))
        events = response.text.split("\n\n")[:-2] if number % 2 == 0 else [response.text]
        for event in events:
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
        return texts

    async def ask(http: httpx.AsyncClient, number: int) -> list[str] | None:
        try:
            return await asyncio.wait_for(answer(http, number), leaves[number])
        except TimeoutError:
            return None

    async def main() -> list[list[str] | None]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=served.address, timeout=120, limits=limits) as http:
            return await asyncio.gather(*(ask(http, number) for number in range(count)))

    answers = asyncio.run(main())
    assert [(asked[i], text, expected[i]) for i, text in enumerate(answers) if text not in (None, expected[i])] == []
    assert sum(text is not None for text in answers) > count // 3
    assert served.metric("vllm:num_preemptions_total") > 0  # pages were short
    served.until_idle()


def until_healthy(served: Served) -> None:
    served.until_healthy()
    with served.client() as http:
        assert http.post("/v1/completions", json=SHORT).json()["choices"][0]["text"].strip() == "42"


def test_whenever_the_engine_is_killed_everybody_gets_an_error_or_an_answer(served: Served) -> None:
    draw = random.Random(4)

    async def ask(http: httpx.AsyncClient, stream: bool) -> str:
        body = SHORT | {"max_tokens": 100, "ignore_eos": True, "stream": stream}
        response = await http.post("/v1/completions", json=body)
        return f"{response.status_code} {response.text}"

    async def main() -> list[str]:
        async with httpx.AsyncClient(base_url=served.address, timeout=120) as http:
            tasks = [asyncio.create_task(ask(http, number % 2 == 0)) for number in range(12)]
            await asyncio.sleep(draw.random() * 0.2)
            os.kill(served.engine_pid, signal.SIGKILL)
            tasks += [asyncio.create_task(ask(http, number % 2 == 0)) for number in range(4)]
            return await asyncio.gather(*tasks)

    for round_number in range(20 if AT_LENGTH else 1):
        outcomes = asyncio.run(main())
        wrong = [each for each in outcomes if '"error"' not in each and '"finish_reason":"length"' not in each]
        assert wrong == []
        if round_number % 2 == 0:  # while it loads
            time.sleep(draw.random() * 2)
            os.kill(served.engine_pid, signal.SIGKILL)
        until_healthy(served)
    served.until_idle()
    assert served.metric("graphdecode:recaptures_total") >= 1
    assert not any("12+30" in line for line in served.lines)  # prompts are not logged by default


def test_an_engine_that_cannot_start_waits_longer_each_time_until_it_can(served: Served, model: Path) -> None:
    hidden = (model / "config.json").rename(model / "hidden.json")
    os.kill(served.engine_pid, signal.SIGKILL)
    pauses = [f"retrying in {seconds} s" for seconds in ((1, 2, 4, 8) if AT_LENGTH else (1,))]
    started = len(served.lines)
    served.until_said(pauses[-1], since=started)
    said = [line for line in served.lines[started:] if "retrying in" in line]
    assert [pause in line for pause, line in zip(pauses, said, strict=True)] == [True] * len(pauses)
    with served.client() as http:
        refused = http.post("/v1/completions", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "restarting")
    hidden.rename(model / "config.json")
    until_healthy(served)


QUESTION = {"model": "demo", "prompt": "417+385=", "temperature": 0, "max_tokens": 8}
LONG = {"model": "demo", "prompt": "rev abc=", "max_tokens": 200, "ignore_eos": True, "stream": True}
OPTIONS = ("--tensor-parallel", "2", "--max-batch-size", "2", "--max-sequence-length", "256")


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    started = [each for each, _ in children_of(pid)]
    return started + [each for child in started for each in children(child)]


def until_ended(pids: list[int]) -> None:
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), pids)


def answer(server: Served) -> str:
    with server.client() as http:
        response = http.post("/v1/completions", json=QUESTION)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]


def test_a_killed_rank_is_named_new_ranks_serve_and_ctrl_c_leaves_none() -> None:
    with serving(*OPTIONS) as server, server.client() as http:
        assert answer(server) == "802"
        engine = server.engine_pid
        (rank,) = children(engine)
        assert http.get("/health").status_code == 200
        with http.stream("POST", "/v1/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(rank, signal.SIGKILL)
            rest = "\n".join(lines)
        assert '"error"' in rest
        assert "rank 1 of 2 was ended by SIGKILL" in rest
        until_ended([rank, engine])
        seen: list[int] = []
        until(lambda: seen.append(http.get("/health").status_code) or seen[-1] == 200)
        assert set(seen[:-1]) == {503}
        assert any("rank 1 of 2 was ended by SIGKILL" in line for line in server.lines)
        started = children(server.process.pid)
        assert len(started) == 2
        assert not {engine, rank} & set(started)
        with http.stream("POST", "/v1/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            for pid in (server.process.pid, *started):  # as a terminal sends it: to all
                os.kill(pid, signal.SIGINT)
            assert "[DONE]" in "\n".join(lines)
        assert server.process.wait(60) == 0
        until_ended(started)
