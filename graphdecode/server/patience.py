"""Clients that take nothing: their tasks are cancelled, so that their rows are free for others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

_LOOK_EVERY_SECONDS = 1.0


class Patience:
    """Knows which tasks wait for their client to take something, and since when.

    Args:
        seconds: that a task may wait; None: for ever.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._waiting: dict[asyncio.Task[Any], float] = {}

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Hold while the current task sends."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._waiting.pop(task, None)

    async def watch(self) -> None:
        """Cancel who has waited too long, for ever."""
        while self._seconds is not None:
            await asyncio.sleep(min(_LOOK_EVERY_SECONDS, self._seconds))
            oldest = asyncio.get_running_loop().time() - self._seconds
            for task, since in list(self._waiting.items()):
                if since < oldest:
                    task.cancel()
