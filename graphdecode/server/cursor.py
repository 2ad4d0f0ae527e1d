"""What of an answer has not been sent yet."""

from __future__ import annotations

from typing import NamedTuple

from graphdecode.text.answer import Answer
from graphdecode.text.intake import Order
from graphdecode.text.outputs import Logprob


class Delta(NamedTuple):
    """What is new of one answer.

    Attributes:
        text: that can be shown.
        token_ids: new ones, of which the text may still be held back.
        logprobs: of these; None where they were not asked for.
        is_first: nothing was sent of it before.
        finish_reason: with the last delta.
        stop_reason: with the last delta: the stop text or token.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    is_first: bool
    finish_reason: str | None
    stop_reason: str | int | None


class Cursor:
    """Reads one answer as it grows.

    Args:
        index: of the choice in the response.
        order: the prompt's.
        answer: to be read.
    """

    def __init__(self, index: int, order: Order, answer: Answer) -> None:
        self.index = index
        self.order = order
        self.answer = answer
        self.text_length = 0
        self._tokens_read = 0
        self._begun = False
        self._ended = False

    def take(self) -> Delta | None:
        """Return what is new, None where nothing is."""
        answer, output = self.answer, self.answer.output
        if self._ended:
            return None
        self._ended = answer.finished
        start, end = self._tokens_read, len(output.token_ids)
        text = "".join(answer.pieces)
        if not (text or end > start or self._ended):
            return None
        answer.pieces.clear()
        self.text_length += len(text)
        self._tokens_read = end
        is_first, self._begun = not self._begun, True
        logprobs = None if output.logprobs is None else output.logprobs[start:end]
        reason = output.finish_reason if self._ended else None
        return Delta(
            text, output.token_ids[start:end], logprobs, is_first, reason, output.stop_reason if self._ended else None
        )


def cursors_of(orders: list[Order]) -> list[Cursor]:
    """Return a cursor for each answer of some prompts, in the order of the choices."""
    pairs = [(order, answer) for order in orders for answer in order.answers]
    return [Cursor(index, order, answer) for index, (order, answer) in enumerate(pairs)]
