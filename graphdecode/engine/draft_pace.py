"""How many drafts the next step verifies, by the times of earlier steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from graphdecode.engine.steps import StepDrafts

_MAX_TIMES = 9  # per kind of step, for the median
_LEAST_TIMES = 3  # fewer measurements are not used
_FORGOTTEN_AFTER = 200  # launches without a kind of step, after which its times are measured again
_DECAY = 0.98  # weight of an observation after each later one
_PRIOR = (1.0, 0.6)  # initial counts of drafts and accepted ones, so that drafts are tried
_PATIENCE = (128, 2048)  # plain launches before expensive drafts are tried again, at first and at most
_TRIAL = 4  # launches
_TRIAL_WEIGHT = 0.1  # weight of earlier observations in a trial
_GUESSED_SHARE = 0.06  # of a step's time, per additional query, if nothing was measured


class DraftPace:
    """Chooses the queries per row of the next launch, among `widths`, by the expected tokens per second.

    The acceptance rate of a draft is a moving average at its match length; the time of a step is the median of the last
    ones of its kind. Plain steps show whether a cheap draft would have been accepted, so that speculation is switched
    off and on at no cost. Expensive drafts are tried again for a few launches, after an interval that doubles with each
    trial that does not pay.
    """

    def __init__(self, widths: Sequence[int], *, is_fixed: bool = False, is_cheap: bool = True) -> None:
        self.widths = tuple(widths)
        self._is_fixed, self._is_cheap = is_fixed, is_cheap
        self._patience = _PATIENCE[0]
        self._draftless_launches = 0  # launches since drafts were faster, or the last trial
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._last_run: dict[tuple[int, int], int] = {}
        self._launches = 0
        # match length -> drafts, accepted ones
        self._draft_counts: dict[int, list[float]] = defaultdict(lambda: list(_PRIOR))

    def choose(self, bucket: int, draft_candidates: Sequence[tuple[int, int]], most: int) -> int:
        """Return the queries per row, at most `most`, for the next launch of `bucket` rows.

        `draft_candidates`: each row's number of drafts and match length.
        """
        drafts = max((count for count, _ in draft_candidates), default=0)
        if drafts == 0:
            return 1
        widths = [width for width in self.widths if width <= most]
        widths = [width for narrower, width in pairwise([0, *widths]) if narrower <= drafts]
        if self._is_fixed:
            return widths[-1]
        if not self._is_cheap:  # measure one width after the other, plain steps first
            num_measured = sum(self._is_measured(bucket, width) for width in widths)
            if num_measured == 0:
                return 1
            widths = widths[: num_measured + 1]
        chances = [(count, self.chance(matched)) for count, matched in draft_candidates]
        best, best_speed = 1, 0.0
        for width in widths:
            tokens = sum(_expected(min(count, width - 1), chance) for count, chance in chances)
            speed = tokens / self.step_seconds(bucket, width)
            if speed > best_speed:
                best, best_speed = width, speed
        return best if self._is_cheap else self._best_or_trial(best, widths)

    def _best_or_trial(self, best: int, widths: Sequence[int]) -> int:
        """Return `best`, or the smallest width with drafts if none were verified for long."""
        if best > 1:
            if self._draftless_launches > self._patience:  # the trial succeeded
                self._patience = max(self._patience // 2, _PATIENCE[0])
            self._draftless_launches = 0
            return best
        self._draftless_launches += 1
        if self._draftless_launches <= self._patience or len(widths) == 1:
            return best
        if self._draftless_launches == self._patience + 1:
            for counts in self._draft_counts.values():
                counts[:] = [_TRIAL_WEIGHT * count for count in counts]
        if self._draftless_launches == self._patience + _TRIAL:
            self._draftless_launches, self._patience = 0, min(2 * self._patience, _PATIENCE[1])
        return widths[1]

    def chance(self, matched: int) -> float:
        """Return the probability that a draft with this match length is accepted."""
        drafts, right = self._draft_counts[matched]
        return right / drafts

    def step_seconds(self, bucket: int, width: int) -> float:
        """Return the time of a step, or a low estimate from other widths, so that the width is tried."""
        if self._is_measured(bucket, width) and not self._is_forgotten(bucket, width):
            return median(self._times[bucket, width])
        measured = {each: median(self._times[bucket, each]) for each in self.widths if self._is_measured(bucket, each)}
        if not measured:
            return _guessed(width)
        least, most = min(measured), max(measured)
        if self._is_cheap or least == most:
            return measured[least] * _guessed(width) / _guessed(least)
        per_query = (measured[most] - measured[least]) / (most - least)  # each draft is one more pass
        return measured[least] + per_query * (width - least)

    def _is_measured(self, bucket: int, width: int) -> bool:
        return len(self._times.get((bucket, width), ())) >= _LEAST_TIMES

    def _is_forgotten(self, bucket: int, width: int) -> bool:
        last = self._last_run.get((bucket, width), self._launches)
        return self._is_cheap and self._launches - last >= _FORGOTTEN_AFTER

    def record_step(self, bucket: int, width: int, seconds: float) -> None:
        """Record the time of a step."""
        self._launches += 1
        if (bucket, width) not in self._times:  # skip the first time, which may include a capture
            self._times[bucket, width] = deque(maxlen=_MAX_TIMES)
        else:
            if width > 1 and self._is_forgotten(bucket, width):
                self._times[bucket, width].clear()
            self._times[bucket, width].append(seconds)
        self._last_run[bucket, width] = self._launches

    def record_drafts(self, before: Sequence[tuple[int, int]], drafts: StepDrafts) -> None:
        """Record the drafts of a step, given the candidates of `choose` before it."""
        for (count, matched), verified, accepted in zip(before, drafts.verified, drafts.accepted, strict=False):
            if not count or not (verified or self._is_cheap):
                continue
            tried = accepted + (accepted < verified) if verified else 1
            counts = self._draft_counts[matched]
            counts[0] = counts[0] * _DECAY + tried
            counts[1] = counts[1] * _DECAY + accepted


def _guessed(width: int) -> float:
    return 1.0 + _GUESSED_SHARE * (width - 1)  # relative to one query per row


def _expected(drafts: int, chance: float) -> float:
    """Return the expected tokens of a step: 1 + p + p^2 + ... + p^drafts."""
    return drafts + 1.0 if chance >= 1.0 else (1.0 - chance ** (drafts + 1)) / (1.0 - chance)
