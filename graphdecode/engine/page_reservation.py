"""Pages of the decoding rows, reserved ahead of the launches that write them."""

from __future__ import annotations

from collections.abc import Iterable

from graphdecode.engine.runner import Launch
from graphdecode.engine.scheduler import Scheduler


class PageReservation:
    """Reserves pages for several steps at a time, so that most steps reserve none."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_tokens = 0  # of each row, that have pages beyond those launched

    def reserve(self, num_tokens: int, launches: Iterable[Launch], *, is_steady: bool) -> bool:
        """Reserve pages for the next tokens behind some launches; return whether pages changed.

        Raises:
            CacheFullError: there are too few pages; some rows may have new ones.
        """
        if is_steady and num_tokens <= self._num_tokens:
            self._num_tokens -= num_tokens
            return False
        self._num_tokens = 0
        ahead = num_tokens + sum(len(launch.steps) for launch in launches)
        changed = self._scheduler.reserve(ahead)
        self._num_tokens = self._scheduler.steps_with_pages() - ahead
        return changed
