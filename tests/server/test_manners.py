"""A server's manners: who leaves frees his row, who comes too late or too much is told so, who is told to end ends."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from served import AT_LENGTH, ROOT, Served, children_of, serving, until

from graphdecode.config import ServerConfig
from graphdecode.server.app import allowed_host_names

LONG = {"prompt": "abc", "max_tokens": None, "ignore_eos": True, "temperature": 0}
HEADERS = "Host: localhost\r\nContent-Type: application/json\r\n"
SHORT = {"prompt": "12+30=", "max_tokens": 8, "temperature": 0}
HANG_SECONDS = 60


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    file = ("--max-batch-size", "2", "--max-sequence-length", "512")
    with serving(*file, "--config", os.environ["SERVED_CONFIG"]) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path = tmp_path_factory.mktemp("server") / "server.toml"
    path.write_text(
        "[server]\nmax_waiting = 2\nmax_body_bytes = 20000\nidle_timeout_s = 1.0\nrequest_timeout_s = 30.0\n"
        'max_connections = 40\nallowed_hosts = ["my.machine"]\n'
        'cors_origins = ["http://page.example"]\n'
    )
    os.environ["SERVED_CONFIG"] = str(path)
    yield
    del os.environ["SERVED_CONFIG"]


def answers(served: Served) -> str:
    with served.client() as http:
        return str(http.post("/v1/completions", json=SHORT).json()["choices"][0]["text"]).strip()


def begin(served: Served, body: dict[str, object], *, times: int = 1, window: int = 1 << 16) -> socket.socket:
    """Send a request, or several in one piece, and return the connection once the first event has come."""
    host, port = served.address.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(HANG_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    connection.connect((host, int(port)))
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\n{HEADERS}Content-Length: {len(content)}\r\n\r\n".encode()
    connection.sendall((head + content) * times)
    assert b"200 OK" in connection.recv(4096)
    return connection


def received_by(connection: socket.socket) -> bytes:
    """Return what comes until the server closes a connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_a_disconnect_frees_row_and_pages(served: Served) -> None:
    half, whole = (
        lambda connection: connection.shutdown(socket.SHUT_WR),
        lambda connection: connection.shutdown(socket.SHUT_RDWR),
    )
    for leave in (socket.socket.close, half, whole):
        connections = [begin(served, LONG) for _ in range(2)]
        for connection in connections:
            leave(connection)
        served.until_idle()
    with served.client() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=LONG | {"n": 2}, timeout=httpx.Timeout(HANG_SECONDS, read=0.02))
    served.until_idle()
    assert answers(served) == "42"


def test_a_client_that_reads_nothing_is_disconnected(served: Served) -> None:
    wordy = LONG | {"logprobs": 20, "return_token_ids": True, "prompt": "1" * 200, "n": 4}  # 1.5 MB each
    descriptors = served.descriptors
    with begin(served, wordy, times=20, window=4096) as connection:
        assert served.descriptors > descriptors
        until(lambda: served.descriptors <= descriptors)
        served.until_idle()
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(1 << 16):
                received += piece
        assert received.count(b"[DONE]") < 20
    assert answers(served) == "42"


def test_requests_in_one_piece_are_answered_in_their_order(served: Served) -> None:
    with served.connection() as connection:
        requests = []
        for a in range(1, 5):
            content = json.dumps(SHORT | {"prompt": f"{a}0+{a}0="}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\n{HEADERS}Content-Length: {len(content)}\r\n\r\n"
            requests.append(head.encode() + content)
        connection.sendall(b"".join(requests) + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        received = received_by(connection)
    assert [text.strip() for text in re.findall(r'"text":"([^"]*)"', received.decode())] == ["20", "40", "60", "80"]
    assert received.count(b"200 OK") == 5


def test_a_full_queue_is_429_with_retry_after(served: Served) -> None:
    with served.client() as http:
        assert http.post("/v1/completions", json=SHORT | {"n": 5}).status_code == 400  # that will never have room
        with begin(served, LONG | {"n": 4}):
            refused = http.post("/v1/completions", json=SHORT | {"n": 4})
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        served.until_idle()
        assert http.post("/v1/completions", json=SHORT | {"n": 4}).status_code == 200


def test_openais_client_retries_after_429_and_times_out(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key="any", max_retries=5) as client:
        waiting = [begin(served, LONG | {"n": 2}) for _ in range(2)]  # all there is room for
        answer = client.completions.with_raw_response.create(model="demo", **SHORT)
        assert answer.retries_taken >= 1
        assert answer.parse().choices[0].text.strip() == "42"
        for connection in waiting:
            connection.close()
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.05, max_retries=0).completions.create(
                model="demo", prompt="abc", extra_body=LONG
            )
    served.until_idle()


def test_a_body_that_is_too_large_or_never_comes_is_refused(served: Served) -> None:
    with served.client() as http:
        assert http.post("/v1/completions", json=SHORT | {"prompt": "1" * 30_000}).status_code == 413
    with served.connection() as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{HEADERS}Content-Length: 100\r\n\r\n{{".encode())
        assert b"408" in connection.recv(4096)
    with served.connection() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHo")  # and never ends its headers
        assert b"200" not in connection.recv(4096)  # the server hangs up
    assert answers(served) == "42"


def test_small_callers_do_not_wait_for_large_ones_and_priorities_come_first() -> None:
    async def ask(http: httpx.AsyncClient, key: str, prompt: str, tokens: int, priority: int = 0, n: int = 1) -> None:
        body = LONG | {"prompt": prompt, "max_tokens": tokens, "priority": priority, "n": n}
        answer = await http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200

    async def main(server: Served) -> None:
        async with httpx.AsyncClient(base_url=server.address, timeout=4 * HANG_SECONDS) as http:
            tasks = [asyncio.create_task(ask(http, "greedy", "much", 500, n=20)) for _ in range(3)]
            while server.metric("vllm:num_requests_waiting") < 6:
                assert not any(task.done() for task in tasks)
                await asyncio.sleep(0.01)
            tasks.append(asyncio.create_task(ask(http, "greedy", "urgent", 20, priority=-1)))
            await asyncio.sleep(0.1)  # sent first; without priorities it would still wait for the other one
            tasks.append(asyncio.create_task(ask(http, "modest", "modest", 20)))
            await asyncio.gather(*tasks)

    options = ("--max-batch-size", "1", "--api-key", "greedy", "--api-key", "modest", "--log-requests")
    with serving(*options) as server:
        asyncio.run(main(server))
        answered = re.compile(r" 0: '(\w+)' -> ")
        until(lambda: len(answered.findall("".join(server.lines))) == 5)  # they come through a pipe
        ended = answered.findall("".join(server.lines))
    _, second, _ = (place for place, prompt in enumerate(ended) if prompt == "much")
    assert ended.index("modest") < second  # it waited for what ran, and for nothing that only waited
    assert ended.index("urgent") < ended.index("modest")


def test_origins_are_let_in_by_name_alone(served: Served) -> None:
    with served.client() as http:
        for origin, allowed in (("http://page.example", "http://page.example"), ("http://other.example", None)):
            asked = http.get("/v1/models", headers={"Origin": origin})
            assert asked.headers.get("access-control-allow-origin") == allowed


def test_responses_on_an_open_connection_are_not_delayed(served: Served) -> None:
    """With Nagle's algorithm each waits 40 ms for the client to confirm the answer's head."""
    connection, seconds = http.client.HTTPConnection(served.address.removeprefix("http://"), timeout=60), []
    for _ in range(20):
        began = time.monotonic()
        connection.request("POST", "/tokenize", json.dumps({"prompt": "a"}), {"Content-Type": "application/json"})
        assert connection.getresponse().read()
        seconds.append(time.monotonic() - began)
    connection.close()
    assert min(seconds) < 0.03


def test_where_few_files_may_be_open_fewer_connections_are() -> None:
    """Connections that were accepted but not yet counted or closed have files, too."""
    program = """
import resource
from graphdecode.server.run import open_files
for hard in (4096, 1024):
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    connections, backlog = open_files(1000)
    print(connections, backlog, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    rows = [tuple(map(int, line.split())) for line in told.stdout.splitlines()]
    assert [connections for connections, _, _ in rows] == [1000, 384]
    assert all(connections + 4 * backlog < files for connections, backlog, files in rows)
    assert "1024 open files" in told.stderr


def test_connections_that_come_and_go_leave_nothing(served: Served) -> None:

    def storm(count: int) -> None:
        draw = random.Random(count)
        for _ in range(count):
            with served.connection() as connection:
                if draw.random() < 0.5:
                    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"[: draw.randrange(40)])

    count = 10_000 if AT_LENGTH else 1000
    storm(count // 2)  # timers of what was dropped live on for a second: that many take their room
    time.sleep(1.5)
    before, memory = served.descriptors, served.resident_bytes
    storm(count)
    until(lambda: served.descriptors <= before)
    assert served.resident_bytes - memory < 8 << 20
    assert answers(served) == "42"


def test_a_name_that_is_not_the_servers_own_is_refused(served: Served) -> None:
    port = served.address.rpartition(":")[2]
    own = f"localhost localhost:{port} LOCALHOST. 127.0.0.1 [::1]:{port} 192.168.1.7:80 my.machine:1".split()
    with served.client() as http:
        for path in ("/v1/models", "/", "/metrics", "/live"):
            for host in own:
                assert http.get(path, headers={"Host": host}).status_code == 200, host
            for host in ("rebound.example", f"rebound.example:{port}", "localhost.example", "127.0.0.1.example", ""):
                refused = http.get(path, headers={"Host": host})
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host"), host


def test_host_names_are_checked_on_loopback_or_if_some_are_allowed() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert allowed_host_names(ServerConfig(host=host)) == ()
    for host in ("0.0.0.0", "::", "192.168.1.7", "machine.example"):
        assert allowed_host_names(ServerConfig(host=host)) is None
        assert allowed_host_names(ServerConfig(host=host, allowed_hosts=["a.example"])) == ("a.example",)
    assert allowed_host_names(ServerConfig(allowed_hosts=["a.example", "*"])) is None


def answers_on(connection: socket.socket) -> None:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"200 OK" in connection.recv(4096)


def test_connections_beyond_the_limit_get_503_or_are_closed(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(served.connection()) for _ in range(40)]
        told = stack.enter_context(served.connection())
        told.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head, _, body = received_by(told).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in head
        assert json.loads(body)["error"]["type"] == "server_error"
        for number in range(300):
            stack.enter_context(served.connection())
            if number % 20 == 0:  # else it has been idle for a second where the machine is slow
                answers_on(opened[0])
        end = time.monotonic() + HANG_SECONDS
        while (
            served.descriptors >= 40 + 64 + 30
        ):  # those that were taken in one turn of its loop are closed in the next
            assert time.monotonic() < end
            answers_on(opened[0])
            time.sleep(0.05)
        answers_on(opened[0])  # who was there is still served

    def is_answered() -> bool:
        with contextlib.suppress(httpx.TransportError, KeyError):
            return answers(served) == "42"
        return False

    until(is_answered)


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /" + b"x" * 1000,
        b"GET /health HTTP/1.1\r\nX-One: " + b"x" * 1000,
        b"GET /health HTTP/1.1\r\n" + b"X-Many: x\r\n" * 100,
        f"POST /v1/completions HTTP/1.1\r\n{HEADERS}Transfer-Encoding: chunked\r\n\r\n0\r\nX-Last: ".encode(),
        b"\r\n",
    ],
    ids=["target", "header", "headers", "trailer", "lines"],
)
def test_a_head_without_end_ends(served: Served, endless: bytes) -> None:
    memory = served.resident_bytes
    with served.connection() as connection:
        sent, received, end = 0, b"", time.monotonic() + HANG_SECONDS
        connection.sendall(endless)
        more = endless if endless.startswith(b"\r") else b"X-Many: x\r\n" * 100 if b"Many" in endless else b"x" * 1000
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.settimeout(0.01)
            while time.monotonic() < end and not received:
                sent += connection.send(more)
                with contextlib.suppress(TimeoutError):
                    received = connection.recv(4096) or b"closed"
    assert time.monotonic() < end
    assert sent < 1 << 20
    assert served.resident_bytes - memory < 8 << 20
    assert not received or received == b"closed" or received.startswith(b"HTTP/1.1 4")
    assert answers(served) == "42"


def test_sigterm_finishes_running_requests_and_refuses_new_ones() -> None:
    with serving("--max-batch-size", "2", "--max-sequence-length", "4096", "--log-requests") as server:
        connection = begin(server, LONG | {"n": 16})
        server.process.send_signal(signal.SIGTERM)
        server.until_said("a second signal ends immediately")
        with server.client() as http:
            assert http.get("/health").status_code == 503
            refused = http.post("/v1/completions", json=SHORT)
            assert refused.status_code == 503
            assert refused.headers["Retry-After"]
        received = received_by(connection)
        assert b'"finish_reason":"length"' in received
        assert b"[DONE]" in received
        assert server.process.wait(HANG_SECONDS) == 0
        assert any("'abc' ->" in line for line in server.lines)


def test_requests_beyond_drain_timeout_end_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text("[server]\ndrain_timeout_s = 0.1\n")
    options = ("--max-batch-size", "1", "--max-sequence-length", "4096", "--config", str(tmp_path / "short.toml"))
    with serving(*options) as server:
        connection = begin(server, LONG | {"n": 120})
        server.process.send_signal(signal.SIGTERM)
        received = received_by(connection)
        assert b'"code":"shutting_down"' in received
        assert b"[DONE]" in received[-100:]
        assert server.process.wait(HANG_SECONDS) == 0
        assert any("was cut off" in line for line in server.lines)


def test_ctrl_c_during_imports_ends_in_one_line() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "graphdecode", "serve", "--model", "demo", "--port", "0", "--device", "cpu"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    while not any("engine_process" in command for _, command in children_of(process.pid)):
        time.sleep(0.01)
    time.sleep(0.2)
    (engine,) = (pid for pid, command in children_of(process.pid) if "engine_process" in command)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=HANG_SECONDS)
    # nothing is said while the server itself is still imported
    assert (process.returncode, errors.removeprefix("INFO: stopping before the model is loaded\n")) == (130, "")
    until(lambda: not Path(f"/proc/{engine}").exists())


def test_a_second_sigterm_ends_at_once() -> None:
    with serving("--max-batch-size", "2", "--max-sequence-length", "4096") as server:
        connection = begin(server, LONG | {"n": 16})
        server.process.send_signal(signal.SIGTERM)
        server.until_said("a second signal ends immediately")
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(HANG_SECONDS)
        received = received_by(connection)
        assert b'"message":"the server was shut down"' in received
        connection.close()
