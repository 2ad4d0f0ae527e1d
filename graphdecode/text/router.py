"""Routing of the engine's events to answers; where nobody else steps the engine, a waiting caller does."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, TracebackType
from typing import Protocol

from graphdecode.engine import Engine, Event, Request
from graphdecode.errors import ClosedError
from graphdecode.text.answer import Answer

_HANGING_SECONDS = 0.5
_PATIENCE_SECONDS = 0.1  # how long a waiting thread sleeps at most before it looks for Ctrl-C


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
        if self._pending and time.monotonic() - self._came > _HANGING_SECONDS:
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


class _TokenEngine(Protocol):
    """An engine as fronts use it: `Engine`, or `EngineClient`."""

    def add(self, request: Request) -> int: ...

    def abort(self, request_id: int) -> None: ...

    def finish(self, request_id: int, num_tokens: int) -> None: ...

    def close(self) -> None: ...


class Router:
    """Submits requests, and delivers the engine's events to their answers.

    Args:
        engine: what serves the requests; somebody else steps it, and delivers its events.
        end: what answers are told that are under way when it is closed, and requests that come later.
    """

    def __init__(self, engine: _TokenEngine, end: str = "this LLM was closed") -> None:
        self.engine = engine
        self._end = end
        self._answers: dict[int, Answer] = {}
        self._ids: dict[Answer, int] = {}
        self._books = threading.Lock()  # of the two above
        self.closed = False

    def submit(self, requests: Iterable[tuple[Request, Answer]]) -> None:
        """Submit requests, each with the answer for its events.

        Raises:
            RequestError: one can never be served; none was handed in.
            ClosedError: this was closed.
        """
        with self._books:
            if self.closed:
                raise ClosedError(self._end)
            ids: list[int] = []
            try:
                for request, answer in requests:
                    ids.append(self.engine.add(request))
                    self._answers[ids[-1]] = answer
                    self._ids[answer] = ids[-1]
            except BaseException:
                for request_id in ids:
                    self._ids.pop(self._answers.pop(request_id), None)
                    self.engine.abort(request_id)
                raise

    def give_up(self, answers: Iterable[Answer]) -> None:
        """Abort answers that nobody wants any more; their rows and pages are freed."""
        with DeferredInterrupt():
            for answer in answers:
                request_id = self._forget(answer)
                if request_id is not None:
                    self.engine.abort(request_id)
                answer.give_up()

    def _forget(self, answer: Answer) -> int | None:
        with self._books:
            request_id = self._ids.pop(answer, None)
            if request_id is not None:
                del self._answers[request_id]
        return request_id

    def deliver(self, events: Sequence[Event]) -> None:
        """Deliver the engine's events to their answers."""
        with self._books:
            owners = [self._answers.get(event.request_id) for event in events]
        for event, answer in zip(events, owners, strict=True):
            if answer is None:
                continue
            try:
                if answer.take(event):
                    self.engine.finish(event.request_id, len(answer.output.token_ids))
            except Exception as error:  # whatever a tokenizer stumbles over must not touch the other answers
                self.engine.abort(event.request_id)
                answer.fail(f"its text cannot be made: {type(error).__name__}: {error}")
            if answer.output.finish_reason is not None:
                self._forget(answer)

    def close(self) -> None:
        """End all answers with an error, and close the engine."""
        with self._books:
            if self.closed:
                return
            self.closed = True
            answers = list(self._ids)
            self._answers.clear()
            self._ids.clear()
        self.engine.close()
        for answer in answers:
            answer.give_up(self._end)


class SteppingRouter(Router):
    """A router that steps the engine. It starts no thread: one of the threads that wait for answers steps for all of
    them, until its own answers are there; then another one takes over."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._stepped = engine
        self._stepping = threading.Lock()  # held by the thread that steps
        self._progress = threading.Condition()
        self._waiting = 0

    def wait(self, done: Callable[[], bool], between: Callable[[], None]) -> None:
        """Come back once something is done; step meanwhile, or wait while another thread does.

        Args:
            between: is called between two steps; what it raises ends the waiting.
        """
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
                    self._waiting += 1
                    try:
                        if not done() and self._stepping.locked():
                            self._progress.wait(_PATIENCE_SECONDS)
                    finally:
                        self._waiting -= 1
                between()

    def step(self) -> None:
        """Do one round of the engine, once no other thread steps."""
        with self._stepping:
            self._round()
        self._announce()

    def _round(self) -> None:
        if self.closed:
            raise ClosedError(self._end)
        try:
            events = self._stepped.step()
        except ClosedError:  # by another thread, meanwhile
            raise ClosedError(self._end) from None
        self.deliver(events)
        if self._waiting:
            self._announce()

    def _announce(self) -> None:
        if self._waiting:
            with self._progress:
                self._progress.notify_all()

    def close(self) -> None:
        """End all answers with an error, and close the engine."""
        super().close()
        self._announce()
