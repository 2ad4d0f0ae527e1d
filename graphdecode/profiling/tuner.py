"""The best ladder for a load: which batch sizes should have a graph, given how often each occurs and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphdecode.buckets import BucketLadder
from graphdecode.errors import ArgumentError


@dataclass(frozen=True)
class StepCost:
    """What a decode step costs at each batch size, in milliseconds.

    Attributes:
        step_ms: [max_batch_size + 1]; entry b is the cost of a graph of b rows, entry 0 is not used.
        source: where the numbers come from, for people.
    """

    step_ms: np.ndarray
    source: str

    @classmethod
    def linear(cls, max_batch_size: int, *, base_ms: float = 1.0, row_ms: float = 0.02) -> StepCost:
        """Return the model of a step that is bound by reading weights: a constant, and a little for each row."""
        rows = np.arange(max_batch_size + 1)
        return cls(base_ms + row_ms * rows, f"linear model, {base_ms} ms + {row_ms} ms a row")

    @classmethod
    def from_profile(cls, profile: dict, max_batch_size: int) -> StepCost:
        """Interpolate between the median steps of a profile's buckets, each the mean over its contexts.

        Args:
            profile: what `read_profile` returned.
            max_batch_size: rows.
        """
        samples: dict[int, list[float]] = {}
        for row in profile["rows"]:
            samples.setdefault(row["bucket"], []).append(row["step_ms"]["p50"])
        points = {bucket: float(np.mean(values)) for bucket, values in samples.items()}
        beyond = f", extrapolated from {max(points)} rows on" if max(points) < max_batch_size else ""
        return cls(_interpolated(points, max_batch_size), f"measured at {len(points)} buckets{beyond}")


@dataclass(frozen=True)
class GraphCost:
    """What a graph costs to have, at each batch size; entry b is of a graph of b rows, entry 0 is not used.

    Attributes:
        capture_ms: [max_batch_size + 1]; time of its capture.
        pool_bytes: [max_batch_size + 1]; memory of its intermediates.
    """

    capture_ms: np.ndarray
    pool_bytes: np.ndarray

    @classmethod
    def from_profile(cls, profile: dict, max_batch_size: int) -> GraphCost | None:
        """Interpolate between the captures of a profile; None where nothing was captured.

        Args:
            profile: what `read_profile` returned.
            max_batch_size: rows.
        """
        captured = [bucket for bucket in profile["captures"]["buckets"] if _is_plain(bucket)]
        if not captured:
            return None
        times = {bucket["bucket"]: bucket["capture_ms"] for bucket in captured}
        sizes = {bucket["bucket"]: bucket["pool_bytes"] for bucket in captured}
        return cls(_interpolated(times, max_batch_size), _interpolated(sizes, max_batch_size))


@dataclass(frozen=True)
class QueryCost:
    """What a step costs that feeds several tokens of a row: the ladder's other axis, for speculation.

    Attributes:
        bucket: rows.
        queries: of each row.
        step_ms: from the launch to the tokens in the host's hands.
        break_even: tokens that a row has to gain by such a step, on average, for it to be no slower than plain ones.
    """

    bucket: int
    queries: int
    step_ms: float
    break_even: float


def query_costs(profile: Mapping[str, Any]) -> list[QueryCost]:
    """Return the table of step costs by rows and queries, ascending; empty where the profiled engine did not draft.

    Args:
        profile: what `read_profile` returned.
    """
    measured = {(row["bucket"], row["queries"]): row["step_ms"] for row in profile.get("wide_steps", ())}
    return [
        QueryCost(bucket, queries, step_ms, step_ms / measured[bucket, 1])
        for (bucket, queries), step_ms in sorted(measured.items())
    ]


def _is_plain(bucket: dict) -> bool:
    return bucket["state"] == "captured" and bucket.get("queries", 1) == 1


def _interpolated(points: Mapping[int, float], max_batch_size: int) -> np.ndarray:
    """Return values for 0..max_batch_size: below the first point its own, past the last on along the slope of all."""
    sizes = np.array(sorted(points), dtype=float)
    values = np.array([points[int(size)] for size in sizes])
    rows = np.arange(max_batch_size + 1, dtype=float)
    slope = max(np.polyfit(sizes, values, 1)[0], 0.0) if len(sizes) > 1 else 0.0
    return np.interp(rows, sizes, values) + slope * np.maximum(rows - sizes[-1], 0.0)


def expected_step_ms(ladder: BucketLadder, counts: Mapping[int, int], cost: StepCost) -> float:
    """Return the mean cost of a step of the load, in milliseconds."""
    total = sum(counts.values())
    return float(sum(steps * cost.step_ms[ladder.bucket_for(size)] for size, steps in counts.items()) / total)


def padding_share(ladder: BucketLadder, counts: Mapping[int, int]) -> float:
    """Return the share of computed rows that are padding under the load."""
    computed = sum(steps * ladder.bucket_for(size) for size, steps in counts.items())
    return 1.0 - sum(steps * size for size, steps in counts.items()) / computed


def best_ladders(counts: Mapping[int, int], cost: StepCost, max_batch_size: int, max_graphs: int) -> list[BucketLadder]:
    """Return, for each number of graphs 1..max_graphs, the ladder of least expected step time. Exact.

    Between one batch size that occurs and the next, only the cheapest bucket can be worth having: all of them serve the
    same batches. Dynamic programming goes over (graphs, largest bucket so far) of these: the cheapest way to serve all
    batch sizes up to bucket j with k buckets, the last of which is j, is the best over the bucket before it.
    O(max_graphs * d^2) for d batch sizes that occur. More graphs than those are never needed: the list ends there.

    Args:
        counts: batch size -> decode steps; sizes in 1..max_batch_size.
        cost: of a step.
        max_batch_size: always one of the buckets.
        max_graphs: how many buckets there may be.

    Raises:
        ValueError: a batch size is outside the range, nothing was counted, or there may be no bucket.
    """
    outside = [size for size in counts if not 1 <= size <= max_batch_size]
    if outside or sum(counts.values()) <= 0:
        raise ArgumentError(
            f"batch sizes must be in 1..max_batch_size={max_batch_size} and occur, got {outside or dict(counts)}"
        )
    if max_graphs < 1:
        raise ArgumentError(f"max_graphs must be >= 1, got {max_graphs}")
    buckets = _worthwhile_buckets(sorted(size for size, steps in counts.items() if steps), cost, max_batch_size)
    served = np.array([0, *(sum(steps for size, steps in counts.items() if size <= bucket) for bucket in buckets)])
    step_ms = np.array([0.0, *cost.step_ms[buckets]])
    best = served * step_ms  # best[j]: everything up to buckets[j - 1] in that bucket; 0 is no bucket
    added = (served[:, None] - served[None, :]) * step_ms[:, None]
    below = np.tril(np.ones(added.shape, dtype=bool), -1)
    before: list[np.ndarray] = []  # for each further graph: the bucket below each bucket, 0 for none
    ladders = [BucketLadder([], max_batch_size)]
    for _ in range(1, min(max_graphs, len(buckets))):
        through = np.where(below, best[None, :] + added, np.inf)
        before.append(through.argmin(axis=1))
        best = through.min(axis=1)
        best[0] = 0.0
        ladders.append(_trace(before, buckets, max_batch_size))
    return ladders


def _worthwhile_buckets(sizes: Sequence[int], cost: StepCost, max_batch_size: int) -> list[int]:
    buckets = {max_batch_size}
    for size, following in zip(sizes, [*sizes[1:], max_batch_size + 1], strict=True):
        buckets.add(size + int(cost.step_ms[size:following].argmin()))
    return sorted(buckets)


def _trace(before: Sequence[np.ndarray], buckets: Sequence[int], max_batch_size: int) -> BucketLadder:
    chosen, index = [], len(buckets)
    for choice in reversed(before):
        index = int(choice[index])
        if index == 0:
            break
        chosen.append(buckets[index - 1])
    return BucketLadder(chosen, max_batch_size)
