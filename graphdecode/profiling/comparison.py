"""Comparison of two profiles: what got slower, and by how much."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from graphdecode.errors import ArgumentError, cause
from graphdecode.profiling.latency import SCHEMA_VERSION

_SAME = ("model", "dtype", "backend")


@dataclass(frozen=True)
class PointChange:
    """One bucket at one context in two profiles; times are of a step, in milliseconds."""

    bucket: int  # rows
    context: int  # tokens of each row
    before_ms: float  # median of all steps
    after_ms: float  # the same in the later profile
    before_quiet_ms: float  # median of the quickest round
    after_quiet_ms: float  # the same in the later profile
    noise: float  # the larger spread between rounds

    @property
    def ratio(self) -> float:
        """After over before, medians of all steps: above 1 is slower."""
        return self.after_ms / self.before_ms

    @property
    def quiet_ratio(self) -> float:
        """After over before, quickest rounds."""
        return self.after_quiet_ms / self.before_quiet_ms

    def is_slower(self, tolerance: float) -> bool:
        """Whether this point got slower by more than `tolerance` and its noise, by both measures."""
        return min(self.ratio, self.quiet_ratio) > 1 + tolerance + self.noise


@dataclass(frozen=True)
class Comparison:
    """All points that two profiles share."""

    changes: list[PointChange]
    differences: list[str]  # differences in model, machine and software, as messages

    @property
    def overall(self) -> float:
        """Geometric mean of the ratios of medians."""
        return statistics.geometric_mean([change.ratio for change in self.changes])

    @property
    def overall_quiet(self) -> float:
        """Geometric mean of the ratios of quickest rounds."""
        return statistics.geometric_mean([change.quiet_ratio for change in self.changes])

    def slower(self, tolerance: float) -> list[PointChange]:
        """Return the points that got slower by more than `tolerance`, beyond their noise.

        All of them if the points together did: noise of single points cancels out in their mean.
        """
        if min(self.overall, self.overall_quiet) > 1 + tolerance:
            return self.changes
        return [change for change in self.changes if change.is_slower(tolerance)]

    def unclear(self, tolerance: float) -> list[PointChange]:
        """Return the points whose noise is larger than the tolerance."""
        return [change for change in self.changes if change.noise > tolerance]


def read_profile(path: Path) -> dict:
    """Read a `profile.json`; raises `ArgumentError` if it cannot be read, or has another schema."""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} is not a profile: {cause(error)}") from error
    schema = profile.get("schema") if isinstance(profile, dict) else None
    if schema != SCHEMA_VERSION:
        raise ArgumentError(f"{path} is not a profile: schema {SCHEMA_VERSION} is needed, got {schema!r}")
    try:
        for row in profile["rows"]:
            _ = row["bucket"], row["context"], row["step_ms"]["p50"], row["noise"], min(row["round_ms"])
        for bucket in profile["captures"]["buckets"]:
            _ = bucket["bucket"], bucket["state"], bucket["capture_ms"], bucket["pool_bytes"]
        _ = profile["environment"]["device_name"], *(profile[key] for key in _SAME)
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"{path} is not a profile: {error!r}") from error
    if not profile["rows"]:
        raise ArgumentError(f"{path} is not a profile: it has no rows")
    return profile


def compare_profiles(before: dict, after: dict) -> Comparison:
    """Compare the points that two profiles share; raises `ArgumentError` if there are none."""
    old = {(row["bucket"], row["context"]): row for row in before["rows"]}
    new = {(row["bucket"], row["context"]): row for row in after["rows"]}
    common = [point for point in new if point in old]
    if not common:
        raise ArgumentError("the two profiles have no bucket and context in common")
    changes = []
    for point in common:
        one, two = old[point], new[point]
        medians = one["step_ms"]["p50"], two["step_ms"]["p50"]
        quiet = min(one["round_ms"]), min(two["round_ms"])
        changes.append(PointChange(*point, *medians, *quiet, max(one["noise"], two["noise"])))
    facts = [{key: profile[key] for key in _SAME} | profile["environment"] for profile in (before, after)]
    differences = [
        f"{key}: {facts[0][key]} before, {facts[1].get(key)} after"
        for key in (*_SAME, "device_name", "threads")
        if facts[0][key] != facts[1].get(key)
    ]
    return Comparison(changes, differences)
