"""What `tools/check replicas` tries its claims with: the command on a Ray of its own, and clients.

All processes of that Ray are found again. Requests are streamed, and it is told what came of each.
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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from harness import until

SILENT_SECONDS = 90.0  # without a byte
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


@dataclass
class Server:
    """Replicas that serve.

    Attributes:
        model: as the command got it.
        address: to ask.
        folder: of Ray's files, which tells its processes from others.
        process: of the command.
    """

    model: str
    address: str
    folder: str
    process: subprocess.Popen[bytes]

    def counts(self, name: str) -> dict[str, float]:
        """Return the counter of that name, by replica."""
        found = re.findall(rf'^{name}{{replica="(\w+)".*}} (\S+)$', httpx.get(f"{self.address}/metrics").text, re.M)
        return {replica: float(value) for replica, value in found}

    def until_replicas(self, count: int, seconds: float = START_SECONDS) -> float:
        """Wait until so many replicas serve; return how long it took."""
        name = "vllm:prefix_cache_queries_total"
        began = time.monotonic()
        until(lambda: len(self.counts(name)) == count, seconds, f"not {count} replicas", every=0.5)
        return time.monotonic() - began


@contextlib.contextmanager
def served(
    model: str, *options: str, replicas: int = 0, settings: str = LARGE_CACHE, folder: str | None = None
) -> Iterator[Server]:
    """Serve a model, and leave no process of it.

    Args:
        model: as the command takes it.
        options: of the command.
        replicas: that there are, and are waited for; 0: as the options say.
        settings: the text of its configuration file.
        folder: of a Ray that others began and will end; None: of one that is begun here.
    """
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


@contextlib.contextmanager
def begun(arguments: tuple[str, ...], log: Path, folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command on the CPU with Ray's files in a folder, and end it.

    Args:
        arguments: of `graphdecode`.
        log: that its output is added to.
        folder: of Ray's files.
    """
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
    """Return the environment of a Ray whose files lie in a folder."""
    return os.environ | _PATIENCE | _ALONE | {"RAY_TMPDIR": folder}


def _address_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Return where the server listens, once it says so."""

    def found() -> str:
        if process.poll() is not None:
            raise RuntimeError(log.read_text()[-2000:])
        said = re.search(r"^serving \S+ on (\S+)", log.read_text(), re.M)
        return said[1] if said else ""

    return until(found, START_SECONDS, "it does not serve")


def replicas_of(folder: str) -> list[int]:
    """Return the processes of the replicas of a Ray, whose children are the engines."""
    return [pid for pid in processes_of(folder) if _REPLICA.match(command_of(pid))]


def processes_of(folder: str) -> list[int]:
    """Return the processes of a Ray that has its files in a folder.

    Some have taken the place of their environment for a longer title; these have their logs open.
    """
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
    except OSError:  # it has ended, or is another's
        return []


def _files(pid: int) -> Iterator[str]:
    """Yield the paths of the files that a process has open."""
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                yield os.readlink(file)


def until_none_is_left(folder: str) -> float:
    """Wait until Ray's own processes have seen that who began it is gone; end those that do not.

    Returns:
        the seconds that it took.

    Raises:
        RuntimeError: some had to be ended.
    """
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
    """Return the command line of a process; of one that has ended, nothing."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@dataclass
class Stream:
    """What came of one streamed request; times are of `time.monotonic`."""

    text: str = ""
    replica: str = ""
    began: float | None = None
    ended: float = 0.0
    outcome: str = CUT
    why: str = ""
    gaps: list[float] = field(default_factory=list)


async def ask(http: httpx.AsyncClient, model: str, body: dict[str, Any]) -> Stream:
    """Ask for a stream, and follow it to its end, whatever that is."""
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
    """Return what asks a server, in a loop that is yet to run."""
    timeout = httpx.Timeout(10.0, read=SILENT_SECONDS)
    return httpx.AsyncClient(base_url=address, timeout=timeout, limits=httpx.Limits(max_connections=None))


async def ask_all(address: str, model: str, bodies: Iterable[dict[str, Any]]) -> list[Stream]:
    """Ask for all at once."""
    async with client_of(address) as http:
        return list(await asyncio.gather(*(ask(http, model, body) for body in bodies)))


def outcomes(streams: Iterable[Stream]) -> dict[str, int]:
    """Return how many streams came to which end."""
    return dict(Counter(stream.outcome for stream in streams))


def by_replica(streams: Iterable[Stream]) -> list[int]:
    """Return how many streams each replica had, the most first."""
    return sorted(Counter(stream.replica for stream in streams if stream.replica).values(), reverse=True)


def longest_gap(streams: Sequence[Stream]) -> float:
    """Return the seconds that a stream was silent at most, before its first event too."""
    return max(max(stream.gaps, default=0.0) for stream in streams)


def requests_of(count: int, seed: int, tokens: int) -> list[dict[str, Any]]:
    """Return seeded requests whose answers have their full length."""
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
