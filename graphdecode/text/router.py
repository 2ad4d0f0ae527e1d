"""Between many callers and one engine: every event finds its answer; and where no one else does, who waits steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from graphdecode.engine import Engine, Event, Request
from graphdecode.engine.request import RequestRules
from graphdecode.errors import ClosedError
from graphdecode.text.answer import Answer
from graphdecode.text.interrupts import DeferredInterrupt

_PATIENCE_SECONDS = 0.1  # how long a waiting thread sleeps at most before it looks for Ctrl-C


class TokenEngine(Protocol):
    """What a front needs of an engine: `Engine`, or one that stands for an engine in another process."""

    @property
    def rules(self) -> RequestRules:
        """What it can serve."""

    @property
    def seed(self) -> int:
        """Of the requests that bring none."""

    def add(self, request: Request) -> int:
        """See `Engine.add`."""

    def abort(self, request_id: int) -> None:
        """See `Engine.abort`."""

    def finish(self, request_id: int, num_tokens: int) -> None:
        """See `Engine.finish`."""

    def close(self) -> None:
        """See `Engine.close`."""


class Router:
    """Hands requests in, and the engine's events to the answers that they belong to.

    Args:
        engine: what serves the requests; somebody else steps it, and delivers its events.
        end: what answers are told that are under way when it is closed, and requests that come later.
    """

    def __init__(self, engine: TokenEngine, end: str = "this LLM was closed") -> None:
        self.engine = engine
        self._end = end
        self._answers: dict[int, Answer] = {}
        self._ids: dict[Answer, int] = {}
        self._books = threading.Lock()  # of the two above
        self.closed = False

    def submit(self, requests: Iterable[tuple[Request, Answer]]) -> None:
        """Hand requests in, each with the answer that its events go to.

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
        """End answers that nobody wants any more; their rows and pages are free for others."""
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
        """Bring the engine's events to the answers that they belong to."""
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
    """Steps too. It starts no thread: of the threads that wait for answers one does the engine's rounds for all of
    them, until its own answers are there; then another one takes over.

    Args:
        engine: what serves the requests.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._stepped = engine
        self._turn = threading.Lock()  # whose turn it is to step
        self._progress = threading.Condition()
        self._waiting = 0

    def wait(self, done: Callable[[], bool], between: Callable[[], None]) -> None:
        """Come back once something is done; step meanwhile, or wait while another thread does.

        Args:
            done: tells so.
            between: is called between two steps; what it raises ends the waiting.
        """
        while not done():
            if self._turn.acquire(blocking=False):
                try:
                    while not done():
                        self._round()
                        between()
                finally:
                    self._turn.release()
                    self._announce()
            else:
                with self._progress:
                    self._waiting += 1
                    try:
                        if not done() and self._turn.locked():
                            self._progress.wait(_PATIENCE_SECONDS)
                    finally:
                        self._waiting -= 1
                between()

    def step(self) -> None:
        """Do one round of the engine, once it is this thread's turn."""
        with self._turn:
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
