"""Timing of short calls: many of them in a round, each over other memory than the one before."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ROUNDS = 9

_ROUND_SECONDS = 0.004
_MOST_REPEATS = 1024


@dataclass(frozen=True)
class Prepared:
    """Calls that are warm, and how often to go through them so that a clock can tell.

    Attributes:
        rotate: makes each call once.
        calls: how many these are.
        repeats: of `rotate` in a round.
        device: where they run.
    """

    rotate: Callable[[], object]
    calls: int
    repeats: int
    device: torch.device

    def round_us(self) -> float:
        """Run one round and return the microseconds of one call."""
        return 1e6 * _seconds(self.rotate, self.repeats, self.device) / (self.repeats * self.calls)


def prepare(calls: Sequence[Callable[[], object]], device: torch.device) -> Prepared:
    """Warm calls up; on a GPU, capture them into one graph, so that launches cost nothing."""

    def each() -> None:
        for call in calls:
            call()

    each()
    rotate: Callable[[], object] = each
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            each()
        rotate = graph.replay
    repeats = 1
    while repeats < _MOST_REPEATS and _seconds(rotate, repeats, device) < _ROUND_SECONDS:
        repeats *= 2
    return Prepared(rotate, len(calls), repeats, device)


def median_us(prepared: Prepared) -> float:
    """Return the median of several rounds, in microseconds of one call."""
    return statistics.median(prepared.round_us() for _ in range(ROUNDS))


def _seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return time.perf_counter() - began
