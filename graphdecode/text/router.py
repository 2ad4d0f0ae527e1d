"""Delivers the engine's events to outputs; one of the threads that wait for them steps the engine."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, TracebackType
from typing import Protocol

from graphdecode.engine import Engine, Event, Request
from graphdecode.engine.request import ContextLengthError
from graphdecode.errors import ClosedError
from graphdecode.text.input_processor import ParentRequest
from graphdecode.text.outputs import RequestState

_HANGING_SECONDS = 0.5
_PATIENCE_SECONDS = 0.1  # after which a waiting thread checks for Ctrl-C


class DeferredInterrupt:
    """Defers Ctrl-C: `KeyboardInterrupt` is raised on leaving, or at the next `check`.

    An interrupt within a step would leave rows and pages inconsistent. A second Ctrl-C, at least half a second later,
    is not deferred, as the step seems to hang. Only the main thread gets signals: in others this does nothing.
    """

    def __enter__(self) -> DeferredInterrupt:
        self._pending = False
        self._arrived_at = 0.0
        self._previous = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            if callable(self._previous):
                signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self._pending and time.monotonic() - self._arrived_at > _HANGING_SECONDS:
            raise KeyboardInterrupt
        if not self._pending:
            self._pending, self._arrived_at = True, time.monotonic()

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if Ctrl-C came."""
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


class _TokenEngine(Protocol):
    """`Engine`, or the server's `EngineClient`."""

    def add(self, request: Request) -> int: ...

    def abort(self, request_id: int) -> None: ...

    def finish(self, request_id: int, num_tokens: int) -> None: ...

    def close(self) -> None: ...


class Router:
    """Submits requests to an engine, whose caller steps it, and delivers its events to their outputs.

    `end` is the error of outputs in progress when this is closed, and of later requests.
    """

    def __init__(self, engine: _TokenEngine, end: str = "this LLM was closed") -> None:
        self.engine = engine
        self._end = end
        self._states: dict[int, RequestState] = {}  # in progress, by the engine's id
        self._lock = threading.Lock()  # guards it
        self.closed = False

    def submit(self, parents: Iterable[ParentRequest]) -> None:
        """Submit the requests of prompts; one that is too long is refused, and the others are not.

        Raises `ClosedError` if this was closed, `RequestError` if a request can never be right; then none is submitted.
        """
        with self._lock:
            if self.closed:
                raise ClosedError(self._end)
            ids: list[int] = []
            try:
                for parent in parents:
                    try:
                        for request, state in parent.children:
                            state.request_id = self.engine.add(request)
                            ids.append(state.request_id)
                            self._states[state.request_id] = state
                    except ContextLengthError as error:  # from its first request: the others are not needed
                        parent.refuse(str(error))
            except BaseException:
                for request_id in ids:
                    del self._states[request_id]
                    self.engine.abort(request_id)
                raise

    def abort(self, states: Iterable[RequestState]) -> None:
        """Abort outputs; their rows and pages are freed."""
        with DeferredInterrupt():
            for state in states:
                with self._lock:
                    is_running = self._states.pop(state.request_id, None) is not None
                if is_running:
                    self.engine.abort(state.request_id)
                state.abort()

    def deliver(self, events: Sequence[Event]) -> None:
        """Deliver the engine's events to their outputs."""
        with self._lock:
            owners = [self._states.get(event.request_id) for event in events]
        for event, state in zip(events, owners, strict=True):
            if state is None:
                continue
            try:
                if state.take(event):
                    self.engine.finish(event.request_id, len(state.output.token_ids))
            except Exception as error:  # a tokenizer's error must not affect other outputs
                self.engine.abort(event.request_id)
                state.fail(f"detokenization failed: {type(error).__name__}: {error}")
            if state.output.finish_reason is not None:
                with self._lock:
                    self._states.pop(event.request_id, None)

    def close(self) -> None:
        """End all outputs with an error, and close the engine."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            states = list(self._states.values())
            self._states.clear()
        self.engine.close()
        for state in states:
            state.abort(self._end)


class SteppingRouter(Router):
    """A router whose waiting threads step the engine: one steps for all until its outputs are done, then another."""

    engine: Engine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._stepping = threading.Lock()  # held by the thread that steps
        self._progress = threading.Condition()

    def wait(self, done: Callable[[], bool], between: Callable[[], None]) -> None:
        """Step until something is done, or wait while another thread steps; exceptions of `between` end the wait."""
        while not done():
            if self._stepping.acquire(blocking=False):
                try:
                    while not done():
                        self._round()
                        between()
                finally:
                    self._stepping.release()
                    self._announce()
            else:
                with self._progress:
                    if not done() and self._stepping.locked():
                        self._progress.wait(_PATIENCE_SECONDS)
                between()

    def step(self) -> None:
        """Run one step of the engine, once no other thread does."""
        with self._stepping:
            self._round()
        self._announce()

    def _round(self) -> None:
        if self.closed:
            raise ClosedError(self._end)
        try:
            events = self.engine.step()
        except ClosedError:  # by another thread
            raise ClosedError(self._end) from None
        self.deliver(events)
        self._announce()

    def _announce(self) -> None:
        with self._progress:
            self._progress.notify_all()

    def close(self) -> None:
        """End all outputs with an error, and close the engine."""
        super().close()
        self._announce()
