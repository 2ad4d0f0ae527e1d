"""Trials of ladders: a recorded load replayed through each in alternation, and the cost of their graphs."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from graphdecode.buckets import BucketLadder
from graphdecode.config import BucketConfig
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.runner import Runner
from graphdecode.errors import ArgumentError
from graphdecode.models import Model, load_model, resolve_device
from graphdecode.profiling.latency import STEPS_PER_STAGING, rows_at


@dataclass(frozen=True)
class LadderTrial:
    """Measurements of one ladder."""

    step_ms: float  # mean time of a step of the load: the median over the rounds
    quiet_ms: float  # step time of the quickest round
    rounds_ms: list[float]  # the mean of each round
    capture_ms: float  # time of all captures
    pool_bytes: int  # memory of all graphs' intermediates


@dataclass(frozen=True)
class Ratio:
    """One ladder's step over another's: below 1 is quicker."""

    median: float  # median of the ratios of simultaneous rounds
    quiet: float  # quickest round over quickest round
    noise: float  # half the interquartile range of these ratios, over their median

    @property
    def verdict(self) -> str:
        """The verdict, beyond the noise."""
        if max(self.median, self.quiet) < 1 - self.noise:
            return "quicker"
        if min(self.median, self.quiet) > 1 + self.noise:
            return "slower"
        return f"no difference beyond the noise of {100 * self.noise:.1f}%"


@dataclass(frozen=True)
class Trial:
    """Ladders measured in alternation."""

    model: str  # name of the model
    dtype: str
    backend: str
    context: int  # tokens of each row
    steps: int  # per round
    rounds: int  # per ladder
    ladders: dict[str, LadderTrial]  # by name

    def ratio(self, name: str, over: str) -> Ratio:
        """Return how one ladder's step compares with another's."""
        first, second = self.ladders[name], self.ladders[over]
        ratios = [mine / theirs for mine, theirs in zip(first.rounds_ms, second.rounds_ms, strict=True)]
        low, median, high = np.percentile(ratios, [25, 50, 75])
        return Ratio(float(median), first.quiet_ms / second.quiet_ms, float((high - low) / 2 / median))


def trace_of(counts: Mapping[int, int], steps: int) -> list[int]:
    """Return `steps` batch sizes in the proportions of `counts` (batch size -> steps), in a fixed random order."""
    total = sum(counts.values())
    shares = {size: steps * number / total for size, number in counts.items()}
    whole = {size: int(share) for size, share in shares.items()}
    by_remainder = sorted(shares, key=lambda size: shares[size] - whole[size], reverse=True)
    for size in by_remainder[: steps - sum(whole.values())]:
        whole[size] += 1
    trace = [size for size in sorted(whole) for _ in range(whole[size])]
    random.Random(0).shuffle(trace)
    return trace


def try_ladders(
    ladders: Mapping[str, BucketLadder],
    counts: Mapping[int, int],
    *,
    model: str = "demo",
    device: str | torch.device = "auto",
    dtype: str = "auto",
    context: int = 64,
    steps: int = 256,
    rounds: int = 7,
    progress: bool = True,
) -> Trial:
    """Replay a load through each ladder in alternation (A B, B A, A B, ...), over one model.

    All ladders have the same max_batch_size; `counts` is batch size -> decode steps; `context` is the tokens of each
    row. Raises `ArgumentError` if the model or the device cannot be used, or a number is out of range.
    """
    if min(context, steps, rounds) < 1:
        raise ArgumentError(f"context, steps and rounds must be >= 1, got {context}, {steps} and {rounds}")
    largest = max(ladder.max_batch_size for ladder in ladders.values())
    length = context + STEPS_PER_STAGING
    pages = largest * (-(-length // 16) + 1)
    config = BucketConfig(max_batch_size=largest, max_sequence_length=length, total_num_pages=pages)
    target, sizes = resolve_device(device), (1, largest)
    decoder = load_model(
        model, device=target, dtype=dtype, max_sequence_length=length, batch_sizes=sizes, progress=progress
    )
    longest = decoder.config.max_position_embeddings - STEPS_PER_STAGING
    if context > longest:
        reason = f"the length of {model}, less some steps"
        raise ArgumentError(f"context must be in 1..{longest} ({reason}), got {context}")
    trace = trace_of(counts, steps)
    with ExitStack() as stack:
        runs = {
            name: _LadderRun(decoder, replace(config, batch_sizes=ladder.sizes), context, stack)
            for name, ladder in ladders.items()
        }
        visits = [name for index in range(rounds + 1) for name in list(ladders)[:: -1 if index % 2 else 1]]
        for name in tqdm(visits, "trying ladders", unit="round", disable=None if progress else True, leave=False):
            runs[name].run(trace)
        backend = next(iter(runs.values())).runner.graphs.backend
        trials = {name: run.result() for name, run in runs.items()}
    return Trial(model, str(decoder.dtype).removeprefix("torch."), backend, context, steps, rounds, trials)


class _LadderRun:
    """One ladder's graphs, and the times of its rounds."""

    def __init__(self, decoder: Model, config: BucketConfig, context: int, stack: ExitStack) -> None:
        self.runner: Runner = make_runner(decoder, config, prefix_cache=False)
        stack.callback(self.runner.close)
        self._captured = self.runner.graphs.capture(progress=False, kinds=["steps"]).buckets
        self._rows = stack.enter_context(rows_at(self.runner, config.max_batch_size, context))
        self._rounds_ms: list[float] = []

    def run(self, trace: list[int]) -> None:
        """Time the whole trace, without the staging that sets the rows back before they outgrow their pages."""
        runner, seconds = self.runner, 0.0
        synchronize = torch.cuda.synchronize if runner.model.device.type == "cuda" else lambda: None
        for begin in range(0, len(trace), STEPS_PER_STAGING):
            runner.stage(self._rows)
            synchronize()
            began = time.perf_counter()
            for batch_size in trace[begin : begin + STEPS_PER_STAGING]:
                runner.graphs.replay(batch_size)
            synchronize()
            seconds += time.perf_counter() - began
        self._rounds_ms.append(1000 * seconds / len(trace))

    def result(self) -> LadderTrial:
        rounds, captured = self._rounds_ms[1:], self._captured  # the first round is warm-up
        capture_ms, pool_bytes = sum(each.capture_ms for each in captured), sum(each.pool_bytes for each in captured)
        return LadderTrial(statistics.median(rounds), min(rounds), rounds, capture_ms, pool_bytes)
