"""Responses made of choices, those of completions and chats: whole, or as chunks."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any

from graphdecode.server.http import SSE_DONE, HttpError, as_json, sse_event
from graphdecode.server.protocol import StreamOptions
from graphdecode.server.reply import Cursor, Delta, Reply

_LOGPROB_CHUNK = 50  # positions with up to 21 log-probabilities each: some milliseconds


class ChoicesReply(Reply):
    """The response to a request for completions or chat completions."""

    kind: str  # `object` of the whole response
    chunk_kind: str  # `object` of a chunk

    @abstractmethod
    def choice(self, cursor: Cursor, delta: Delta, *, whole: bool = False) -> dict[str, Any] | None:
        """Return the choice of a chunk or of the whole response; None: the chunk would be empty."""

    def about_prompt(self, *, whole: bool) -> dict[str, Any]:
        """Return the fields beside the choices, of the whole response or of the first chunk of a choice."""
        return {}

    def usage(self) -> dict[str, Any]:
        """Return the counts of tokens so far."""
        prompt = sum(len(parent.output.prompt_token_ids) for parent in self.parents)
        generated = sum(len(cursor.state.output.token_ids) for cursor in self.cursors)
        cached = sum(parent.output.metrics.num_cached_tokens for parent in self.parents)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def whole_body(self) -> bytes:
        """See `Reply.whole_body`."""
        choices = []
        for cursor in self.cursors:
            choice = await self._choice(cursor, cursor.whole(), whole=True)
            assert choice is not None
            choices.append(await in_pieces(choice))
            await asyncio.sleep(0)  # other tasks wait
        head, tail = (
            as_json(self._head(self.kind)),
            await in_pieces({"usage": self.usage()} | self.about_prompt(whole=True)),
        )
        return b"".join([head[:-1], b',"choices":[', b",".join(choices), b"],", tail[1:]])

    async def new_events(self) -> bytes:
        """See `Reply.new_events`."""
        head, options = self._head(self.chunk_kind), self._stream_options
        now = {"usage": self.usage() if options.continuous_usage_stats else None} if options.include_usage else {}
        events = []
        for cursor in self.cursors:
            if (delta := cursor.take()) is None or (choice := await self._choice(cursor, delta)) is None:
                continue
            chunk = head | {"choices": [choice]} | now
            if not delta.is_first:
                events.append(sse_event(chunk))
                continue
            chunk |= self.about_prompt(whole=False)
            events.append(b"data: " + await in_pieces(chunk) + b"\n\n")  # an echo may be long
        return b"".join(events)

    async def last_events(self) -> bytes:
        """See `Reply.last_events`."""
        end = self._head(self.chunk_kind) | {"choices": [], "usage": self.usage()}
        return (sse_event(end) if self._stream_options.include_usage else b"") + SSE_DONE

    def failure_events(self, error: HttpError) -> bytes:
        """See `Reply.failure_events`."""
        return sse_event(error.body) + SSE_DONE

    @property
    def _stream_options(self) -> StreamOptions:
        return self.body_fields.stream_options or StreamOptions()

    def _head(self, kind: str) -> dict[str, Any]:
        model = self.body_fields.model or self.service.model_name
        return {"id": self.response_id, "object": kind, "created": self.created, "model": model}

    async def _choice(self, cursor: Cursor, delta: Delta, *, whole: bool = False) -> dict[str, Any] | None:
        """Return `choice`, which is made in a thread if it has many log-probabilities, so that other tasks run."""
        of_prompt = cursor.parent.output.prompt_logprobs if delta.is_first else None
        if len(delta.logprobs or ()) + len(of_prompt or ()) <= _LOGPROB_CHUNK:
            return self.choice(cursor, delta, whole=whole)
        return await asyncio.to_thread(self.choice, cursor, delta, whole=whole)


async def in_pieces(data: Any) -> bytes:
    """Return JSON, letting other tasks run between pieces of its long lists."""
    if isinstance(data, dict):
        members = [as_json(str(name)) + b":" + await in_pieces(value) for name, value in data.items()]
        return b"{" + b",".join(members) + b"}"
    if not isinstance(data, list):
        return as_json(data)
    if len(data) <= _LOGPROB_CHUNK:
        return b"[" + b",".join([await in_pieces(each) for each in data]) + b"]"
    pieces = []
    for first in range(0, len(data), _LOGPROB_CHUNK):
        pieces.append(as_json(data[first : first + _LOGPROB_CHUNK])[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(pieces) + b"]"
