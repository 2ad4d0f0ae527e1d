"""What one request may take of the server that others need: forms and bodies of any kind keep nobody waiting."""

import asyncio
import json
import os
import re
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from served import Served, children_of, health_beside, serving, until

from graphdecode.server.http import MAX_LARGE_BODIES

SHORT = {"prompt": "12+30=", "max_tokens": 8, "temperature": 0}
LONG = {"prompt": "abc", "max_tokens": None, "ignore_eos": True, "temperature": 0}
ROWS, WAITING, BODY_BYTES = 2, 3, 2 << 20
JSON = {"Content-Type": "application/json"}
HANG_SECONDS = 60


def endless(seed: str) -> dict[str, Any]:
    """Return a form of some hundred bytes for which llguidance needs hours."""
    schema = {"type": "string", "allOf": [{"pattern": f".*{chr(97 + i)}{seed}.*"} for i in range(24)]}
    return SHORT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("server") / "server.toml"
    file.write_text(f"[server]\nmax_waiting = {WAITING}\nmax_body_bytes = {BODY_BYTES}\n")
    sizes = ("--max-batch-size", str(ROWS), "--max-sequence-length", "4096")
    with serving("--config", str(file), *sizes) as server:
        with server.client() as http:  # so that what reads forms runs
            assert http.post("/v1/completions", json=SHORT | {"structured_outputs": {"choice": ["a"]}}).is_success
        yield server


def reader_of(served: Served) -> int:
    (server,) = (pid for pid, command in children_of(served.process.pid) if "fork_server" in command)
    return server


def readers_children(served: Served) -> list[int]:
    """Return the processes in which requests are read."""
    return [pid for pid, _ in children_of(reader_of(served))]


def read_seconds(served: Served) -> float:
    """Wait until nothing is read; return the processor time of all that has been read."""
    until(lambda: not readers_children(served))
    fields = Path(f"/proc/{reader_of(served)}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")  # cutime, cstime


def told(http: httpx.Client, body: dict[str, Any]) -> tuple[int, str]:
    answer = http.post("/v1/completions", json=body)
    while (
        answer.status_code == 503 and "it did not finish in" in answer.text
    ):  # beside other load, which takes the time
        answer = http.post("/v1/completions", json=body)
    content = answer.json()
    said = content["error"]["message"] if "error" in content else content["choices"][0]["text"]
    return answer.status_code, said.strip()


def test_a_schema_that_never_compiles_is_refused_and_the_refusal_cached(served: Served) -> None:
    before = read_seconds(served)
    with served.client() as http:
        status, message = told(http, endless(""))
        assert status == 400
        limits = "(4 s of a processor|512 MiB of memory or 4 MiB of stack)"  # whichever comes first
        assert re.fullmatch(f"response_format: reading the json takes more than {limits}", message)
        once = read_seconds(served) - before
        assert once > 0
        assert told(http, endless("")) == (status, message)
    assert read_seconds(served) - before < 1.5 * once  # it is not read again


def test_a_disconnect_cancels_the_compilation_of_its_grammar(served: Served) -> None:
    before = read_seconds(served)
    connections = [served.connection() for _ in range(8)]
    for number, connection in enumerate(connections):
        content = json.dumps(endless(str(number))).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    until(lambda: readers_children(served))
    for connection in connections:
        connection.close()
    with served.client() as http:
        assert told(http, SHORT | {"structured_outputs": {"regex": "4[12]"}})[0] == 200
    assert read_seconds(served) - before < 4  # as long as a single one of them may take
    assert httpx.get(f"{served.address}/load").json()["server_load"] == 0


def test_a_schema_that_no_text_matches_is_400(served: Served) -> None:
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    with served.client() as http:
        status, message = told(http, SHORT | {"structured_outputs": {"json": loop}})
    assert status == 400
    assert message.startswith("structured_outputs: json ")


def test_a_grammar_that_becomes_too_complex_while_generating_is_400(served: Served) -> None:
    count = 800
    rules = "\n".join(f"r{number}: r{number + 1} | r{number + 1} r{number + 1}" for number in range(count))
    grammar = f'start: r0\n{rules}\nr{count}: "a"'
    with served.client() as http:
        status, message = told(http, SHORT | {"structured_outputs": {"grammar": grammar}})
    assert status == 400
    assert "its grammar cannot be followed further: Parser Error: Current row has " in message


def test_a_grammar_that_crashes_the_library_affects_no_other_request(served: Served) -> None:
    engine = served.engine_pid
    with served.client() as http:
        for depth in (2000, 3000, 6000):
            rules = "\n".join(f"r{number}: r{number + 1}" for number in range(depth))
            grammar = f'start: r0\n{rules}\nr{depth}: "a"'
            assert told(http, SHORT | {"structured_outputs": {"grammar": grammar}})[0] in (200, 400)
        assert told(http, SHORT) == (200, "42")
    assert served.engine_pid == engine


LARGE = {
    "wrong types": ("/v1/completions", b'{"prompt": [' + b"null, " * 300_000 + b"null]}", 400),
    "wrong types of lists": ("/v1/completions", b'{"prompt": [' + b"[1,null], " * 150_000 + b"[]]}", 400),
    "wrong messages": ("/v1/chat/completions", b'{"messages": [' + b"1, " * 500_000 + b"1]}", 400),
    "wrong biases": (
        "/v1/completions",
        json.dumps({"prompt": "", "logit_bias": dict.fromkeys(map(str, range(50_000)), "")}).encode(),
        400,
    ),
    "token ids": ("/v1/completions", b'{"prompt": [' + b"50, " * 250_000 + b"50]}", 400),
    "tokens of a text": ("/tokenize", json.dumps({"prompt": "ab " * 100_000, "return_token_strs": True}).encode(), 200),
    "words for each prompt": (
        "/v1/completions",
        json.dumps({"prompt": ["a"] * 1024, "bad_words": [f"w{number}" for number in range(128)]}).encode(),
        400,
    ),
    "words for some prompts": (
        "/v1/completions",
        json.dumps({"prompt": ["a"] * 5, "max_tokens": 1, "bad_words": [f"w{i}" for i in range(60)]}).encode(),
        200,
    ),
    "too many words": (
        "/v1/completions",
        json.dumps({"prompt": "a", "bad_words": [f"w{number}" for number in range(4500)]}).encode(),
        400,
    ),
    "text of tokens": ("/detokenize", b'{"tokens": [' + b"50, " * 250_000 + b"50]}", 200),
}


def test_no_large_body_blocks_other_requests(served: Served) -> None:
    """Each of these once took seconds; half of the bound is for a machine on which the server waits for others."""

    def ask() -> None:
        with served.client() as http:
            for name, (path, content, status) in LARGE.items():
                answer = http.post(path, content=content, headers=JSON)
                assert answer.status_code == status, f"{name}: {answer.text[:300]}"
                assert len(answer.content) < 500 or status == 200

    assert any(health_beside(served, ask) < 0.2 for _ in range(4))  # what keeps others waiting does so each time


def test_many_medium_bodies_at_once_do_not_block_other_requests(served: Served) -> None:
    """Together they take 0.6 s to tokenize, and half as much is more than the bound."""
    body = json.dumps({"prompt": "1234567890" * 3200})

    async def asked() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.address, timeout=60, limits=limits) as http:
            answers = await asyncio.gather(*(http.post("/tokenize", content=body, headers=JSON) for _ in range(64)))
            return [answer.json()["count"] for answer in answers]

    assert any(health_beside(served, lambda: asyncio.run(asked())) < 0.1 for _ in range(3))
    assert set(asyncio.run(asked())) == {32_000}


def test_of_simultaneous_requests_only_as_many_are_admitted_as_fit(served: Served) -> None:
    async def main() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.address, timeout=60, limits=limits) as http:
            asked = (http.build_request("POST", "/v1/completions", json=LONG | {"stream": True}) for _ in range(40))
            answers = await asyncio.gather(*(http.send(request, stream=True) for request in asked))
            for answer in answers:
                await answer.aclose()
            return [answer.status_code for answer in answers]

    assert Counter(asyncio.run(main())) == {200: ROWS + WAITING, 429: 40 - ROWS - WAITING}
    served.until_idle()


def test_an_admission_lasts_while_the_grammar_is_compiled(served: Served) -> None:
    properties = {f"p{index}": {"type": "string"} for index in range(1500)}
    slow = {"type": "object", "properties": properties, "required": ["p0"]}
    answers: list[int] = []
    with served.client() as http:

        def ask() -> None:
            answers.append(
                http.post("/v1/completions", json=SHORT | {"structured_outputs": {"json": slow}}).status_code
            )

        until(lambda: not readers_children(served))
        first = threading.Thread(target=ask)
        first.start()
        until(lambda: readers_children(served))
        everything = LONG | {"prompt": ["abc"] * (ROWS + WAITING), "stream": True}
        with http.stream("POST", "/v1/completions", json=everything) as second:
            first.join(HANG_SECONDS)
            assert (answers, second.status_code) == ([200], 429)
        refused = SHORT | {"structured_outputs": {"json": {"not": {}}}}
        assert http.post("/v1/completions", json=refused).status_code == 400
        until(lambda: http.get("/load").json()["server_load"] == 0)  # whatever became of a request, its place is free
    served.until_idle()


def test_bodies_that_are_not_finished_take_no_more_memory_than_some(served: Served) -> None:
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connections = []
    for _ in range(MAX_LARGE_BODIES + 3):
        connection = served.connection()
        connections.append(connection)
        connection.sendall(f"{head}Content-Length: {BODY_BYTES}\r\n\r\n".encode() + b" " * (BODY_BYTES - 1))
    until(lambda: len(select.select(connections, [], [], 0.1)[0]) == 3)
    with served.client() as http:
        assert told(http, SHORT) == (200, "42")
        replied, _, _ = select.select(connections, [], [], 0)
        assert [b" 429 " in connection.recv(4096) for connection in replied] == [True] * 3
        for connection in connections:
            connection.close()
        large = {"prompt": " " * 100_000}
        until(lambda: http.post("/tokenize", json=large).status_code == 200)  # those are gone soon


@pytest.mark.slow
def test_an_engine_that_stands_still_is_noticed_and_started_again(served: Served) -> None:
    engine = served.engine_pid
    os.kill(engine, signal.SIGSTOP)
    began = time.monotonic()
    with served.client() as http:
        for status in (503, 200):
            while http.get("/health").status_code != status:
                assert time.monotonic() - began < (60 if status == 503 else 150)
                time.sleep(0.1)
        assert told(http, SHORT) == (200, "42")
    assert served.engine_pid != engine
    assert any("does not respond" in line for line in served.lines)
