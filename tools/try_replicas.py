"""Replicas on a real Ray on this machine: one killed under load, one more and one less, and where prefixes are found.

python tools/try_replicas.py --model demo --out FILE

Nothing leaves the machine, Ray's files lie in a folder of their own, and all that was started is ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx2 as httpx
import typer

from graphdecode.profiling.environment import describe_environment

STREAMS = 200
SILENT_SECONDS = 90.0  # without a byte
START_SECONDS = 420.0
END_SECONDS = 120.0
ROWS = 32
ANSWERED, TOLD, REFUSED, CUT, SILENT = "answered", "told of an error", "refused", "cut", "silent"
PATIENCE = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}
GENERATED = "vllm:generation_tokens_total"
LARGE_CACHE = "[capacity]\ntotal_num_pages = 1500\nmax_sequence_length = 512\n"
SMALL_CACHE = "[capacity]\ntotal_num_pages = 400\nmax_sequence_length = 512\n"  # all beginnings together need more
REPLICA = "ray::ServeReplica:graphdecode:replica"


@dataclass
class Stream:
    """What came of one streamed request; times are of `time.monotonic`."""

    text: str = ""
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


@contextmanager
def served(model: str, *options: str, settings: str = LARGE_CACHE) -> Iterator[Server]:
    """Serve a model on a Ray of its own, and leave no process of it."""
    with tempfile.TemporaryDirectory(prefix="gd", ignore_cleanup_errors=True) as folder:
        config, log = Path(folder) / "server.toml", Path(folder) / "log"
        config.write_text(settings)
        command = [sys.executable, "-m", "graphdecode", "serve", "--model", model, "--port", "0", "--device", "cpu"]
        command += ["--max-batch-size", str(ROWS), "--config", str(config), *options]
        environment = os.environ | PATIENCE | {"RAY_TMPDIR": folder}
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file, stdout=file, env=environment)
        try:
            yield Server(model, address_in(log, process), folder)
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            until_none_is_left(folder)


def address_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Return where the server listens, once it says so."""
    end = time.monotonic() + START_SECONDS
    while not (found := re.search(r"^serving \S+ on (\S+)", log.read_text(), re.M)):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(log.read_text()[-2000:])
        time.sleep(0.1)
    return found[1]


@dataclass
class Server:
    """Replicas that serve."""

    model: str
    address: str
    folder: str

    def client(self) -> httpx.AsyncClient:
        """Return what asks it, in a loop that is yet to run."""
        limits = httpx.Limits(max_connections=None)
        timeout = httpx.Timeout(10.0, read=SILENT_SECONDS)
        return httpx.AsyncClient(base_url=self.address, timeout=timeout, limits=limits)

    def replica_pids(self) -> list[int]:
        """Return the processes of the replicas, whose children are the engines."""
        return [pid for pid in of_environment(self.folder) if command_of(pid).startswith(REPLICA)]

    def counts(self, name: str) -> dict[str, float]:
        """Return the counter of that name, by replica."""
        found = re.findall(rf'^{name}{{replica="(\w+)".*}} (\S+)$', httpx.get(f"{self.address}/metrics").text, re.M)
        return {replica: float(value) for replica, value in found}

    def until_replicas(self, count: int, seconds: float) -> float:
        """Wait until so many replicas serve; return how long it took."""
        began = time.monotonic()
        while (there := len(self.counts("vllm:prefix_cache_queries_total"))) != count:
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"{there} replicas after {seconds:g} s, not {count}")
            time.sleep(0.5)
        return time.monotonic() - began


def of_environment(folder: str) -> list[int]:
    """Return the processes whose Ray has its files in a folder."""
    mark, found = f"RAY_TMPDIR={folder}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it has ended, or is another's
                continue
    return found


def until_none_is_left(folder: str) -> None:
    """Wait until Ray's own processes have seen that who began it is gone; end those that do not."""
    end = time.monotonic() + END_SECONDS
    while left := of_environment(folder):
        if time.monotonic() > end:
            told = [command_of(pid)[:80] for pid in left]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise RuntimeError(f"processes were left: {told}")
        time.sleep(0.2)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


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


def kill_under_load(model: str, tokens: int, *options: str) -> dict[str, Any]:
    """Kill one of two replicas while 200 streams run; the other one answers what had not begun."""

    async def storm(server: Server) -> tuple[list[Stream], float]:
        async with server.client() as http:
            tasks = [asyncio.create_task(ask(http, model, body)) for body in requests_of(STREAMS, 1, tokens)]
            end = time.monotonic() + START_SECONDS
            while sum((await asyncio.to_thread(server.counts, GENERATED)).values()) < ROWS * tokens // 4:
                if time.monotonic() > end or all(task.done() for task in tasks):
                    raise RuntimeError(str(Counter(task.result().why for task in tasks if task.done())))
                await asyncio.sleep(0.2)
            os.kill(random.Random(2).choice(server.replica_pids()), signal.SIGKILL)
            killed = time.monotonic()
            return await asyncio.gather(*tasks), killed

    with served(model, "--replicas", "2", *options) as server:
        server.until_replicas(2, START_SECONDS)
        streams, killed = asyncio.run(storm(server))
        again = server.until_replicas(2, START_SECONDS)
        calm = asyncio.run(all_of(server, requests_of(20, 1, tokens)))
    later = [stream for stream in streams if stream.ended > killed]
    same = sum(stream.text == other.text for stream, other in zip(streams, calm, strict=False))
    compared = sum(stream.outcome == ANSWERED for stream in streams[: len(calm)])
    return {
        "streams": len(streams),
        "outcomes": dict(Counter(stream.outcome for stream in streams)),
        "open_when_killed": len(later),
        "outcomes_without_a_token": dict(Counter(stream.outcome for stream in streams if stream.began is None)),
        "outcomes_behind_a_token": dict(Counter(stream.outcome for stream in later if stream.began is not None)),
        "told": sorted({stream.why for stream in streams if stream.why}),
        "longest_gap_s": max(max(stream.gaps, default=0.0) for stream in streams),
        "two_again_after_s": again,
        "outcomes_after": dict(Counter(stream.outcome for stream in calm)),
        "same_text_as_after": [same, compared],
    }


async def all_of(server: Server, bodies: list[dict[str, Any]]) -> list[Stream]:
    async with server.client() as http:
        return list(await asyncio.gather(*(ask(http, server.model, body) for body in bodies)))


def scale(model: str, tokens: int) -> dict[str, Any]:
    """Go from one replica to two and back while requests come, and lose none."""
    settings = LARGE_CACHE + "[replicas]\ntarget_requests = 4\nupscale_delay_s = 1.0\ndownscale_delay_s = 8.0\n"
    streams: list[Stream] = []

    async def load(server: Server) -> dict[str, float]:
        stop, took = asyncio.Event(), {}
        bodies = iter(requests_of(100_000, 3, tokens))

        async def client(http: httpx.AsyncClient) -> None:
            while not stop.is_set():
                streams.append(await ask(http, model, next(bodies)))

        async with server.client() as http:
            many = [asyncio.create_task(client(http)) for _ in range(16)]
            took["up_s"] = await asyncio.to_thread(server.until_replicas, 2, START_SECONDS)
            await asyncio.sleep(3)
            stop.set()
            await asyncio.gather(*many)
            stop.clear()
            one = asyncio.create_task(client(http))  # goes on while the other replica leaves
            took["down_s"] = await asyncio.to_thread(server.until_replicas, 1, START_SECONDS)
            await asyncio.sleep(1)
            stop.set()
            await one
        return took

    with served(model, "--autoscale", "1:2", settings=settings) as server:
        took = asyncio.run(load(server))
    return {"requests": len(streams), "outcomes": dict(Counter(stream.outcome for stream in streams))} | took


def prefixes(model: str, groups: int, asked: int, rounds: int) -> dict[str, Any]:
    """Ask for many prompts of few beginnings, under each routing: what share of the prompts' tokens was cached?"""
    draw = random.Random(4)
    beginnings = ["".join(draw.choices("abcdefghijklmnop ", k=300)) for _ in range(groups)]
    bodies = [
        {"prompt": f"{beginning} {number}=", "max_tokens": 4, "temperature": 0}
        for number in range(asked)
        for beginning in beginnings
    ]
    found: dict[str, Any] = {"prompts": len(bodies), "beginnings": groups}
    for routing in ("random", "prefix"):
        rates, first_tokens = [], []
        for turn in range(rounds):
            with served(
                model, "--replicas", "2", settings=SMALL_CACHE + f'[replicas]\nrouting = "{routing}"\n'
            ) as server:
                server.until_replicas(2, START_SECONDS)
                random.Random(turn).shuffle(bodies)
                began = time.monotonic()
                for start in range(0, len(bodies), 8):
                    streams = asyncio.run(all_of(server, bodies[start : start + 8]))
                    if {stream.outcome for stream in streams} != {ANSWERED}:
                        raise RuntimeError(str(Counter(stream.outcome for stream in streams)))
                first_tokens.append(time.monotonic() - began)
                hits, queries = (server.counts(f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
                rates.append(sum(hits.values()) / sum(queries.values()))
        found[routing] = {"hit_rates": rates, "hit_rate": statistics.median(rates), "seconds": first_tokens}
    return found


def batch(model: str, lines: int) -> dict[str, Any]:
    """Kill a batch three times at random, and a replica of the run that ends it: every line is answered once."""
    draw = random.Random(7)
    with tempfile.TemporaryDirectory(prefix="gd", ignore_cleanup_errors=True) as folder:
        asked, answers = Path(folder) / "requests.jsonl", Path(folder) / "answers.jsonl"
        asked.write_text("".join(f"{json.dumps(line)}\n" for line in lines_of(lines)))
        command = [sys.executable, "-m", "graphdecode", "batch", str(asked), str(answers), "--model", model]
        command += ["--device", "cpu", "--max-batch-size", str(ROWS), "--ray", "--replicas", "2"]
        environment = os.environ | PATIENCE | {"RAY_TMPDIR": folder}
        moments, began = [], time.monotonic()
        for run in range(4):
            done = line_count(answers)
            moments.append(min(done + draw.randrange(lines // 4), lines - 100))
            with (Path(folder) / "log").open("ab") as log:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, stdout=log, env=environment)
            until_lines(answers, moments[-1], process, Path(folder) / "log")
            if run < 3:
                process.kill()
            else:
                os.kill(draw.choice(Server(model, "", folder).replica_pids()), signal.SIGKILL)
            code = process.wait(START_SECONDS * 2)
            until_none_is_left(folder)
        told = [json.loads(line) for line in answers.read_text().splitlines()]
    return {
        "lines": lines,
        "killed_at_lines": moments[:3],
        "replica_killed_at_line": moments[3],
        "exit_code": code,
        "answers": len(told),
        "answered_once": len({line["custom_id"] for line in told}) == len(told) == lines,
        "statuses": dict(Counter(line["response"]["status_code"] for line in told)),
        "seconds": time.monotonic() - began,
    }


def lines_of(count: int) -> Iterator[dict[str, Any]]:
    """Yield requests of a batch; one of a hundred cannot be served, and its line says why."""
    for number, body in enumerate(requests_of(count, 8, 6)):
        wrong = {"max_tokens": "many"} if number % 100 == 99 else {}
        yield {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body | wrong}


def line_count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def until_lines(file: Path, count: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a file has so many lines."""
    end = time.monotonic() + START_SECONDS * 2
    while line_count(file) <= count:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(log.read_text()[-2000:])
        time.sleep(0.02)


def speed(model: str, tokens: int, *options: str) -> dict[str, float]:
    """Ask 32 streams at once: how many tokens come per second, and how long does the first one take?"""
    with served(model, "--replicas", "2", *options) as server:
        server.until_replicas(2, START_SECONDS)
        asyncio.run(all_of(server, requests_of(8, 6, tokens)))
        began = time.monotonic()
        streams = asyncio.run(all_of(server, requests_of(32, 5, tokens)))
        seconds = time.monotonic() - began
    first = [stream.began - began for stream in streams if stream.began is not None]
    return {"tokens_per_second": len(streams) * tokens / seconds, "first_token_ms": 1e3 * statistics.median(first)}


def main(
    model: Annotated[str, typer.Option(help="As graphdecode serve takes it.")] = "demo",
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 100,
    out: Annotated[Path | None, typer.Option(help="A file for the results.")] = None,
    part: Annotated[list[str] | None, typer.Option(help="Only this part; may be repeated.")] = None,
) -> None:
    """Show what is claimed of replicas, and write it down."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    parts = {
        "kill": lambda: kill_under_load(model, tokens),
        "kill_direct": lambda: kill_under_load(model, tokens, "--direct"),
        "scale": lambda: scale(model, tokens),
        "prefixes": lambda: prefixes(model, 24, 6, 1),
        "batch": lambda: batch(model, 5000),
        "speed": lambda: speed(model, tokens),
        "speed_direct": lambda: speed(model, tokens, "--direct"),
    }
    found: dict[str, Any] = {"schema": 1, "environment": describe_environment("cpu"), "model": model}
    found |= {"answer_tokens": tokens, "rows": ROWS}
    for name in part or parts:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = parts[name]()
        print(json.dumps(found[name], indent=1), flush=True)
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
