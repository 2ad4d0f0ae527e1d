"""Replicas and batches on a real local Ray, under load, with kills; each part is a function.

Ray listens on the loopback interface, has its own folder, and leaves no process. A part takes
one to four minutes; `--part` runs some of them, and the file keeps the results of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx2 as httpx
import typer

from harness import Model, Out, read, record, until, write

SILENT_SECONDS = 90.0  # timeout of a stream without data
ANSWERED, TOLD, REFUSED, CUT, SILENT = "answered", "told of an error", "refused", "cut", "silent"
START_SECONDS = 420.0
END_SECONDS = 120.0
ROWS = 32
GENERATED = "vllm:generation_tokens_total"
LARGE_CACHE = "[capacity]\ntotal_num_pages = 1500\nmax_sequence_length = 512\n"
_PATIENCE = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # on the loopback interface
_ALONE |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
_REPLICA = re.compile(r"ray::ServeReplica:graphdecode(-batch)?:replica")
KILL_STREAMS = 200
CLIENTS = 16
SMALL_CACHE = "[capacity]\ntotal_num_pages = 400\nmax_sequence_length = 512\n"  # too small for all prefixes
MAX_LARGE_BODIES = 8
LINES = 5000
RUNS = 4  # all but the last are killed
BATCH_ANSWER_TOKENS = 6
ON_RAY = ("--ray", "--replicas", "2")
END_STREAMS = 64
END_ANSWER_TOKENS = 400
SOON_SECONDS = 5.0
WAYS = {
    "SIGTERM": (signal.SIGTERM,),
    "Ctrl-C": (signal.SIGINT,),
    "SIGTERM twice": (signal.SIGTERM, signal.SIGTERM),
    "SIGKILL": (signal.SIGKILL,),
}
SPEED_STREAMS = 32


@dataclass
class Server:
    """A running server of replicas."""

    model: str  # as on the command line
    address: str
    folder: str  # of Ray's files; identifies its processes
    process: subprocess.Popen[bytes]

    def counts(self, name: str) -> dict[str, float]:
        found = re.findall(rf'^{name}{{replica="(\w+)".*}} (\S+)$', httpx.get(f"{self.address}/metrics").text, re.M)
        return {replica: float(value) for replica, value in found}

    def until_replicas(self, count: int, seconds: float = START_SECONDS) -> float:
        """Wait until `count` replicas serve; return the seconds."""
        name = "vllm:prefix_cache_queries_total"
        began = time.monotonic()
        until(lambda: len(self.counts(name)) == count, seconds, f"not {count} replicas", every=0.5)
        return time.monotonic() - began


@contextmanager
def served(
    model: str, *options: str, replicas: int = 0, settings: str = LARGE_CACHE, folder: str | None = None
) -> Iterator[Server]:
    """Serve a model with a configuration file during the context; `folder`: of a running Ray."""
    with tempfile.TemporaryDirectory(prefix="gd", ignore_cleanup_errors=True) as own:
        config, log = Path(own) / "server.toml", Path(own) / "log"
        config.write_text(settings)
        options = ("--max-batch-size", str(ROWS), "--config", str(config), *options)
        options += ("--replicas", str(replicas)) if replicas else ()
        try:
            with begun(("serve", "--model", model, "--port", "0", *options), log, folder or own) as process:
                server = Server(model, _address_in(log, process), folder or own, process)
                if replicas:
                    server.until_replicas(replicas)
                yield server
        finally:
            if folder is None:
                until_none_is_left(own)


@contextmanager
def begun(arguments: tuple[str, ...], log: Path, folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command on the CPU during the context, with Ray's files in a folder."""
    command = [sys.executable, "-m", "graphdecode", *arguments, "--device", "cpu"]
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=file, stdout=file, env=ray_environment(folder)
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ray_environment(folder: str) -> dict[str, str]:
    return os.environ | _PATIENCE | _ALONE | {"RAY_TMPDIR": folder}


def _address_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    def found() -> str:
        if process.poll() is not None:
            raise RuntimeError(log.read_text()[-2000:])
        said = re.search(r"^serving \S+ on (\S+)", log.read_text(), re.M)
        return said[1] if said else ""

    return until(found, START_SECONDS, "it does not serve")


def replicas_of(folder: str) -> list[int]:
    """Return the processes of a Ray's replicas, whose children are the engines."""
    return [pid for pid in processes_of(folder) if _REPLICA.match(command_of(pid))]


def processes_of(folder: str) -> list[int]:
    """Return a Ray's processes, by environment, or by open logs if a long title replaced the environment."""
    mark = f"RAY_TMPDIR={folder}".encode()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [
        pid
        for pid in pids
        if pid != os.getpid() and (mark in _environment(pid) or any(file.startswith(folder) for file in _files(pid)))
    ]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return []


def _files(pid: int) -> Iterator[str]:
    """Yield the paths of a process's open files."""
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                yield os.readlink(file)


def until_none_is_left(folder: str) -> float:
    """Wait for the end of Ray's processes, and kill remaining ones."""
    began = time.monotonic()
    try:
        until(lambda: not processes_of(folder), END_SECONDS, "processes were left")
    except TimeoutError as error:
        left = {pid: command_of(pid)[:80] for pid in processes_of(folder)}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        raise RuntimeError(f"processes were left: {list(left.values())}") from error
    return time.monotonic() - began


def command_of(pid: int) -> str:
    """Return the command line of a process, or ""."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@dataclass
class Stream:
    """One streamed request; times are of `time.monotonic`."""

    text: str = ""
    replica: str = ""
    began: float | None = None
    ended: float = 0.0
    outcome: str = CUT
    why: str = ""
    gaps: list[float] = field(default_factory=list)


async def ask(http: httpx.AsyncClient, model: str, body: dict[str, Any]) -> Stream:
    """Run one streamed request."""
    stream, last, is_whole = Stream(), time.monotonic(), False
    try:
        async with http.stream("POST", "/v1/completions", json=body | {"model": model, "stream": True}) as response:
            stream.replica = response.headers.get("x-graphdecode-replica", "")
            if response.status_code != 200:
                stream.outcome, stream.why = REFUSED, (await response.aread()).decode()[:200]
            async for line in response.aiter_lines():
                now = time.monotonic()
                if line == "data: [DONE]":
                    stream.outcome = TOLD if stream.why else ANSWERED if is_whole else CUT
                elif line.startswith("data: "):
                    told = json.loads(line.removeprefix("data: "))
                    stream.why = told.get("error", {}).get("message", "")
                    if not stream.why:
                        stream.began = stream.began or now
                        stream.text += told["choices"][0]["text"]
                        is_whole = told["choices"][0]["finish_reason"] is not None
                    stream.gaps.append(now - last)
                    last = now
    except httpx.TimeoutException:
        stream.outcome = SILENT
    except httpx.HTTPError as error:
        stream.outcome, stream.why = CUT, f"{type(error).__name__}: {error}"
    stream.ended = time.monotonic()
    return stream


def client_of(address: str) -> httpx.AsyncClient:
    timeout = httpx.Timeout(10.0, read=SILENT_SECONDS)
    return httpx.AsyncClient(base_url=address, timeout=timeout, limits=httpx.Limits(max_connections=None))


async def ask_all(address: str, model: str, bodies: Iterable[dict[str, Any]]) -> list[Stream]:
    async with client_of(address) as http:
        return list(await asyncio.gather(*(ask(http, model, body) for body in bodies)))


def outcomes(streams: Iterable[Stream]) -> dict[str, int]:
    return dict(Counter(stream.outcome for stream in streams))


def by_replica(streams: Iterable[Stream]) -> list[int]:
    """Return the number of streams of each replica, largest first."""
    return sorted(Counter(stream.replica for stream in streams if stream.replica).values(), reverse=True)


def longest_gap(streams: Sequence[Stream]) -> float:
    """Return the longest time without an event in a stream, including the first."""
    return max(max(stream.gaps, default=0.0) for stream in streams)


def requests_of(count: int, seed: int, tokens: int) -> list[dict[str, Any]]:
    """Return seeded requests without stop tokens."""
    draw = random.Random(seed)
    return [
        {
            "prompt": "sort " + "".join(draw.choices("abcdefghij", k=12)) + "=",
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": number,
            "ignore_eos": True,
        }
        for number in range(count)
    ]


def kill_under_load(model: str, tokens: int, *options: str) -> dict[str, Any]:
    """Kill one of two replicas under 200 streams; the other one takes over those without a first token."""
    with served(model, *options, replicas=2) as server:
        streams, killed, again = asyncio.run(_storm(server, tokens))
        calm = asyncio.run(ask_all(server.address, model, requests_of(KILL_STREAMS, 1, tokens)))
    later = [stream for stream in streams if stream.ended > killed]
    pairs = [
        (one.text, other.text)
        for one, other in zip(streams, calm, strict=True)
        if one.outcome == other.outcome == ANSWERED
    ]
    return {
        "streams": len(streams),
        "outcomes": outcomes(streams),
        "open_when_killed": len(later),
        "outcomes_without_a_token": outcomes(stream for stream in streams if stream.began is None),
        "outcomes_behind_a_token": outcomes(stream for stream in later if stream.began is not None),
        "told": sorted({stream.why for stream in streams if stream.why}),
        "longest_gap_s": longest_gap(streams),
        "two_again_after_s": again,
        "outcomes_after": outcomes(calm),
        "by_replica_after": by_replica(calm),
        "same_text_as_after": [sum(one == other for one, other in pairs), len(pairs)],
    }


async def _storm(server: Server, tokens: int) -> tuple[list[Stream], float, float]:
    """Return the streams, the time of the kill, and the seconds until two replicas served again."""
    async with client_of(server.address) as http:
        bodies = requests_of(KILL_STREAMS, 1, tokens)
        tasks = [asyncio.create_task(ask(http, server.model, body)) for body in bodies]
        end = time.monotonic() + START_SECONDS
        while sum((await asyncio.to_thread(server.counts, GENERATED)).values()) < ROWS * tokens // 4:
            if time.monotonic() > end or all(task.done() for task in tasks):
                raise RuntimeError(str(Counter(task.result().why for task in tasks if task.done())))
            await asyncio.sleep(0.2)
        os.kill(random.Random(2).choice(replicas_of(server.folder)), signal.SIGKILL)
        killed = time.monotonic()
        again = asyncio.create_task(asyncio.to_thread(_two_again, server))
        return await asyncio.gather(*tasks), killed, await again


def _two_again(server: Server) -> float:
    """Wait until the killed replica is gone from the metrics, and then until there are two."""
    return server.until_replicas(1) + server.until_replicas(2)


def scale_by_load(model: str, tokens: int) -> dict[str, Any]:
    """Scale from one to two replicas by load, and back when it ends."""
    settings = LARGE_CACHE + "[replicas]\ntarget_requests = 4\nupscale_delay_s = 1.0\ndownscale_delay_s = 8.0\n"

    async def scaled(server: Server) -> tuple[list[Stream], dict[str, float]]:
        async with Load(server, tokens) as many:
            up = await asyncio.to_thread(server.until_replicas, 2)
            await asyncio.sleep(3)
        async with Load(server, tokens, clients=1) as one:  # continues while the other replica leaves
            down = await asyncio.to_thread(server.until_replicas, 1)
            await asyncio.sleep(1)
        return many.streams + one.streams, {"up_s": up, "down_s": down}

    with served(model, "--autoscale", "1:2", settings=settings) as server:
        return _told(*asyncio.run(scaled(server)))


def scale_by_command(model: str, tokens: int) -> dict[str, Any]:
    """Join a running Ray with one replica; scale to two and back by commands."""

    async def scaled(stack: ExitStack, folder: str, options: tuple[str, ...]) -> tuple[list[Stream], dict[str, float]]:
        async def to(count: int) -> float:
            began = time.monotonic()
            await asyncio.to_thread(stack.enter_context, served(model, *options, replicas=count, folder=folder))
            return time.monotonic() - began

        first = stack.enter_context(served(model, *options, replicas=1, folder=folder))
        async with Load(first, tokens) as load:
            await asyncio.sleep(3)
            up = await to(2)
            await asyncio.sleep(3)
            down = await to(1)
            await asyncio.sleep(3)
        return load.streams, {"up_s": up, "down_s": down}

    with cluster() as (folder, address), ExitStack() as stack:
        options = ("--ray-address", address, "--port", str(free_port()))
        return _told(*asyncio.run(scaled(stack, folder, options)))


@contextmanager
def cluster() -> Iterator[tuple[str, str]]:
    """Start a Ray cluster from the shell; yield its folder and address."""
    with tempfile.TemporaryDirectory(prefix="gd", ignore_cleanup_errors=True) as folder:
        address = f"127.0.0.1:{free_port()}"
        command = ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        command += [f"--port={address.partition(':')[2]}", "--num-cpus=4", "--object-store-memory=200000000"]
        null = subprocess.DEVNULL
        head = subprocess.Popen(command, env=ray_environment(folder), stdin=null, stdout=null, stderr=null)
        try:
            until(lambda: _listens(address), START_SECONDS, "Ray does not begin")
            yield folder, address
        finally:
            head.terminate()
            head.wait(END_SECONDS)
            until_none_is_left(folder)


def _listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as asking:
        return asking.connect_ex((host, int(port))) == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _told(streams: list[Stream], took: dict[str, float]) -> dict[str, Any]:
    return {"requests": len(streams), "outcomes": outcomes(streams), "longest_gap_s": longest_gap(streams)} | took


class Load:
    """Clients that send one request at a time until the end of the context."""

    def __init__(self, server: Server, tokens: int, clients: int = CLIENTS) -> None:
        self._server = server
        self._bodies = iter(requests_of(100_000, 3, tokens))
        self._clients = clients
        self._ended = asyncio.Event()
        self.streams: list[Stream] = []

    async def __aenter__(self) -> Load:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended.set()
        await self._task

    async def _run(self) -> None:
        async with client_of(self._server.address) as http, asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client(http))

    async def _client(self, http: Any) -> None:
        while not self._ended.is_set():
            self.streams.append(await ask(http, self._server.model, next(self._bodies)))


def prefixes(model: str, groups: int = 24, asked: int = 6) -> dict[str, Any]:
    """Measure the share of cached prompt tokens under each routing, for many prompts with few prefixes."""
    draw = random.Random(4)
    beginnings = ["".join(draw.choices("abcdefghijklmnop ", k=300)) for _ in range(groups)]
    bodies = [
        {"prompt": f"{beginning} {number}=", "max_tokens": 4, "temperature": 0}
        for number in range(asked)
        for beginning in beginnings
    ]
    draw.shuffle(bodies)
    found: dict[str, Any] = {"prompts": len(bodies), "beginnings": groups}
    for routing in ("random", "prefix"):
        settings = SMALL_CACHE + f'[replicas]\nrouting = "{routing}"\n'
        with served(model, replicas=2, settings=settings) as server:
            began, streams = time.monotonic(), []
            for start in range(0, len(bodies), MAX_LARGE_BODIES):
                streams += asyncio.run(ask_all(server.address, model, bodies[start : start + MAX_LARGE_BODIES]))
            seconds = time.monotonic() - began
            hits, queries = (server.counts(f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
        if set(outcomes(streams)) != {ANSWERED}:
            raise RuntimeError(str(outcomes(streams)))
        found[routing] = {
            "hit_rate": sum(hits.values()) / sum(queries.values()),
            "by_replica": by_replica(streams),
            "seconds": seconds,
        }
    return found


def batch(model: str, *options: str) -> dict[str, Any]:
    """Kill a batch three times at random, and an engine of the last run: every line must have one output."""
    draw = random.Random(7)
    with tempfile.TemporaryDirectory(prefix="gd", ignore_cleanup_errors=True) as folder:
        asked, answers, log = (Path(folder) / name for name in ("requests.jsonl", "answers.jsonl", "log"))
        asked.write_text("".join(f"{json.dumps(line)}\n" for line in _lines()))
        arguments = ("batch", str(asked), str(answers), "--model", model, "--max-batch-size", str(ROWS), *options)
        moments, began = list[int](), time.monotonic()
        for run in range(RUNS):
            moments.append(min(_line_count(answers) + draw.randrange(LINES // 4), LINES - 100))
            with begun(arguments, log, folder) as process:

                def is_there() -> bool:
                    if process.poll() is not None:
                        raise RuntimeError(log.read_text()[-2000:])
                    return _line_count(answers) > moments[-1]

                until(is_there, 2 * START_SECONDS, "the answers do not come", every=0.02)
                if run < RUNS - 1:
                    process.kill()
                else:
                    os.kill(draw.choice(_engines(folder)), signal.SIGKILL)
                code = process.wait(2 * START_SECONDS)
        seconds = time.monotonic() - began
        none_left = until_none_is_left(folder)
        told = [json.loads(line) for line in answers.read_text().splitlines()]
    wrong = [line["response"]["body"]["error"]["message"] for line in told if line["response"]["status_code"] != 200]
    return {
        "lines": LINES,
        "killed_at_lines": moments[:-1],
        "engine_killed_at_line": moments[-1],
        "none_left_after_s": none_left,
        "exit_code": code,
        "answers": len(told),
        "answered_once": len({line["custom_id"] for line in told}) == len(told) == LINES,
        "statuses": dict(Counter(line["response"]["status_code"] for line in told)),
        "reasons": dict(Counter(wrong)),
        "seconds": seconds,
    }


def _engines(folder: str) -> list[int]:
    """Return the processes of the replicas; without Ray, the engine's."""
    alone = [pid for pid in processes_of(folder) if "graphdecode.server.engine_process" in command_of(pid)]
    return replicas_of(folder) or alone


def _lines() -> Iterator[dict[str, Any]]:
    """Yield requests of a batch; one in a hundred is invalid."""
    for number, body in enumerate(requests_of(LINES, 8, BATCH_ANSWER_TOKENS)):
        wrong = {"max_tokens": "many"} if number % 100 == 99 else {}
        yield {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body | wrong}


def _line_count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def ends(model: str, *options: str) -> dict[str, Any]:
    """End the command under load in each way; no process may remain."""
    return {name: _ended_by(signals, model, options) for name, signals in WAYS.items()}


def _ended_by(signals: tuple[int, ...], model: str, options: tuple[str, ...]) -> dict[str, Any]:
    async def under_load(server: Server) -> tuple[list[Stream], dict[str, Any]]:
        async with client_of(server.address) as http:
            bodies = requests_of(END_STREAMS, 9, END_ANSWER_TOKENS)
            tasks = [asyncio.create_task(ask(http, model, body)) for body in bodies]
            while not any(server.counts(GENERATED).values()):
                await asyncio.sleep(0.1)
            for number in signals:
                os.kill(server.process.pid, number)
                asked = time.monotonic()
                await asyncio.sleep(0.5)
            await asyncio.to_thread(server.process.wait, END_SECONDS)
            told: dict[str, Any] = {"ended_after_s": time.monotonic() - asked}
            await asyncio.sleep(SOON_SECONDS)
            told["left_soon_after"] = sorted(command_of(pid)[:40].strip() for pid in processes_of(server.folder))
            await asyncio.to_thread(until_none_is_left, server.folder)
            told["none_left_after_s"] = time.monotonic() - asked
            return await asyncio.gather(*tasks), told

    with served(model, *options, replicas=2) as server:
        processes = len(processes_of(server.folder))
        streams, told = asyncio.run(under_load(server))
    about = {"processes": processes, "outcomes": outcomes(streams), "exit_code": server.process.returncode}
    return about | told


def speed(model: str, tokens: int, *options: str) -> dict[str, Any]:
    """Measure tokens per second and time to first token of 32 concurrent streams."""
    with served(model, *options, replicas=2) as server:
        asyncio.run(ask_all(server.address, model, requests_of(8, 6, tokens)))
        began = time.monotonic()
        streams = asyncio.run(ask_all(server.address, model, requests_of(SPEED_STREAMS, 5, tokens)))
        seconds = time.monotonic() - began
    first = [stream.began - began for stream in streams if stream.began is not None]
    return {
        "outcomes": outcomes(streams),
        "by_replica": by_replica(streams),
        "tokens_per_second": len(streams) * tokens / seconds,
        "first_token_ms": 1e3 * statistics.median(first),
        "longest_gap_s": longest_gap(streams),
    }


def split(model: str, tokens: int) -> dict[str, Any]:
    """Serve one replica of two ranks: outputs equal those of one rank, also after a rank was killed."""
    bodies = [body | {"temperature": 0.0} for body in requests_of(SPEED_STREAMS, 5, tokens)]
    with served(model, replicas=1) as whole:
        expected = asyncio.run(ask_all(whole.address, model, bodies))
    with served(model, "--tensor-parallel", "2", replicas=1) as server:
        streams = asyncio.run(ask_all(server.address, model, bodies))
        began = time.monotonic()
        lost = asyncio.run(_rank_killed(server, bodies))
        while set(outcomes(after := asyncio.run(ask_all(server.address, model, bodies)))) != {"answered"}:
            time.sleep(0.5)
        again = time.monotonic() - began
    return {
        "outcomes": outcomes(streams),
        "same_text_as_one_rank": [sum(a.text == b.text for a, b in zip(streams, expected, strict=True)), len(expected)],
        "outcomes_when_a_rank_was_killed": outcomes(lost),
        "told": sorted({stream.why for stream in lost if stream.why}),
        "outcomes_after": outcomes(after),
        "serves_again_after_s": again,
    }


async def _rank_killed(server: Server, bodies: list[dict[str, Any]]) -> list[Stream]:
    asking = asyncio.create_task(ask_all(server.address, server.model, bodies))
    while not any((await asyncio.to_thread(server.counts, GENERATED)).values()):
        await asyncio.sleep(0.05)
    for pid in processes_of(server.folder):
        if "graphdecode.engine.rank_process" in command_of(pid):
            os.kill(pid, signal.SIGKILL)
    return await asking


def main(
    model: Model = "demo",
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 100,
    out: Out = None,
    part: Annotated[list[str] | None, typer.Option(help="Only this part; may be repeated.")] = None,
) -> None:
    parts = {
        "kill": lambda: kill_under_load(model, tokens),
        "kill_direct": lambda: kill_under_load(model, tokens, "--direct"),
        "scale_by_load": lambda: scale_by_load(model, tokens),
        "scale_by_command": lambda: scale_by_command(model, tokens),
        "prefixes": lambda: prefixes(model),
        "batch": lambda: batch(model),
        "batch_on_ray": lambda: batch(model, *ON_RAY),
        "ends": lambda: ends(model),
        "ends_direct": lambda: ends(model, "--direct"),
        "split": lambda: split(model, tokens),
        "speed": lambda: speed(model, tokens),
        "speed_direct": lambda: speed(model, tokens, "--direct"),
    }
    found = read(out) | record(schema=2, model=model, answer_tokens=tokens, rows=ROWS)
    for name in part or parts:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = parts[name]()
        print(json.dumps(found[name], indent=1), flush=True)
        write(out, found)
