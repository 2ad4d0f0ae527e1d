"""Responses made of blocks: thoughts, texts and calls, in the order in which the model writes them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from graphdecode.server.admission import Admission
from graphdecode.server.http import typed_events
from graphdecode.server.reply import Delta, Prepared, Reply
from graphdecode.server.service import Service
from graphdecode.text.chat_formats import CallArguments, CallEnd, CallStart, Content, Reasoning, ReplyEvent
from graphdecode.text.chat_formats.thought_tokens import ThoughtTokens
from graphdecode.text.input_processor import ParentRequest

BlockKind = Literal["reasoning", "text", "call"]


@dataclass
class ReplyBlock:
    """A part of an output that is of one kind."""

    index: int  # in the output
    kind: BlockKind
    call_id: str = ""
    name: str = ""  # of the function that is called
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of a text's tokens, if requested
    is_cut: bool = False  # the output was not allowed to go on

    @property
    def text(self) -> str:
        """The text, or the arguments of a call in JSON."""
        return "".join(self.pieces)


class BlocksReply(Reply):
    """The response to a request for one output, in blocks.

    Both forms of it are made of the same parts: each update of the output extends `blocks`, and a stream tells how.
    """

    def __init__(
        self, service: Service, prepared: Prepared, parents: list[ParentRequest], admission: Admission
    ) -> None:
        super().__init__(service, prepared, parents, admission)
        (self.cursor,) = self.cursors
        self.blocks: list[ReplyBlock] = []
        self._parser = prepared.parser(parents[0])
        self._open: ReplyBlock | None = None  # the last block, while it goes on
        self._scores: list[dict[str, Any]] = []  # log-probabilities of tokens whose text has not come yet
        self._thoughts: ThoughtTokens | None = None
        if (chat_format := prepared.chat_format) is not None and chat_format.thinks:
            self._thoughts = ThoughtTokens(chat_format, self._texts.bytes_of, in_reasoning=prepared.in_reasoning)
        self._thinks_first = chat_format is not None and chat_format.thinking is not None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thoughts so far."""
        return 0 if self._thoughts is None else self._thoughts.count(self.cursor.state.output.token_ids)

    @abstractmethod
    def begun(self, block: ReplyBlock) -> list[dict[str, Any]]:
        """Return the events of a block that begins."""

    @abstractmethod
    def grown(self, block: ReplyBlock, text: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the events of a piece that a block has grown by."""

    @abstractmethod
    def ended(self, block: ReplyBlock) -> list[dict[str, Any]]:
        """Return the events of a block that ends."""

    def scored(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens of a text."""
        return []

    async def new_events(self) -> bytes:
        """See `Reply.new_events`."""
        delta = self.cursor.take()
        return b"" if delta is None else typed_events(self._changes(delta))

    def update(self) -> None:
        """See `Reply.update`."""
        if (delta := self.cursor.take()) is not None:
            self._changes(delta)

    def _changes(self, delta: Delta) -> list[dict[str, Any]]:
        """Extend the blocks by what is new, and return its events."""
        final, text = delta.finish_reason is not None, delta.text
        parsed: Sequence[ReplyEvent] = [Content(text)] if text else []
        if self._parser is not None:
            parsed = self._parser.feed(text, final=final)
        events, self._scores = list[dict[str, Any]](), self._scores + self.scored(delta)
        is_cut = delta.finish_reason == "length"
        for number, event in enumerate(parsed, 1):
            match event:
                case Reasoning(piece):
                    events += self._extend("reasoning", piece)
                case Content(piece):
                    events += self._extend("text", piece)
                case CallStart(_, call_id, name):
                    events += self._close()
                    events += self._begin(ReplyBlock(len(self.blocks), "call", call_id, name))
                case CallArguments(_, piece):
                    events += self._grow(piece)
                case CallEnd():
                    is_last = self._parser is not None and self._parser.is_cut and number == len(parsed)
                    events += self._close(is_cut=is_last)
        if self.blocks and (self._open is None or self._open.kind != "text"):
            self._scores = []  # of thoughts and calls
        return events + (self._close(is_cut=is_cut) if final else [])

    def _extend(self, kind: BlockKind, piece: str) -> list[dict[str, Any]]:
        events = []
        if self._open is None or self._open.kind != kind:
            events += self._close()
            events += self._begin(ReplyBlock(len(self.blocks), kind))
        return events + self._grow(piece)

    def _begin(self, block: ReplyBlock) -> list[dict[str, Any]]:
        self.blocks.append(block)
        self._open = block
        return self.begun(block)

    def _grow(self, piece: str) -> list[dict[str, Any]]:
        assert self._open is not None
        self._open.pieces.append(piece)
        scores = list[dict[str, Any]]()
        if self._open.kind == "text":
            scores, self._scores = self._scores, scores
            if scores and self._thinks_first:
                begins = len(self.cursor.state.output.token_ids) - len(scores)
                scores = scores[max(self.num_reasoning_tokens - begins, 0) :]
            self._open.logprobs += scores
        return self.grown(self._open, piece, scores)

    def _close(self, *, is_cut: bool = False) -> list[dict[str, Any]]:
        block, self._open = self._open, None
        if block is None:
            return []
        block.is_cut = is_cut
        return self.ended(block)
