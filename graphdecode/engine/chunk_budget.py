"""How much of a prompt is computed between two steps, so that running answers do not stall."""

from __future__ import annotations

_FIRST = 32  # tokens of the first chunk between steps, before anything is known
_LEAST = 8  # tokens: a prompt goes on, however long a step takes
_WEIGHT = 0.3  # of what was seen last, in the averages


class ChunkBudget:
    """Sizes chunks by what chunks and steps took so far.

    Chunks change when an answer begins, and never what it says.

    Args:
        largest: tokens of a chunk where no row waits for its next token.
        target_seconds: between two tokens of a row, at most; 0: chunks are always as large as they may be.
    """

    def __init__(self, largest: int, target_seconds: float) -> None:
        self._largest = largest
        self._target = target_seconds
        self._step_seconds: float | None = None
        self._token_seconds: float | None = None  # of a prompt's token

    def tokens(self, *, others_wait: bool) -> int:
        """Return how many tokens of prompts to compute now.

        Args:
            others_wait: there are rows that are to get their next token behind it.
        """
        if not (self._target and others_wait):
            return self._largest
        if self._token_seconds is None:
            return min(_FIRST, self._largest)
        room = self._target - (self._step_seconds or 0.0)
        return max(min(int(room / self._token_seconds), self._largest), min(_LEAST, self._largest))

    def saw(self, prefilled: int, seconds: float) -> None:
        """Learn from the time between two tokens of a row.

        Args:
            prefilled: tokens of prompts that were computed in it.
            seconds: of it.
        """
        if not self._target:
            return
        if not prefilled:
            self._step_seconds = _moved(self._step_seconds, seconds)
        elif self._step_seconds is not None:
            self._token_seconds = _moved(self._token_seconds, max(seconds - self._step_seconds, 1e-9) / prefilled)


def _moved(average: float | None, seen: float) -> float:
    return seen if average is None else average + _WEIGHT * (seen - average)
