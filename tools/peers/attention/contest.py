"""This runtime's attention and its peers over the same caches: outputs are compared first, then times, in turn.

Calls are short: a round has many of them, each over other memory than the one before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graphdecode.attention import PagedDecodeAttention
from graphdecode.profiling.bandwidth import read_bandwidth
from harness import in_turn
from peers.attention.peers import AttentionPeer, Calls
from peers.attention.problem import PAGE_SIZE, AttentionProblem
from peers.peer import attempt

ROUNDS = 9
_ROUND_SECONDS = 0.004
_MOST_REPEATS = 1024
_PLANS = 32  # that are timed together


@dataclass
class AttentionResult:
    """One peer at one point of the grid.

    Attributes:
        shape: name of the heads and dtypes.
        batch: rows.
        context: keys of each row.
        peer: whose result this is.
        kv_bytes: keys and values that a call has to read.
        read_bandwidth: of the device, in bytes per second, measured with this point.
        error: distance from float64 attention in root mean squares of it; None where there was no output.
        us: of one call, the median of its rounds; None for a peer that was left out.
        rounds_us: of each round.
        times_graphdecode: its time over this runtime's; above 1 it is slower.
        bytes_per_s: keys and values over time.
        of_read_bandwidth: the same as a share of what the device reads.
        note: why it was left out.
    """

    shape: str
    batch: int
    context: int
    peer: str
    kv_bytes: int
    read_bandwidth: float | None = None
    error: float | None = None
    us: float | None = None
    rounds_us: list[float] | None = None
    times_graphdecode: float | None = None
    bytes_per_s: float | None = None
    of_read_bandwidth: float | None = None
    note: str = ""


def compare_attention(peers: Sequence[AttentionPeer], problem: AttentionProblem) -> list[AttentionResult]:
    """Compare this runtime's attention with its peers at one point.

    A peer that is absent, that fails, or whose output is further from float64 attention than rounding explains is left
    out with its reason. The others run in turn (A B A B ...).

    Args:
        peers: in the order of the results; this runtime comes first.
        problem: the point.
    """
    shape = problem.shape
    results, prepared = [], {}
    for peer in (GraphdecodeAttention(), *peers):
        result = AttentionResult(shape.name, problem.batch, problem.context, peer.name, problem.kv_bytes)
        results.append(result)
        result.note = peer.why_not(problem.device)
        if result.note:
            continue
        checked, result.note = attempt(partial(_check, peer, problem))
        if checked is None:
            continue
        calls, result.error = checked
        if result.error > shape.tolerance:
            result.note = (
                f"gives another output: {result.error:.2g} root mean squares away from attention in float64, tolerance "
                f"{shape.tolerance:g}"
            )
            continue
        ready, result.note = attempt(partial(prepare, calls, problem.device))
        if ready is not None:
            prepared[peer.name] = ready
    _time_in_turn(results, prepared, read_bandwidth(problem.device, repeats=3))
    return results


def _check(peer: AttentionPeer, problem: AttentionProblem) -> tuple[Calls, float]:
    """Return a peer's calls and how far the outputs of the first and the last are from the right ones."""
    calls = peer.calls(problem)
    first: Tensor = calls[0]()
    error = problem.error(first, 0)
    return calls, max(error, problem.error(calls[-1](), len(calls) - 1))


def _time_in_turn(results: list[AttentionResult], prepared: dict[str, Prepared], bandwidth: float) -> None:
    rounds = in_turn({name: ready.round_us for name, ready in prepared.items()}, ROUNDS)
    for result in results:
        result.read_bandwidth = bandwidth
        if result.peer not in rounds:
            continue
        result.rounds_us = rounds[result.peer]
        result.us = statistics.median(result.rounds_us)
        own = rounds.get(GraphdecodeAttention.name)
        result.times_graphdecode = result.us / statistics.median(own) if own else None
        result.bytes_per_s = result.kv_bytes / (result.us * 1e-6)
        result.of_read_bandwidth = result.bytes_per_s / bandwidth


class GraphdecodeAttention(AttentionPeer):
    """Planned once, as in a step."""

    name = "graphdecode"

    def calls(self, problem: AttentionProblem) -> Calls:
        """Return the calls."""
        attention = _planned(problem)
        return [partial(_run, attention, problem, cache) for cache in problem.caches]


def _run(attention: PagedDecodeAttention, problem: AttentionProblem, cache: tuple[Tensor, Tensor]) -> Tensor:
    attention.run(problem.out, problem.q, *cache, problem.table)
    return problem.out


def _planned(problem: AttentionProblem) -> PagedDecodeAttention:
    shape = problem.shape
    attention = PagedDecodeAttention(
        max_batch_size=problem.batch,
        num_qo_heads=shape.qo_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        page_size=PAGE_SIZE,
        max_pages_per_row=problem.pages_of_row,
        dtype=shape.dtype,
        device=problem.device,
    )
    attention.plan(*_plan_inputs(problem))
    return attention


def _plan_inputs(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    before = torch.full((problem.batch,), problem.context - 1, dtype=torch.int32, device=problem.device)
    return before, torch.tensor([problem.batch], dtype=torch.int32, device=problem.device)


def plan_us(problem: AttentionProblem) -> float:
    """Return the microseconds of the plan by itself, in a graph of many; on a GPU."""
    attention = _planned(problem)
    plan = partial(attention.plan, *_plan_inputs(problem))
    return median_us(prepare([plan] * _PLANS, problem.device))


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
