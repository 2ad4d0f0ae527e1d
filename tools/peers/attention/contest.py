"""This runtime's attention and its peers over the same caches: outputs are compared first, then times, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from graphdecode.profiling.bandwidth import read_bandwidth
from peers.attempt import attempt
from peers.attention.own import GraphdecodeAttention
from peers.attention.peer import AttentionPeer, Calls
from peers.attention.problem import AttentionProblem
from peers.attention.timing import ROUNDS, Prepared, prepare


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
    rounds: dict[str, list[float]] = {name: [] for name in prepared}
    for _ in range(ROUNDS):
        for name, ready in prepared.items():
            rounds[name].append(ready.round_us())
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
