"""Where rows with recurrent states stop: at checkpoints, at which their states are saved."""

from __future__ import annotations

from collections.abc import Iterable

from graphdecode.engine.scheduler import Sequence
from graphdecode.engine.staged_batch import InFlight


class StateCheckpoints:
    """Knows how far the staged rows are from their checkpoints, which are `interval` tokens apart."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def tokens_past(self, sequences: list[Sequence], in_flight: Iterable[InFlight]) -> list[int]:
        """Return how many tokens each row is past a checkpoint, behind all launches."""
        ahead = sum(each.launch.num_steps for each in in_flight)
        return [(sequence.cached_length + ahead) % self._interval for sequence in sequences]

    def steps_left(self, sequences: list[Sequence], in_flight: Iterable[InFlight]) -> int:
        """Return for how many steps no row gets past its next checkpoint."""
        return self._interval - max(self.tokens_past(sequences, in_flight))
