"""Ctrl-C between two steps of the engine, never in the middle of one."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

_PATIENCE_SECONDS = 0.5


class DeferredInterrupt:
    """While it is entered, Ctrl-C waits; on leaving, or at the next `check`, it raises `KeyboardInterrupt`.

    A step changes the books of rows and pages in several places; an interrupt in between would leave them torn. A
    second Ctrl-C, half a second later or more, does not wait: what it interrupts hangs. Outside the main thread, where
    signals never arrive, it does nothing.
    """

    def __enter__(self) -> DeferredInterrupt:
        self._pending = False
        self._came = 0.0
        self._previous = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            if callable(self._previous):
                signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self._pending and time.monotonic() - self._came > _PATIENCE_SECONDS:
            raise KeyboardInterrupt
        if not self._pending:
            self._pending, self._came = True, time.monotonic()

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if Ctrl-C came; between two steps."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._previous)
        if self._pending and kind is None:
            raise KeyboardInterrupt
