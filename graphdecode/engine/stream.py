"""One answer as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from graphdecode.engine.outputs import RequestOutput
from graphdecode.engine.sequence import Sequence


class Stream:
    """An iterator of the pieces of one answer; reading it drives the engine.

    Leaving it early, by `close()` or at the end of a `with` block, aborts the request.

    Attributes:
        request: the prompt, the answer so far, and its metrics; with `error` set, nothing comes.
    """

    def __init__(
        self,
        request: RequestOutput,
        sequence: Sequence | None,
        step: Callable[[], None],
        abort: Callable[[Sequence], None],
    ) -> None:
        self.request = request
        self._sequence = sequence
        self._step = step
        self._abort = abort

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        sequence = self._sequence
        if sequence is None:
            raise StopIteration
        try:
            while not sequence.pieces and not sequence.finished:
                self._step()
        except BaseException:
            self.close()
            raise
        if not sequence.pieces:
            raise StopIteration
        return sequence.pieces.popleft()

    def close(self) -> None:
        """Abort the request if it is not finished."""
        if self._sequence is not None:
            self._abort(self._sequence)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
