"""How much the next round takes on, by the times of earlier ones: drafts to verify, and tokens of prompts."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from graphdecode.engine.steps import StepDrafts

_TIMES_KEPT = 9  # of each kind of step; their median counts
_LEAST_TIMES = 3  # below, what was measured may be chance, and a guess counts
_FORGOTTEN_AFTER = 200  # launches without a kind of step, behind which it is tried again
_HALF_LIFE = 0.98  # what an observation counts after each later one
_PRIOR = (1.0, 0.6)  # drafts that are taken as seen before any was, and as right: the first ones are tried
_PATIENCE = (128, 2048)  # plain launches, at first and at most, behind which drafts that are not cheap are tried again
_TRIAL = 4  # launches
_TRIAL_WEIGHT = 0.1  # of what was seen before a trial
_GUESSED_SHARE = 0.06  # of a step's time, for each more query, where nothing was measured
_FIRST_CHUNK = 32  # tokens of the first chunk between steps, before anything is known
_LEAST_CHUNK = 8  # tokens: a prompt goes on, however long a step takes
_CHUNK_WEIGHT = 0.3  # of what was seen last, in the averages


class DraftPace:
    """Chooses how many queries a row the next launch has, of the `widths` that there are steps for.

    A draft's chance is an average over what was accepted lately where as many tokens spoke for it; a step's time is the
    median of the last ones of its kind. So speculation that does not pay is switched off, and on again, at no cost.
    Plain steps tell whether a cheap draft would have been right. They make no others: a few launches try these again,
    after a time that doubles whenever they were tried in vain.
    """

    def __init__(self, widths: Sequence[int], *, is_fixed: bool = False, is_cheap: bool = True) -> None:
        self.widths = tuple(widths)
        self._is_fixed, self._is_cheap = is_fixed, is_cheap
        self._patience = _PATIENCE[0]
        self._plain = 0  # launches since drafts paid, or were tried in vain
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._last_run: dict[tuple[int, int], int] = {}
        self._launches = 0
        self._seen: dict[int, list[float]] = defaultdict(lambda: list(_PRIOR))  # by match length: drafts, right ones

    def choose(self, bucket: int, found: Sequence[tuple[int, int]], most: int) -> int:
        """Return the queries of a row, at most `most`, for the next launch of `bucket` rows.

        `found` are each row's drafts, and how many tokens speak for them.
        """
        drafts = max((count for count, _ in found), default=0)
        if drafts == 0:
            return 1
        able = [width for width in self.widths if width <= most]
        able = [width for narrower, width in pairwise([0, *able]) if narrower <= drafts]
        if self._is_fixed:
            return able[-1]
        if not self._is_cheap:  # from plain steps on, one number of queries after the other is measured
            known = sum(self._is_known(bucket, width) for width in able)
            if known == 0:
                return 1
            able = able[: known + 1]
        chances = [(count, self.chance(matched)) for count, matched in found]
        best, best_speed = 1, 0.0
        for width in able:
            tokens = sum(_expected(min(count, width - 1), chance) for count, chance in chances)
            speed = tokens / self.step_seconds(bucket, width)
            if speed > best_speed:
                best, best_speed = width, speed
        return best if self._is_cheap else self._best_or_trial(best, able)

    def _best_or_trial(self, best: int, able: Sequence[int]) -> int:
        """Return the choice; or the least that feeds drafts, where none was fed for long."""
        if best > 1:
            if self._plain > self._patience:  # a trial has shown it
                self._patience = max(self._patience // 2, _PATIENCE[0])
            self._plain = 0
            return best
        self._plain += 1
        if self._plain <= self._patience or len(able) == 1:
            return best
        if self._plain == self._patience + 1:
            self._seen.update({matched: [_TRIAL_WEIGHT * n for n in seen] for matched, seen in self._seen.items()})
        if self._plain == self._patience + _TRIAL:
            self._plain, self._patience = 0, min(2 * self._patience, _PATIENCE[1])
        return able[1]

    def chance(self, matched: int) -> float:
        """Return how likely a draft is right where so many tokens speak for it."""
        drafts, right = self._seen[matched]
        return right / drafts

    def step_seconds(self, bucket: int, width: int) -> float:
        """Return what a step takes, or a low guess by those that were measured, so that it is tried."""
        if self._is_known(bucket, width) and not self._is_forgotten(bucket, width):
            return median(self._times[bucket, width])
        known = {known: median(self._times[bucket, known]) for known in self.widths if self._is_known(bucket, known)}
        if not known:
            return _guessed(width)
        least, most = min(known), max(known)
        if self._is_cheap or least == most:
            return known[least] * _guessed(width) / _guessed(least)
        return known[least] + (known[most] - known[least]) * (width - least) / (most - least)  # a pass for each draft

    def _is_known(self, bucket: int, width: int) -> bool:
        return len(self._times.get((bucket, width), ())) >= _LEAST_TIMES

    def _is_forgotten(self, bucket: int, width: int) -> bool:
        last = self._last_run.get((bucket, width), self._launches)
        return self._is_cheap and self._launches - last >= _FORGOTTEN_AFTER

    def saw_step(self, bucket: int, width: int, seconds: float) -> None:
        """Take the time of a step."""
        self._launches += 1
        if (bucket, width) not in self._times:  # the first time does not count: it may hold a capture
            self._times[bucket, width] = deque(maxlen=_TIMES_KEPT)
        else:
            if width > 1 and self._is_forgotten(bucket, width):
                self._times[bucket, width].clear()
            self._times[bucket, width].append(seconds)
        self._last_run[bucket, width] = self._launches

    def saw_drafts(self, before: Sequence[tuple[int, int]], drafts: StepDrafts) -> None:
        """Take what became of a step's drafts, and what was found `before` it, row by row."""
        for (count, matched), verified, accepted in zip(before, drafts.verified, drafts.accepted, strict=False):
            if not count or not (verified or self._is_cheap):
                continue
            tried = accepted + (accepted < verified) if verified else 1
            seen = self._seen[matched]
            seen[0] = seen[0] * _HALF_LIFE + tried
            seen[1] = seen[1] * _HALF_LIFE + accepted


def _guessed(width: int) -> float:
    return 1.0 + _GUESSED_SHARE * (width - 1)  # a step of some queries a row, in the time of one query's


def _expected(drafts: int, chance: float) -> float:
    """Return how many tokens a step is likely to give: 1 + p + p^2 + ... + p^drafts."""
    return drafts + 1.0 if chance >= 1.0 else (1.0 - chance ** (drafts + 1)) / (1.0 - chance)


class ChunkBudget:
    """Sizes chunks by what chunks and steps took so far.

    Args:
        largest: tokens of a chunk where no row waits for its next token.
        target_seconds: between two tokens of a row, at most; 0: chunks are always as large as they may be.
    """

    def __init__(self, largest: int, target_seconds: float) -> None:
        self._largest, self.target_seconds = largest, target_seconds
        self._step_seconds: float | None = None
        self._token_seconds: float | None = None  # of a prompt's token

    def tokens(self, *, others_wait: bool) -> int:
        """Return how many tokens of prompts to compute now; fewer where rows wait for their next token behind it."""
        if not (self.target_seconds and others_wait):
            return self._largest
        if self._token_seconds is None:
            return min(_FIRST_CHUNK, self._largest)
        room = self.target_seconds - (self._step_seconds or 0.0)
        return max(min(int(room / self._token_seconds), self._largest), min(_LEAST_CHUNK, self._largest))

    def saw(self, prefilled: int, seconds: float) -> None:
        """Learn from the time between two tokens of a row, in which so many tokens of prompts were computed."""
        if not prefilled:
            self._step_seconds = _moved(self._step_seconds, seconds)
        elif self._step_seconds is not None:
            self._token_seconds = _moved(self._token_seconds, max(seconds - self._step_seconds, 1e-9) / prefilled)


def _moved(average: float | None, seen: float) -> float:
    return seen if average is None else average + _CHUNK_WEIGHT * (seen - average)
