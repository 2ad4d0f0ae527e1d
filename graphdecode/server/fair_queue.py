"""Fair order of requests among callers, and bounds on how many are prepared at a time."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from graphdecode.server.http import HttpError

MAX_CALLERS = 10_000
RETRY_AFTER = {"Retry-After": "1"}
T = TypeVar("T")


class FairQueue:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996): callers with large requests wait behind small ones.

    A start tag is the virtual time at which the caller's earlier requests would have finished, were callers served in
    parallel; virtual time is the tag of the request that began last.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: OrderedDict[str, float] = OrderedDict()  # caller -> virtual time at which its requests are served

    def start_tag(self, caller: str, tokens: int) -> float:
        """Return the start tag of a request of `tokens` tokens; the lowest is served first."""
        tag = max(self._now, self._ends.pop(caller, 0.0))
        self._ends[caller] = tag + tokens
        if len(self._ends) > MAX_CALLERS:
            self._ends.popitem(last=False)
        return tag

    def began(self, tag: float) -> None:
        """Advance the virtual time: a request began."""
        self._now = max(self._now, tag)


class FairSemaphore:
    """Bounds how many do something at a time, with a fair queue of waiters; one beyond `max_waiting` is refused."""

    def __init__(self, most: int, max_waiting: int) -> None:
        self._most, self._max_waiting = most, max_waiting
        self._queue = FairQueue()
        self._numbers = itertools.count()
        self._running = 0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def acquire(self, caller: str, size: int) -> AsyncGenerator[None, None]:
        """Wait for a turn (HttpError: too many wait), which ends with the context."""
        tag, admitted = self._queue.start_tag(caller, size), asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (tag, next(self._numbers), admitted))
        self._admit()
        if len(self._waiting) > self._max_waiting:
            self._refuse_last()
        try:
            await admitted
            self._queue.began(tag)
            yield
        finally:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                self._running -= 1
                self._admit()

    def _refuse_last(self) -> None:
        """Drop cancelled waiters; if these are too few, refuse the last in order."""
        self._waiting = [each for each in self._waiting if not each[2].done()]
        if len(self._waiting) > self._max_waiting:
            last = max(self._waiting)
            self._waiting.remove(last)
            full = HttpError(429, "too many requests are being preprocessed", code="queue_full", headers=RETRY_AFTER)
            last[2].set_exception(full)
        heapq.heapify(self._waiting)

    def _admit(self) -> None:
        while self._waiting and self._running < self._most:
            _, _, other = heapq.heappop(self._waiting)
            if not other.done():  # else it was cancelled
                other.set_result(None)
                self._running += 1


class FairThread:
    """A thread that makes calls one after another, in a fair order, so that the event loop does not wait for them."""

    def __init__(self, max_waiting: int) -> None:
        self._turn = FairSemaphore(1, max_waiting)
        self._thread = ThreadPoolExecutor(1, "preparing")

    async def run(self, function: Callable[[], T], *, caller: str, size: int) -> T:
        """Return what `function()` returns, or raise what it raises; `HttpError`: too many wait."""
        async with self._turn.acquire(caller, size):
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def close(self) -> None:
        """Make no further calls."""
        self._thread.shutdown(wait=False, cancel_futures=True)
