"""A server under stress: hostile requests, storms, killed engines. `tools/try_server` runs all of it at full length."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from mutated_requests import mutated_request
from served import AT_LENGTH, Served, serving

SHORT = {"prompt": "12+30=", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("server") / "server.toml"
    file.write_text("[server]\nmax_answers = 8\ntrust_request_chat_template = true\nmax_waiting = 1000\n")
    with serving("--config", str(file), "--max-batch-size", "8", "--max-sequence-length", "128") as server:
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
                        request.method, request.path, content=request.content, headers=request.headers, timeout=30
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
