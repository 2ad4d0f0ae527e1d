"""The best ladder for a load: which batch sizes should have a graph, given how often each occurs and what it costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphdecode.buckets import BucketLadder


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
    def measured(cls, points: Mapping[int, float], max_batch_size: int) -> StepCost:
        """Interpolate between measured buckets; below the first and past the last, continue their slope.

        Raises:
            ValueError: nothing was measured.
        """
        if not points:
            raise ValueError("a profile without buckets says nothing about the cost of a step")
        sizes = np.array(sorted(points), dtype=float)
        costs = np.array([points[int(size)] for size in sizes])
        rows = np.arange(max_batch_size + 1, dtype=float)
        step_ms = np.interp(rows, sizes, costs)
        if len(sizes) > 1:
            slope = max((costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2]), 0.0)
            step_ms = np.where(rows > sizes[-1], costs[-1] + slope * (rows - sizes[-1]), step_ms)
        return cls(step_ms, f"measured at {len(sizes)} buckets")

    @classmethod
    def from_profile(cls, path: Path, max_batch_size: int) -> StepCost:
        """Read the device step times of a `profile.json`, the mean over its contexts.

        Raises:
            ValueError: the file cannot be read, or is no profile.
        """
        try:
            rows = json.loads(path.read_text())["rows"]
            samples: dict[int, list[float]] = {}
            for row in rows:
                samples.setdefault(int(row["bucket"]), []).append(float(row["step_ms"]["p50"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no profile: {error!r}") from error
        return cls.measured({bucket: float(np.mean(values)) for bucket, values in samples.items()}, max_batch_size)


def read_batch_sizes(path: Path) -> Counter[int]:
    """Read a histogram of batch sizes, as an engine recorded it: batch size -> decode steps.

    Raises:
        ValueError: the file cannot be read or holds something else.
    """
    try:
        counts = {int(size): int(steps) for size, steps in json.loads(path.read_text())["batch_sizes"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no record of batch sizes: {error!r}") from error
    if not counts or min(counts) < 1 or min(counts.values()) < 0:
        raise ValueError(f"{path}: batch sizes must be >= 1 and their counts >= 0")
    return Counter(counts)


def record_batch_sizes(path: Path, counts: Mapping[int, int]) -> None:
    """Add a histogram to a file, merging it with what earlier runs left there.

    Raises:
        ValueError: the file holds something else.
    """
    merged = Counter(counts)
    if path.exists():
        merged += read_batch_sizes(path)
    path.write_text(json.dumps({"batch_sizes": {str(size): merged[size] for size in sorted(merged)}}, indent=1) + "\n")


def expected_step_ms(ladder: BucketLadder, counts: Mapping[int, int], cost: StepCost) -> float:
    """Return the mean cost of a step of the load, in milliseconds."""
    total = sum(counts.values())
    return sum(steps * cost.step_ms[ladder.bucket_for(size)] for size, steps in counts.items()) / total


def padding_share(ladder: BucketLadder, counts: Mapping[int, int]) -> float:
    """Return the share of computed rows that are padding under the load."""
    computed = sum(steps * ladder.bucket_for(size) for size, steps in counts.items())
    return 1.0 - sum(steps * size for size, steps in counts.items()) / computed


def best_ladders(counts: Mapping[int, int], cost: StepCost, max_batch_size: int, max_graphs: int) -> list[BucketLadder]:
    """Return, for each number of graphs 1..max_graphs, the ladder of least expected step time. Exact.

    Dynamic programming over (graphs, largest bucket so far): the cheapest way to serve all batch sizes up to j with k
    buckets, the last of which is j, is the best over the bucket i before it. O(max_graphs * max_batch_size^2).

    Args:
        counts: batch size -> decode steps; sizes in 1..max_batch_size.
        cost: of a step.
        max_batch_size: always one of the buckets.
        max_graphs: how many buckets there may be.

    Raises:
        ValueError: a batch size is outside the range, or nothing was counted.
    """
    outside = [size for size in counts if not 1 <= size <= max_batch_size]
    if outside or sum(counts.values()) <= 0:
        raise ValueError(
            f"batch sizes must be in 1..max_batch_size={max_batch_size} and occur, got {outside or counts}"
        )
    steps = np.zeros(max_batch_size + 1)
    for size, number in counts.items():
        steps[size] = number
    served = np.cumsum(steps)
    best = served * cost.step_ms  # best[j]: everything up to j in one bucket
    before: list[np.ndarray] = []  # for each further graph: the bucket below each bucket, 0 for none
    ladders = [BucketLadder([], max_batch_size)]
    below = np.tril(np.ones((max_batch_size + 1, max_batch_size + 1), dtype=bool), -1)
    added = (served[:, None] - served[None, :]) * cost.step_ms[:, None]
    for _ in range(1, min(max_graphs, max_batch_size)):
        best[0] = 0.0
        through = np.where(below, best[None, :] + added, np.inf)
        before.append(through.argmin(axis=1))
        best = through.min(axis=1)
        ladders.append(_trace(before, max_batch_size))
    return ladders


def _trace(before: list[np.ndarray], max_batch_size: int) -> BucketLadder:
    sizes, size = [], max_batch_size
    for choice in reversed(before):
        size = int(choice[size])
        if size <= 0:
            break
        sizes.append(size)
    return BucketLadder(sizes, max_batch_size)
