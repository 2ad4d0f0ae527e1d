"""Servers beside one another, and ours beside the engine below it, in one run."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import torch

from graphdecode import LLM, SamplingParams
from graphdecode.errors import ArgumentError
from peers.http_load import alone_prompts, first_token_seconds, prompts_of, tokens_per_second
from peers.servers import Graphdecode, Running, Server, Setting, pin, running

_CAPACITY = 512  # tokens of a prompt and its answer
_VITALS_SECONDS = 0.5  # after which our server's metrics know of all steps


class Contest(NamedTuple):
    """What is compared.

    Attributes:
        model: as `graphdecode serve` takes it.
        weights: where it is.
        checkpoint: the same model as a folder, for servers that do not read its file.
        clients: that ask at the same time.
        tokens: of an answer.
        rounds: turns of each.
    """

    model: str
    weights: Path
    checkpoint: Path | None
    clients: int
    tokens: int
    rounds: int


def compare(contest: Contest, peers: Sequence[Server], on_ready: Callable[[], None]) -> dict[str, list[dict[str, Any]]]:
    """Return what was seen of each, a row a turn; all are loaded before the first turn, and stand still but in theirs.

    `library` is the engine in this process on the first core; `server` is the same engine behind `graphdecode serve`,
    which has the first core for the engine and the others for HTTP and the clients. Peers, and ours on the same weights
    beside each of them, have the first core for the whole of the server, and one thread that computes.

    Args:
        contest: what is compared.
        peers: to compare with.
        on_ready: is called before the first turn.

    Raises:
        ValueError: a peer cannot serve these weights.
        RuntimeError: a server does not start.
    """
    cores = sorted(os.sched_getaffinity(0))
    engine, others = {cores[0]}, set(cores[1:]) or {cores[0]}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(server: Server, weights: Path) -> Running:
            setting = Setting(weights, contest.clients, _CAPACITY, (cores[0],))
            return stack.enter_context(running(server, setting, logs / server.name))

        turns: dict[str, Callable[[int], dict[str, Any]]] = {}
        for peer in peers:
            weights = contest.weights if not peer.why_not(contest.weights) else contest.checkpoint or contest.weights
            if why := peer.why_not(weights):
                raise ArgumentError(f"{peer.name} cannot serve {weights.name}: {why}")
            for name, server in ((peer.name, peer), (f"graphdecode beside {peer.name}", Graphdecode(sys.executable))):
                turns[name] = _turn_of(start(server, weights), contest, server.ignores_eos)
        own = start(Graphdecode(sys.executable), contest.weights)
        with own.awake():
            pin(own.process.pid, others)
            own_model = own.model
        os.sched_setaffinity(0, engine)
        torch.set_num_threads(1)
        llm = stack.enter_context(LLM(contest.model, max_batch_size=contest.clients, max_sequence_length=_CAPACITY))

        def library(turn: int) -> dict[str, Any]:
            os.sched_setaffinity(0, engine)
            try:
                return _in_process(llm, contest, turn)
            finally:
                os.sched_setaffinity(0, others)

        def served(turn: int) -> dict[str, Any]:
            with own.awake():
                first_token_seconds(own.port, own_model, "wake up")
                before = _sum_and_count(own, "vllm:time_to_first_token_seconds")
                firsts = [first_token_seconds(own.port, own_model, prompt) for prompt in alone_prompts(2 * turn)]
                time.sleep(_VITALS_SECONDS)
                after = _sum_and_count(own, "vllm:time_to_first_token_seconds")
                steps = _sum_and_count(own, "graphdecode:step_seconds")
                speed = _speed(own, own_model, contest, turn, ignores_eos=True)
                time.sleep(_VITALS_SECONDS)
                later = _sum_and_count(own, "graphdecode:step_seconds")
            return {
                "tokens_per_second": speed,
                "first_token_ms": 1000 * statistics.median(firsts),
                "over_engine_ms": 1000 * (statistics.mean(firsts) - _mean_between(before, after)),
                "step_ms": 1000 * _mean_between(steps, later),
            }

        os.sched_setaffinity(0, others)
        on_ready()
        turns = {"library": library, "server": served} | turns
        found: dict[str, list[dict[str, Any]]] = {}
        for turn in range(contest.rounds):
            for name, take in turns.items():
                found.setdefault(name, []).append(take(turn))
        os.sched_setaffinity(0, set(cores))
        return found


def _turn_of(server: Running, contest: Contest, ignores_eos: bool) -> Callable[[int], dict[str, Any]]:
    with server.awake():
        model = server.model

    def take(turn: int) -> dict[str, Any]:
        with server.awake():
            first_token_seconds(server.port, model, "wake up")
            firsts = [first_token_seconds(server.port, model, prompt) for prompt in alone_prompts(2 * turn)]
            speed = _speed(server, model, contest, turn, ignores_eos=ignores_eos)
        return {"tokens_per_second": speed, "first_token_ms": 1000 * statistics.median(firsts)}

    return take


def _in_process(llm: LLM, contest: Contest, turn: int) -> dict[str, Any]:
    """Return the same of the library, and its step's time."""
    params = SamplingParams(temperature=0.0, max_tokens=contest.tokens, ignore_eos=True)
    firsts = []
    for prompt in alone_prompts(2 * turn):
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


def _speed(server: Running, model: str, contest: Contest, turn: int, *, ignores_eos: bool) -> float:
    return tokens_per_second(
        server.port, model, clients=contest.clients, tokens=contest.tokens, seed=turn, ignores_eos=ignores_eos
    )


def _mean_between(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / (after[1] - before[1])


def _sum_and_count(server: Running, histogram: str) -> tuple[float, float]:
    """Return what a histogram of our server's metrics has seen."""
    text = httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=60).text
    found = dict(re.findall(rf"^{histogram}_(sum|count)\{{.*\}} (\S+)$", text, re.MULTILINE))
    return float(found["sum"]), float(found["count"])
