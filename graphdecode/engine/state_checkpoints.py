"""Where rows with recurrent states stop: at checkpoints, at which their states are saved."""

from __future__ import annotations

from collections.abc import Iterable

from graphdecode.engine.runner import Launch
from graphdecode.engine.scheduler import Sequence


class StateCheckpoints:
    """Knows how far the staged rows are from their checkpoints, which are `interval` tokens apart."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def tokens_past(self, sequences: list[Sequence], launches: Iterable[Launch]) -> list[int]:
        """Return how many tokens each row is past a checkpoint, behind all launches."""
        ahead = sum(launch.num_steps for launch in launches)
        return [(sequence.cached_length + ahead) % self._interval for sequence in sequences]

    def steps_left(self, sequences: list[Sequence], launches: Iterable[Launch]) -> int:
        """Return for how many steps no row gets past its next checkpoint."""
        return self._interval - max(self.tokens_past(sequences, launches))
