"""Claims about time, which another program's load can spoil."""

from collections.abc import Callable

ATTEMPTS = 4


def holds(claim: Callable[[int], bool]) -> bool:
    """Whether a claim about time holds in one of a few attempts, which get their number: a wrong one never does."""
    return any(claim(attempt) for attempt in range(ATTEMPTS))
