"""Some durations in five numbers, and in the bars of a histogram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_BARS = 40
_QUARTILES = 3  # how far a histogram goes: so many times as far from the least value as three quarters of them do


@dataclass(frozen=True)
class Percentiles:
    """Of one kind of duration."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Return the percentiles of some durations, in their unit."""
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        return cls(float(p50), float(p90), float(p99), float(max(values)))

    @classmethod
    def weighted(cls, weights: Mapping[float, float]) -> Percentiles:
        """Return the percentiles of some values that count by their weights.

        Args:
            weights: value -> weight; at least one is above 0.
        """
        values = sorted(value for value, weight in weights.items() if weight > 0)
        shares = np.cumsum([weights[value] for value in values])
        p50, p90, p99 = (values[int(np.searchsorted(shares, share * shares[-1]))] for share in (0.5, 0.9, 0.99))
        return cls(float(p50), float(p90), float(p99), float(values[-1]))


@dataclass(frozen=True)
class Histogram:
    """How often durations fall between equally wide limits.

    Attributes:
        low: lower end of the first bar.
        high: upper end of the last bar.
        counts: of each bar.
        above: durations past the last bar: a stall of the machine would otherwise make one bar of all the rest.
    """

    low: float
    high: float
    counts: list[int]
    above: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Histogram:
        """Return the histogram of some durations, in their unit."""
        low, p75 = float(min(values)), float(np.percentile(values, 75))
        high = max(min(float(max(values)), low + _QUARTILES * (p75 - low)), low * (1 + 1e-6) + 1e-12)
        counts, _ = np.histogram(values, bins=_BARS, range=(low, high))
        return cls(low, high, [int(count) for count in counts], sum(value > high for value in values))
