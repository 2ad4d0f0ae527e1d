"""`graphdecode batch`: every request of a file is answered once, whatever ends a run before it is done."""

import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from command_line import run_command
from served import AT_LENGTH, until, write_adapter

from graphdecode import LLM, LoRARequest, SamplingParams
from graphdecode.cli import main
from graphdecode.errors import ArgumentError
from graphdecode.server.batch import BatchInput, BatchOutput

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
NUM_LINES = 5000 if AT_LENGTH else 300
SEEDS = range(3) if AT_LENGTH else range(1)
DEADLINE_SECONDS = 120


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServerContext]:
    """Make processes that have imported what a run imports, which takes longer than the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["graphdecode.server.batch", "graphdecode.models", "transformers"])
        yield context


class Runs:
    """Starts the command in processes of their own, over two files of one folder."""

    def __init__(self, context: ForkServerContext, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._context = context
        self._patch = patch
        self.input = folder / "requests.jsonl"
        self.output = folder / "answers.jsonl"

    def start(self, *options: str) -> ForkServerProcess:
        files = (str(self.input), str(self.output))
        arguments = ["graphdecode", "batch", *files, "--model", "demo", "--device", "cpu", *options]
        self._patch.setattr(sys, "argv", arguments)  # which the process takes over
        process = self._context.Process(target=main)
        process.start()
        return process

    def finish(self, *options: str) -> int | None:
        process = self.start(*options)
        process.join(DEADLINE_SECONDS)
        return process.exitcode

    def answers(self) -> dict[str, Any]:
        """Return the responses by `custom_id`; each has exactly one."""
        lines = [json.loads(line) for line in self.output.read_bytes().splitlines()]
        assert len({line["id"] for line in lines}) == len({line["custom_id"] for line in lines}) == len(lines)
        assert all(line["error"] is None for line in lines)
        return {line["custom_id"]: line["response"] for line in lines}


@pytest.fixture
def runs(processes: ForkServerContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(processes, tmp_path, monkeypatch)


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def sums(count: int) -> str:
    return "".join(
        request(f"sum-{i}", prompt=f"{i % 900 + 50}+{i % 17}=", max_tokens=6, temperature=1.0, seed=i)
        for i in range(count)
    )


def engines_of(process: ForkServerProcess) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_requests_of_all_kinds_have_the_answers_of_the_library_and_bad_ones_their_reason(runs: Runs) -> None:
    chat = {"messages": [{"role": "user", "content": "12+30"}], "chat_template": TEMPLATE, "temperature": 0}
    sort = {"prompt": "sort zebra=", "max_tokens": 8}
    prompts = ["rev oceanic=", "417+385="]
    lines = [
        request("greedy", model="demo", prompt=prompts[1], max_tokens=8, temperature=0),
        "\n",
        request("two prompts", prompt=prompts, max_tokens=8, temperature=0),
        request("seeded", **sort, temperature=1.3, seed=5, n=2, logprobs=1),
        request("turn", "/v1/chat/completions", **chat, max_tokens=8),
        request("form", **sort, structured_outputs={"regex": "[0-9]{3}"}),
        request("adapter", model="loud", prompt=prompts[1], max_tokens=8, temperature=0),
        request("other model", model="gpt", prompt="1+1="),
        request("wrong type", prompt="1+1=", max_tokens="many"),
        request("out of range", prompt="1+1=", temperature=-1),
        request("too long", prompt="1+1=" * 500),
        request("stream", prompt="1+1=", stream=True),
        request("no messages", "/v1/chat/completions"),
        request("response", "/v1/responses", input="12+30", max_output_tokens=4, temperature=0),
        request("score", "/v1/score", text_1="12+30=", text_2="12+30="),
    ]
    runs.input.write_text("".join(lines))
    config = runs.input.with_name("batch.toml")
    loud = runs.input.with_name("loud")
    write_adapter(loud, 1.0)
    modules = f'lora_modules = ["loud={loud}"]'
    config.write_text(f"[server]\ntrust_request_chat_template = true\nmax_waiting = 0\n{modules}\n")
    template = runs.input.with_name("template.jinja")
    template.write_text(TEMPLATE)
    options = ("--config", str(config), "--max-batch-size", "4", "--max-sequence-length", "256")
    options += ("--chat-template", str(template))
    assert runs.finish(*options) == 2  # some could not be served

    answers = runs.answers()
    texts = {
        name: [choice.get("text", choice.get("message", {}).get("content")) for choice in answer["body"]["choices"]]
        for name, answer in answers.items()
        if answer["status_code"] == 200 and "choices" in answer["body"]
    }
    response = answers.pop("response")["body"]
    assert answers.pop("score")["body"]["data"][0]["score"] == pytest.approx(1, abs=1e-3)
    with LLM("demo", device="cpu", max_batch_size=4, max_sequence_length=256, max_adapters=1) as llm:
        adapters = [None, None, None, LoRARequest("loud", 1, loud)]
        params = SamplingParams(temperature=0, max_tokens=8)
        greedy = llm.generate([*prompts, "12+30=", prompts[1]], params, lora_request=adapters)
        seeded = llm.generate("sort zebra=", SamplingParams(temperature=1.3, seed=5, n=2, max_tokens=8))
    rev, total, turn, adapted = [output.outputs[0].text for output in greedy]
    assert response["output"][0]["content"][0]["text"] == turn
    assert texts.pop("form")[0].isdigit()
    assert texts == {
        "greedy": [total],
        "two prompts": [rev, total],
        "seeded": [each.text for each in seeded[0].outputs],
        "turn": [turn],
        "adapter": [adapted],
    }
    assert adapted != total
    errors = {name: answer["body"]["error"] for name, answer in answers.items() if name not in {*texts, "form"}}
    assert {name: (answers[name]["status_code"], error["param"]) for name, error in errors.items()} == {
        "other model": (404, "model"),
        "wrong type": (400, "max_tokens"),
        "out of range": (400, "temperature"),
        "too long": (400, None),
        "stream": (400, "stream"),
        "no messages": (400, "messages"),
    }
    assert errors["too long"]["code"] == "context_length_exceeded"
    assert all(error["message"] and error["type"].endswith("_error") for error in errors.values())

    before = runs.output.read_bytes()
    assert runs.finish(*options) == 2
    assert runs.output.read_bytes() == before, "what has its answer is done again"


def test_where_all_requests_are_refused_the_engine_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(request("out of range", prompt="1+1=", temperature=-1))
    result = run_command("batch", "in.jsonl", "out.jsonl", "--model", "demo", folder=tmp_path)
    assert result.returncode == 2
    assert "1 requests in" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_is_answered_once_though_the_run_is_killed_three_times(runs: Runs, seed: int) -> None:
    chosen = random.Random(seed)
    runs.input.write_text(sums(NUM_LINES))
    written = b""  # whole lines, which no later run may touch
    for _ in range(3):
        moment = written.count(b"\n") + chosen.randrange(NUM_LINES // 4)
        process = runs.start("--max-batch-size", "4")
        until(lambda moment=moment: num_lines(runs.output) >= moment, "so many lines")
        (engine,) = engines_of(process) or [None]
        process.kill()
        process.join()
        assert num_lines(runs.output) < NUM_LINES, "it had ended before it was killed"
        with runs.output.open("ab") as file:  # as a kill between two halves of a line would leave it
            file.write(b'{"id": "batch_req_1f", "custom_id": "sum-1", "resp'[: chosen.randrange(50)])
        until(lambda engine=engine: engine is None or not Path(f"/proc/{engine}/exe").exists(), "the engine ends")
        torn = runs.output.read_bytes()
        assert torn.startswith(written), (seed, moment)
        written = torn[: torn.rfind(b"\n") + 1]
    assert runs.finish("--max-batch-size", "4") == 0
    assert runs.output.read_bytes().startswith(written)
    answers = runs.answers()
    assert set(answers) == {f"sum-{i}" for i in range(NUM_LINES)}
    assert {answer["status_code"] for answer in answers.values()} == {200}


def test_ctrl_c_leaves_whole_lines_and_no_engine(runs: Runs) -> None:
    runs.input.write_text(sums(300))
    process = runs.start("--max-batch-size", "4")
    until(lambda: num_lines(runs.output) >= 20, "some lines")
    (engine,) = engines_of(process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(DEADLINE_SECONDS)
    assert process.exitcode == 130
    assert not Path(f"/proc/{engine}/exe").exists()
    assert runs.output.read_bytes().endswith(b"\n")
    assert 20 <= len(runs.answers()) < 300


@pytest.mark.skipif(not AT_LENGTH, reason="GRAPHDECODE_AT_LENGTH=1 runs it: an engine that starts twice takes long")
def test_requests_in_flight_are_retried_when_the_engine_dies(runs: Runs) -> None:
    runs.input.write_text(sums(NUM_LINES))
    process = runs.start("--max-batch-size", "4")
    until(lambda: num_lines(runs.output) >= NUM_LINES // 3, "some lines")
    os.kill(engines_of(process)[0], signal.SIGKILL)
    assert num_lines(runs.output) < NUM_LINES, "it had ended before the engine was killed"
    process.join(DEADLINE_SECONDS)
    assert process.exitcode == 0
    assert {answer["status_code"] for answer in runs.answers().values()} == {200}
    assert len(runs.answers()) == NUM_LINES


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "has no requests"),
        (request("a") + "{'custom_id'\n", "line 2: Invalid JSON"),
        (request("a") + "\n" + request("b") + request("a"), "lines 1 and 4 share a custom_id: 'a'"),
        ('{"method": "POST", "url": "/v1/completions", "body": {}}\n', "line 1: custom_id is required"),
        ("x\n" * 12, "line 10: Invalid JSON: expected value at line 1 column 1"),
        (request("a").replace("/v1/", "/v2/"), "line 1: url must be '/v1/"),
        (request("a").replace("POST", "GET"), "line 1: method must be 'POST', got 'GET'"),
        (request("a", "/v1/tokenize"), "line 1: url must be '/v1/completions' or"),
        (request("a").replace("{}", "[]"), "line 1: body must be an object, got []"),
        (request(""), "line 1: custom_id: String should have at least 1 character"),
        (request("a").replace("a", "\ud800", 1), "line 1: Invalid JSON"),
    ],
)
def test_a_bad_line_is_named_before_a_model_is_looked_for(lines: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines.encode(errors="surrogatepass"))
    result = run_command("batch", "in.jsonl", "out.jsonl", "--model", "no-such-model", folder=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_line_that_is_too_long_is_named_and_not_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(request("a") + request("b", prompt="1" * 1000))
    assert BatchInput(file, 2000).custom_ids == {"a": 1, "b": 2}
    with pytest.raises(ArgumentError, match="line 2 .*500"):
        BatchInput(file, 500)


def test_the_input_cannot_be_the_output(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(request("a"))
    result = run_command("batch", "in.jsonl", "in.jsonl", folder=tmp_path)
    assert (result.returncode, (tmp_path / "in.jsonl").read_text()) == (2, request("a"))
    assert "must be two files" in result.stderr


ANSWER = '{"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": null}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a letter to my aunt\n", "line 1 is not a batch response"),
        (ANSWER + "a letter without an end", "line 2 is not a batch response"),
        (ANSWER + ANSWER, "line 2 is a second response to 'a'"),
        (ANSWER.replace('"a"', '"c"'), "line 1 responds to 'c', which the input does not have"),
        (ANSWER.replace("200", "null"), "line 1 is not a batch response"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_was(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        BatchOutput(file, {"a": 1, "b": 2})
    assert file.read_text() == text


def test_an_incomplete_last_line_is_dropped_and_its_request_runs_again(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    second = ANSWER.replace('"a"', '"b"')
    for cut in range(len(second)):
        file.write_text(ANSWER + second[:cut])
        output = BatchOutput(file, {"a": 1, "b": 2})
        output.add("b", "2", 500, {"error": {}})
        assert output.answered == {"a", "b"}
        assert output.num_failed == 1
        output.close()
        first, last = file.read_text().splitlines(keepends=True)
        assert (first, json.loads(last)["custom_id"]) == (ANSWER, "b")


def test_a_response_cut_by_a_full_disk_is_requested_again(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(ANSWER)
    output = BatchOutput(file, {"a": 1, "b": 2})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(ANSWER) + 40, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            output.add("b", "2", 200, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        output.close()
    assert file.stat().st_size == len(ANSWER) + 40
    again = BatchOutput(file, {"a": 1, "b": 2})
    assert again.answered == {"a"}
    again.close()


def test_answers_go_into_a_file_alone(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="must be a file"):
        BatchOutput(tmp_path, {"a": 1})
    with pytest.raises(ArgumentError, match="must be a file"):
        BatchOutput(Path("/dev/full"), {"a": 1})
    with pytest.raises(ArgumentError, match="missing"):
        BatchOutput(tmp_path / "missing" / "out.jsonl", {"a": 1})


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    output = BatchOutput(file, {"a": 1})
    with pytest.raises(ArgumentError, match="out.jsonl"):
        BatchOutput(file, {"a": 1})
    output.close()
    BatchOutput(file, {"a": 1}).close()


def test_requests_are_read_when_they_are_needed(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(sums(2000))
    requests = BatchInput(file, 1 << 20)
    taken = iter(requests)
    assert [each.custom_id for each in itertools.islice(taken, 3)] == ["sum-0", "sum-1", "sum-2"]
    os.truncate(file, 0)
    with pytest.raises(ArgumentError, match=r"line \d\d: Invalid JSON"):  # the rest of a buffer was read, and no more
        list(taken)
