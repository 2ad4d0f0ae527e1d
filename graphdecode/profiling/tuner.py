"""Bucket ladders for a recorded load: the record, the costs of steps and graphs, and the best ladders."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphdecode.buckets import BucketLadder
from graphdecode.errors import ArgumentError, cause, shown

SCHEMA_VERSION = 1  # schema of the report
TODAY = "today"


def read_batch_sizes(path: Path) -> Counter[int]:
    """Read a histogram, batch size -> decode steps; raises `ArgumentError` for an invalid or empty one."""
    counts = _read(path)
    if not counts.total():
        raise ArgumentError(f"{path} has no decode steps")
    return counts


def record_batch_sizes(path: Path, counts: Mapping[int, int]) -> None:
    """Add a histogram to that of a file, atomically; raises `ArgumentError` if the file is invalid or not writable."""
    merged = Counter(counts)
    if path.exists():
        merged += _read(path)
    text = json.dumps({"batch_sizes": {str(size): merged[size] for size in sorted(merged)}}, indent=1) + "\n"
    scratch = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise ArgumentError(f"{path} cannot be written: {cause(error)}") from error


def check_record(path: Path) -> None:
    """Raise `ArgumentError` if batch sizes cannot be added to a file."""
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentError(f"{path} must be a file in a folder that exists")
    if not os.access(path.parent, os.W_OK):
        raise ArgumentError(f"{path} cannot be written: its folder is read-only")
    if path.exists():
        _read(path)


def _read(path: Path) -> Counter[int]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} is not a record of batch sizes: {cause(error)}") from error
    counts = record.get("batch_sizes") if isinstance(record, dict) else None
    if not isinstance(counts, dict):
        raise ArgumentError(f"{path} is not a record of batch sizes: it must be an object with an object batch_sizes")
    for size, steps in counts.items():
        if not re.fullmatch(r"[1-9]\d{0,8}", size) or type(steps) is not int or steps < 0:
            raise ArgumentError(
                f"{path} is not a record of batch sizes: sizes must be integers >= 1 and their counts integers >= 0, "
                f"got {shown(size)}: {shown(steps)}"
            )
    return Counter({int(size): steps for size, steps in counts.items()})


@dataclass(frozen=True)
class StepCost:
    """Cost of a decode step at each batch size, in milliseconds."""

    step_ms: np.ndarray  # [max_batch_size + 1]; entry b is of a graph of b rows, entry 0 is unused
    source: str  # where the numbers are from

    @classmethod
    def linear(cls, max_batch_size: int, *, base_ms: float = 1.0, row_ms: float = 0.02) -> StepCost:
        """Return a linear model for steps that are bound by reading weights: a constant, and a little per row."""
        rows = np.arange(max_batch_size + 1)
        return cls(base_ms + row_ms * rows, f"linear model, {base_ms} ms + {row_ms} ms a row")

    @classmethod
    def from_profile(cls, profile: dict, max_batch_size: int) -> StepCost:
        """Interpolate between the median steps of a profile's buckets, each the mean over its contexts."""
        samples: dict[int, list[float]] = {}
        for row in profile["rows"]:
            samples.setdefault(row["bucket"], []).append(row["step_ms"]["p50"])
        points = {bucket: float(np.mean(values)) for bucket, values in samples.items()}
        beyond = f", extrapolated from {max(points)} rows on" if max(points) < max_batch_size else ""
        return cls(_interpolated(points, max_batch_size), f"measured at {len(points)} buckets{beyond}")


@dataclass(frozen=True)
class GraphCost:
    """Cost of a graph at each batch size; see `StepCost`."""

    capture_ms: np.ndarray  # [max_batch_size + 1]
    pool_bytes: np.ndarray  # [max_batch_size + 1]; of its intermediates

    @classmethod
    def from_profile(cls, profile: dict, max_batch_size: int) -> GraphCost | None:
        """Interpolate between the captures of a profile; None if nothing was captured."""
        captured = [
            bucket
            for bucket in profile["captures"]["buckets"]
            if bucket["state"] == "captured" and bucket.get("queries", 1) == 1
        ]
        columns = ({each["bucket"]: each[name] for each in captured} for name in ("capture_ms", "pool_bytes"))
        return cls(*(_interpolated(column, max_batch_size) for column in columns)) if captured else None


@dataclass(frozen=True)
class QueryCost:
    """Cost of a step with several queries a row, for speculation."""

    bucket: int  # rows
    queries: int  # per row
    step_ms: float  # from the launch to the tokens on the host
    break_even: float  # mean tokens of a row at which such a step is as quick as plain ones


def query_costs(profile: Mapping[str, Any]) -> list[QueryCost]:
    """Return the step costs of a profile by rows and queries, ascending; empty without speculation."""
    measured = {(row["bucket"], row["queries"]): row["step_ms"] for row in profile.get("wide_steps", ())}
    return [
        QueryCost(bucket, queries, step_ms, step_ms / measured[bucket, 1])
        for (bucket, queries), step_ms in sorted(measured.items())
    ]


def _interpolated(points: Mapping[int, float], max_batch_size: int) -> np.ndarray:
    """Interpolate for 0..max_batch_size: constant below the first point, past the last one by the slope of a fit."""
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

    Candidates are the cheapest bucket between each two batch sizes that occur. Dynamic programming over (graphs,
    largest bucket): the minimum for batch sizes up to bucket j with k buckets is over the bucket before j. O(max_graphs
    * d^2) for d batch sizes. Raises `ArgumentError` if a batch size is out of range, or nothing was counted.
    """
    outside = [size for size in counts if not 1 <= size <= max_batch_size]
    if outside or sum(counts.values()) <= 0:
        raise ArgumentError(
            f"batch sizes must be in 1..max_batch_size={max_batch_size} and occur, got {outside or dict(counts)}"
        )
    if max_graphs < 1:
        raise ArgumentError(f"max_graphs must be >= 1, got {max_graphs}")
    sizes = sorted(size for size, steps in counts.items() if steps)
    cheapest = (
        size + int(cost.step_ms[size:following].argmin())
        for size, following in zip(sizes, [*sizes[1:], max_batch_size + 1], strict=True)
    )
    buckets = sorted({max_batch_size, *cheapest})
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


def _trace(before: Sequence[np.ndarray], buckets: Sequence[int], max_batch_size: int) -> BucketLadder:
    chosen, index = [], len(buckets)
    for choice in reversed(before):
        index = int(choice[index])
        if index == 0:
            break
        chosen.append(buckets[index - 1])
    return BucketLadder(chosen, max_batch_size)


@dataclass(frozen=True)
class LadderFigures:
    """Figures of a ladder under a load."""

    name: str  # "today", "auto K" (made without knowing the load) or "best of K" graphs
    sizes: tuple[int, ...]  # the buckets
    expected_ms: float  # mean cost of a step
    gain_ms: float | None  # of "best of K" against "best of K-1"
    padding_share: float  # share of the computed rows that are padding
    capture_ms: float | None  # expected, of all graphs; None without a profile
    pool_bytes: float | None  # expected, of their intermediates; None without a profile

    @property
    def ladder(self) -> BucketLadder:
        """The ladder itself."""
        return BucketLadder(self.sizes, self.sizes[-1])


def compare_ladders(
    counts: Mapping[int, int], today: BucketLadder, cost: StepCost, max_graphs: int, graph_cost: GraphCost | None = None
) -> list[LadderFigures]:
    """Return figures of the ladder in force, the automatic one of `max_graphs`, and the best ones of 1, 2, ... graphs.

    The automatic one is left out if `max_graphs` is the number in force. `counts` and errors: see `best_ladders`.
    """
    top = today.max_batch_size
    best = best_ladders(counts, cost, top, max_graphs)
    named = {TODAY: today}
    if len(today) != max_graphs:
        named[f"auto {max_graphs}"] = BucketLadder.auto(top, max_graphs)
    named |= {f"best of {graphs}": ladder for graphs, ladder in enumerate(best, 1)}
    figures: list[LadderFigures] = []
    for name, ladder in named.items():
        expected_ms, graphs = expected_step_ms(ladder, counts, cost), list(ladder)
        follows = name.startswith("best") and figures[-1].name.startswith("best")
        gain_ms = figures[-1].expected_ms - expected_ms if follows else None
        costs: tuple[float, float] | tuple[None, None] = (None, None)
        if graph_cost is not None:
            costs = float(graph_cost.capture_ms[graphs].sum()), float(graph_cost.pool_bytes[graphs].sum())
        share = padding_share(ladder, counts)
        figures.append(LadderFigures(name, ladder.sizes, expected_ms, gain_ms, share, *costs))
    return figures
