"""One answer as it comes."""

from __future__ import annotations

from collections.abc import Iterator

from graphdecode.errors import AnswerError
from graphdecode.text.answer import Answer
from graphdecode.text.interrupts import DeferredInterrupt
from graphdecode.text.outputs import RequestOutput
from graphdecode.text.router import SteppingRouter


class Stream:
    """An iterator of the pieces of one answer; reading it drives the engine.

    Leaving it early, by `close()` or at the end of a `with` block, aborts the request. An answer that had to be given
    up raises an `AnswerError` behind its last piece.

    Args:
        request: the prompt, the answer so far, and its metrics; with `error` set, nothing comes.
        answer: whose pieces these are; None where the prompt was refused.
        router: steps.
    """

    def __init__(self, request: RequestOutput, answer: Answer | None, router: SteppingRouter) -> None:
        self.request = request
        self._answer = answer
        self._router = router

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        answer = self._answer
        if answer is None:
            raise StopIteration
        if not answer.pieces and not answer.finished:
            try:
                with DeferredInterrupt() as interrupt:
                    self._router.wait(lambda: bool(answer.pieces) or answer.finished, interrupt.check)
            except BaseException:
                self.close()
                raise
        if answer.pieces:
            return answer.pieces.popleft()
        self._answer = None
        if self.request.error is not None:
            raise AnswerError(self.request.error)
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it is not finished."""
        if self._answer is not None:
            self._router.give_up([self._answer])

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
