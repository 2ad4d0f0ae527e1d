"""One point of a latency profile: a bucket at a context, with what its times stand next to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


NOISY = 0.1  # medians of rounds that differ by more say little about a tenth


def spread_of(round_ms: Sequence[float]) -> float:
    """Return half the range of the rounds' medians over their median; of three rounds or more, the worst is left out.

    One round may be spoilt by a neighbour without moving the median of all; two spoilt rounds may move it.
    """
    ordered = sorted(round_ms)
    kept = ordered[:-1] if len(ordered) > 2 else ordered
    return (kept[-1] - kept[0]) / 2 / statistics.median(ordered)


@dataclass
class Samples:
    """What was timed at one point, over all rounds; and the median of each round."""

    launch_us: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)
    eager_ms: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    eager_round_ms: list[float] = field(default_factory=list)

    def add_round(
        self,
        launch_us: Sequence[float],
        step_ms: Sequence[float],
        token_ms: Sequence[float],
        eager_ms: Sequence[float],
    ) -> None:
        """Take in the times of one round."""
        self.launch_us += launch_us
        self.step_ms += step_ms
        self.token_ms += token_ms
        self.eager_ms += eager_ms
        self.round_ms.append(statistics.median(step_ms))
        self.eager_round_ms.append(statistics.median(eager_ms))


@dataclass(frozen=True)
class ProfileRow:
    """One bucket at one context.

    Attributes:
        bucket: rows, all of them live.
        context: tokens in the cache of each row.
        launch_us: host time of the launch.
        step_ms: time of the step on the device.
        token_ms: from the launch to the tokens in the host's hands.
        eager_ms: time of the same step, run eagerly.
        replay_speedup: eager over replayed, medians.
        bytes_moved: bytes that a step must read and write: weights once, keys and values of all rows once.
        in_cache: so few that the processor's last cache may hold them: memory sets no floor then.
        achieved_bytes_per_second: `bytes_moved` over the median step.
        bandwidth_share: the same over the measured read bandwidth.
        floor_ms: `bytes_moved` over the measured read bandwidth.
        times_floor: median step over the floor.
        round_ms: median step of each round.
        noise: how far the rounds' medians lie apart, see `spread_of`.
        noisy: so far that the figures cannot be trusted to a tenth.
        eager_round_ms: median eager step of each round.
        eager_noise: how far these lie apart; what `replay_speedup` says cannot be trusted any further.
        histogram_ms: of all steps.
    """

    bucket: int
    context: int
    launch_us: Percentiles
    step_ms: Percentiles
    token_ms: Percentiles
    eager_ms: Percentiles
    replay_speedup: float
    bytes_moved: int
    in_cache: bool
    achieved_bytes_per_second: float
    bandwidth_share: float
    floor_ms: float
    times_floor: float
    round_ms: list[float]
    noise: float
    noisy: bool
    eager_round_ms: list[float]
    eager_noise: float
    histogram_ms: Histogram

    @classmethod
    def of(
        cls, bucket: int, context: int, samples: Samples, bytes_moved: int, bandwidth: float, cache_bytes: int
    ) -> ProfileRow:
        """Work out what the times of one point say.

        Args:
            bucket: rows.
            context: tokens of each row.
            samples: at least one round.
            bytes_moved: that a step must move.
            bandwidth: measured in the same run, in bytes per second.
            cache_bytes: of the processor's last cache.
        """
        step, eager = Percentiles.of(samples.step_ms), Percentiles.of(samples.eager_ms)
        seconds, noise = step.p50 / 1000, spread_of(samples.round_ms)
        return cls(
            bucket=bucket,
            context=context,
            launch_us=Percentiles.of(samples.launch_us),
            step_ms=step,
            token_ms=Percentiles.of(samples.token_ms),
            eager_ms=eager,
            replay_speedup=eager.p50 / step.p50,
            bytes_moved=bytes_moved,
            in_cache=bytes_moved <= cache_bytes,
            achieved_bytes_per_second=bytes_moved / seconds,
            bandwidth_share=bytes_moved / seconds / bandwidth,
            floor_ms=1000 * bytes_moved / bandwidth,
            times_floor=seconds * bandwidth / bytes_moved,
            round_ms=samples.round_ms,
            noise=noise,
            noisy=noise > NOISY,
            eager_round_ms=samples.eager_round_ms,
            eager_noise=spread_of(samples.eager_round_ms),
            histogram_ms=Histogram.of(samples.step_ms),
        )
