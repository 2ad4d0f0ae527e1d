"""Pages of the decoding rows, reserved ahead of the launches that write them."""

from __future__ import annotations

from collections.abc import Iterable

from graphdecode.engine.scheduler import Scheduler
from graphdecode.engine.staged_batch import InFlight


class PageReservation:
    """Reserves pages for several steps at a time, so that most steps reserve none."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_tokens = 0  # of each row, that have pages beyond those launched

    def reserve(self, num_tokens: int, in_flight: Iterable[InFlight], *, is_steady: bool) -> bool:
        """Reserve pages for the next tokens behind those in flight; return whether pages changed.

        Raises:
            CacheFullError: there are too few pages; some rows may have new ones.
        """
        if is_steady and num_tokens <= self._num_tokens:
            self._num_tokens -= num_tokens
            return False
        self._num_tokens = 0
        ahead = num_tokens + sum(len(each.launch.steps) for each in in_flight)
        changed = self._scheduler.reserve(ahead)
        self._num_tokens = self._scheduler.steps_with_pages() - ahead
        return changed
