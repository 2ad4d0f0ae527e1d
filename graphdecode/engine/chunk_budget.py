"""The size of prompt chunks, by the times of earlier chunks and steps."""

from __future__ import annotations

_FIRST_CHUNK = 32  # tokens of the first chunk between steps
_LEAST_CHUNK = 8  # tokens, however long a step takes
_CHUNK_WEIGHT = 0.3  # weight of the last time in the averages


class ChunkBudget:
    """Chooses chunk sizes by the times of earlier chunks and steps.

    Args:
        largest: tokens of a chunk if no row is decoding.
        target_seconds: largest time between two tokens of a row; 0: chunks always have the largest size.
    """

    def __init__(self, largest: int, target_seconds: float) -> None:
        self._largest, self.target_seconds = largest, target_seconds
        self._step_seconds: float | None = None
        self._token_seconds: float | None = None  # time of one prompt token

    def tokens(self, *, others_wait: bool) -> int:
        """Return how many prompt tokens to compute now; fewer if rows are decoding (`others_wait`)."""
        if not (self.target_seconds and others_wait):
            return self._largest
        if self._token_seconds is None:
            return min(_FIRST_CHUNK, self._largest)
        room = self.target_seconds - (self._step_seconds or 0.0)
        return max(min(int(room / self._token_seconds), self._largest), min(_LEAST_CHUNK, self._largest))

    def record(self, prefilled: int, seconds: float) -> None:
        """Record the time between two tokens of a row, in which `prefilled` prompt tokens were computed."""
        if not prefilled:
            self._step_seconds = _moving_average(self._step_seconds, seconds)
        elif self._step_seconds is not None:
            self._token_seconds = _moving_average(
                self._token_seconds, max(seconds - self._step_seconds, 1e-9) / prefilled
            )


def _moving_average(average: float | None, value: float) -> float:
    return value if average is None else average + _CHUNK_WEIGHT * (value - average)
