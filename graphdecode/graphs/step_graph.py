"""The contract of a captured step."""

from __future__ import annotations

from collections import Counter
from typing import Protocol


class StepGraph(Protocol):
    """One bucket's step, captured: replayed any number of times, closed once.

    Attributes:
        nodes: kind of node or operator -> count.
        pool_bytes: memory of the step's intermediates.
    """

    nodes: Counter[str]
    pool_bytes: int

    def replay(self) -> None:
        """Run the step again over the same memory."""

    def close(self) -> None:
        """Release graph and memory."""
