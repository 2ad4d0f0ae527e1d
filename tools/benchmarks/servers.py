"""Our server over HTTP, compared with its own engine and with other servers.

    tools/bench servers --model smollm2 --clients 32 --peer llama-cpp=/opt/llama/bin/python --out server

Each server runs in the environment where it is installed. The clients are cheap, as they share the machine. Writes
server.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx2 as httpx
import torch
import typer

from graphdecode import LLM, SamplingParams
from graphdecode.errors import ArgumentError
from graphdecode.models import resolve_model_path
from harness import Model, OutFolder, Rounds, alternated, elsewhere, medians, record, show, until, write

_START_SECONDS = 600
_END_SECONDS = 20
_CAPACITY = 512  # tokens of a prompt and its answer
_VITALS_SECONDS = 0.5  # after which our server's metrics have all steps
_TEXT = "the old river runs under a stone bridge while people walk home and talk about bread rain work music"
_WORDS = 24  # of a prompt
_ALONE_REQUESTS = 9
_PIECE = re.compile(rb'"choices": ?\[\{')


class Setting(NamedTuple):
    """The settings of all servers of a comparison."""

    weights: Path  # a GGUF file, or a checkpoint's folder
    clients: int  # that ask at the same time
    capacity: int  # tokens of a prompt and its answer
    cores: tuple[int, ...]  # that the whole server runs on; as many threads compute


def _graphdecode(python: str, setting: Setting, port: int) -> list[str]:
    dtype = ["--dtype", "bfloat16"] if setting.weights.is_dir() else []  # as peers serve a folder
    size = ["--max-batch-size", str(setting.clients), "--max-sequence-length", str(setting.capacity)]
    asked = ["serve", "--model", str(setting.weights), "--port", str(port), "--device", "cpu", *dtype, *size]
    return [python, "-m", "graphdecode", *asked]


def _llama_cpp(python: str, setting: Setting, port: int) -> list[str]:
    # ggml's AMX kernels end the process at their first product on some machines (they load a tile configuration of
    # which they have not set all bytes): with AMX, weights are not repacked
    plain = "plain" if " amx_tile " in Path("/proc/cpuinfo").read_text() else ""
    threads = str(len(setting.cores))
    return [
        *elsewhere(python, "llama-server", plain), "--model", str(setting.weights), "--host", "127.0.0.1",
        "--port", str(port), "--n_ctx", str(setting.capacity), "--n_threads", threads, "--n_threads_batch", threads,
        "--interrupt_requests", "false", "--verbose", "false",  # a request waits for the one before
    ]  # fmt: skip


def _vllm(python: str, setting: Setting, port: int) -> list[str]:
    return [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(setting.weights), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(setting.capacity),
        "--max-num-seqs", str(setting.clients),
    ]  # fmt: skip


COMMANDS = {"graphdecode": _graphdecode, "llama-cpp": _llama_cpp, "vllm": _vllm}
PEERS = ("llama-cpp", "vllm")


class Server(NamedTuple):
    """One that may be compared, and the interpreter of the environment where it is installed."""

    name: str
    python: str = sys.executable

    def unavailable_reason(self, weights: Path) -> str:
        """Return why it cannot serve these weights; "" if it can be tried."""
        if self.name == "llama-cpp" and weights.suffix != ".gguf":
            return "it serves GGUF files"
        return "it is given a checkpoint's folder: --checkpoint" if self.name == "vllm" and not weights.is_dir() else ""

    def command(self, setting: Setting, port: int) -> list[str]:
        return COMMANDS[self.name](self.python, setting, port)

    def environment(self, setting: Setting) -> dict[str, str]:
        if self.name != "vllm":
            return {"OMP_NUM_THREADS": str(len(setting.cores))}
        cores = ",".join(map(str, setting.cores))
        return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1"}


def parse_servers(texts: list[str]) -> list[Server]:
    """Return the servers of a list of `NAME` or `NAME=PYTHON`."""
    servers = []
    for text in texts:
        name, _, python = text.partition("=")
        if name not in PEERS:
            raise ArgumentError(f"unknown peer: {name}; there are {', '.join(PEERS)}")
        servers.append(Server(name, python or sys.executable))
    return servers


class Running:
    """A server that is ready, in a process group of its own."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.process = process
        self.model = str(self.get("v1/models").json()["data"][0]["id"])

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}/{path}", timeout=60)

    def pin(self, cores: set[int]) -> None:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[2] == str(self.process.pid):
                    pin(int(stat.parent.name), cores)

    def sum_and_count(self, histogram: str) -> tuple[float, float]:
        found = dict(re.findall(rf"^{histogram}_(sum|count)\{{.*\}} (\S+)$", self.get("metrics").text, re.MULTILINE))
        return float(found["sum"]), float(found["count"])

    def first_token_seconds(self, turn: int) -> list[float]:
        prompts = prompts_of(_ALONE_REQUESTS, 2 * turn + 1_000_000)
        return [self._ask_all([prompt], 2)[0][0] for prompt in prompts]

    def tokens_per_second(self, clients: int, tokens: int, turn: int, *, ignores_eos: bool = True) -> float:
        began = time.perf_counter()
        answers = self._ask_all(prompts_of(clients, turn), tokens)
        seconds = time.perf_counter() - began
        # the last piece says how it ended
        return (clients * tokens if ignores_eos else sum(pieces - 1 for _, pieces in answers)) / seconds

    def _ask_all(self, prompts: list[str], tokens: int) -> list[tuple[float, int]]:
        """Return seconds to the first piece, and how many came, of each request."""

        async def together() -> list[tuple[float, int]]:
            return await asyncio.gather(*(_ask(self.port, self.model, prompt, tokens) for prompt in prompts))

        return asyncio.run(together())

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run inside the block, and stop it after: one server is measured at a time."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            self._ask_all(["wake up"], 2)
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)


def prompts_of(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(_TEXT.split(), k=_WORDS)) for _ in range(count)]


async def _ask(port: int, model: str, prompt: str, tokens: int) -> tuple[float, int]:
    asked = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body = json.dumps(asked | {"ignore_eos": True}).encode()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    first, received = 0.0, b""
    while data := await reader.read(1 << 16):
        received += data
        if not first and _PIECE.search(received):
            first = time.perf_counter() - began
    writer.close()
    if not first or b"[DONE]" not in received:
        raise RuntimeError(f"port {port} gave no whole answer: {received[-300:]!r}")
    return first, len(_PIECE.findall(received))


def pin(pid: int, cores: set[int]) -> None:
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cores)


@contextmanager
def running(server: Server, setting: Setting, log: Path) -> Iterator[Running]:
    """Start a server, and end it after the block; it is stopped (SIGSTOP) except in `Running.awake`."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = int(found.getsockname()[1])
    command = server.command(setting, port)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=os.environ | server.environment(setting)
        )
    try:

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200:
                    return True
            if process.poll() is not None:
                last = log.read_text(errors="replace").splitlines()[-1:]
                raise RuntimeError(f"it does not serve: {shlex.join(command)[:200]}: {last}")
            return False

        until(answers, _START_SECONDS, f"it does not serve: {shlex.join(command)[:200]}")
        started = Running(port, process)
        started.pin(set(setting.cores))
        os.killpg(process.pid, signal.SIGSTOP)
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Contest(NamedTuple):
    """A comparison."""

    model: str
    weights: Path
    checkpoint: Path | None
    clients: int
    tokens: int
    rounds: int


def compare(contest: Contest, peers: Sequence[Server]) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of each, a row per round. All are loaded before the first round.

    `library` is the engine in this process on the first core; `server` is `graphdecode serve` with the engine on the
    first core, and HTTP and clients on the others. Peers, and ours beside each of them, run only on the first core.
    """
    cores = sorted(os.sched_getaffinity(0))
    engine, others = {cores[0]}, set(cores[1:]) or {cores[0]}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(server: Server, weights: Path) -> Running:
            setting = Setting(weights, contest.clients, _CAPACITY, (cores[0],))
            return stack.enter_context(running(server, setting, logs / server.name))

        calls: dict[str, Callable[[], dict[str, Any]]] = {}
        for peer in peers:
            weights = contest.weights
            if peer.unavailable_reason(weights):
                weights = contest.checkpoint or weights
            if why := peer.unavailable_reason(weights):
                raise ArgumentError(f"{peer.name} cannot serve {weights.name}: {why}")
            for name, server in ((peer.name, peer), (f"graphdecode beside {peer.name}", Server("graphdecode"))):
                calls[name] = _turns(partial(_peer, start(server, weights), contest, server.name != "llama-cpp"))
        own = start(Server("graphdecode"), contest.weights)
        with own.awake():
            pin(own.process.pid, others)
        os.sched_setaffinity(0, engine)
        torch.set_num_threads(1)
        llm = stack.enter_context(LLM(contest.model, max_batch_size=contest.clients, max_sequence_length=_CAPACITY))

        def library(turn: int) -> dict[str, Any]:
            os.sched_setaffinity(0, engine)
            try:
                return _in_process(llm, contest, turn)
            finally:
                os.sched_setaffinity(0, others)

        os.sched_setaffinity(0, others)
        print("measuring", file=sys.stderr, flush=True)
        first = {"library": _turns(library), "server": _turns(partial(_served, own, contest))}
        found = alternated(first | calls, contest.rounds)
        os.sched_setaffinity(0, set(cores))
        return found


def _turns(take: Callable[[int], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    turns = itertools.count()
    return lambda: take(next(turns))


def _peer(server: Running, contest: Contest, ignores_eos: bool, turn: int) -> dict[str, Any]:
    with server.awake():
        firsts = server.first_token_seconds(turn)
        speed = server.tokens_per_second(contest.clients, contest.tokens, turn, ignores_eos=ignores_eos)
    return {"tokens_per_second": speed, "first_token_ms": 1000 * statistics.median(firsts)}


def _served(own: Running, contest: Contest, turn: int) -> dict[str, Any]:
    """Return the same for our server, its time to first token beyond the engine's, and its step's time."""
    with own.awake():
        before = own.sum_and_count("vllm:time_to_first_token_seconds")
        firsts = own.first_token_seconds(turn)
        time.sleep(_VITALS_SECONDS)
        after = own.sum_and_count("vllm:time_to_first_token_seconds")
        steps = own.sum_and_count("graphdecode:step_seconds")
        speed = own.tokens_per_second(contest.clients, contest.tokens, turn)
        time.sleep(_VITALS_SECONDS)
        later = own.sum_and_count("graphdecode:step_seconds")
    return {
        "tokens_per_second": speed,
        "first_token_ms": 1000 * statistics.median(firsts),
        "over_engine_ms": 1000 * (statistics.mean(firsts) - _mean_between(before, after)),
        "step_ms": 1000 * _mean_between(steps, later),
    }


def _in_process(llm: LLM, contest: Contest, turn: int) -> dict[str, Any]:
    """Return the same for the library, and its step's time."""
    params = SamplingParams(temperature=0.0, max_tokens=contest.tokens, ignore_eos=True)
    firsts = []
    for prompt in prompts_of(_ALONE_REQUESTS, 2 * turn + 1_000_000):
        began = time.perf_counter()
        with llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)) as stream:
            next(stream)
            firsts.append(time.perf_counter() - began)
    llm.stats.step_seconds.clear()
    began = time.perf_counter()
    llm.generate(prompts_of(contest.clients, turn), params, use_tqdm=False)
    speed = contest.clients * contest.tokens / (time.perf_counter() - began)
    step = statistics.mean(llm.stats.step_seconds)
    first = statistics.median(firsts)
    return {"tokens_per_second": speed, "first_token_ms": 1000 * first, "step_ms": 1000 * step}


def _mean_between(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / (after[1] - before[1])


def main(
    model: Model = "demo",
    clients: Annotated[int, typer.Option(min=1, help="Clients that ask at the same time.")] = 32,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 32,
    rounds: Rounds = 3,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=PYTHON]", help="llama-cpp or vllm, and the Python that has it; may be repeated."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The same model as a folder, for peers that do not read its file.")
    ] = None,
    out: OutFolder = None,
) -> None:
    contest = Contest(model, resolve_model_path(model), checkpoint, clients, answer_tokens, rounds)
    found = compare(contest, parse_servers(peer or []))
    middle = {name: medians({key: [row[key] for row in rows] for key in rows[0]}) for name, rows in found.items()}
    library = middle["library"]["tokens_per_second"]
    columns = {
        "": "{name}",
        "tokens/s": "{tokens_per_second:.0f}",
        "of the library's": "{share:.2f}",
        "first token, ms": "{first_token_ms:.2f}",
        "over engine's": "{over_engine_ms:.2f}",
        "step, ms": "{step_ms:.2f}",
    }
    shares = {name: figures["tokens_per_second"] / library for name, figures in middle.items()}
    rows = ({"name": name, "share": shares[name]} | figures for name, figures in middle.items())
    show(columns, rows, "servers")
    about = record(schema=1, model=model, clients=clients, answer_tokens=answer_tokens)
    write(out and out / "server.json", about | {"medians": middle, "rounds": found})
