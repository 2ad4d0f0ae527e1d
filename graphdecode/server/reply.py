"""Responses that generate while they are sent: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphdecode.errors import GraphdecodeError
from graphdecode.server import protocol
from graphdecode.server.admission import Admission
from graphdecode.server.http import (
    SSE_DONE,
    HttpError,
    as_http_error,
    as_json,
    error_response,
    sse_event,
    unless_disconnected,
)
from graphdecode.server.protocol import Generation, StreamOptions
from graphdecode.server.service import Service
from graphdecode.server.structured_outputs import StructuredOutput
from graphdecode.server.tool_calls import ToolFormat
from graphdecode.text.input_processor import ParentRequest, TokenizedPrompt
from graphdecode.text.outputs import Logprob, RequestState

_LOGPROB_CHUNK = 50  # positions with up to 21 log-probabilities each: some milliseconds
log = logging.getLogger(__name__)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Prepared(NamedTuple):
    """A request that was validated and tokenized."""

    body: Generation  # without its large parts
    prompts: list[TokenizedPrompt]
    structured: StructuredOutput | None
    tools: ToolFormat | None = None  # None: the output is not searched for tool calls
    names: frozenset[str] = frozenset()  # functions that may be called
    echoed: str = ""  # the text before the answer in its message


class Delta(NamedTuple):
    """The new part of an output."""

    text: str
    token_ids: list[int]  # their text may still be held back
    logprobs: list[dict[int, Logprob]] | None  # one per token, if requested
    is_first: bool
    finish_reason: str | None  # set in the last delta
    stop_reason: str | int | None  # the stop text or token, in the last delta


@dataclass
class Cursor:
    """Reads an output as it grows."""

    index: int
    parent: ParentRequest
    state: RequestState
    offset: int = 0  # where the text of the next token begins
    _tokens_read: int = 0
    _began: bool = False
    _ended: bool = False

    def take(self) -> Delta | None:
        """Return what is new; None if nothing is."""
        state, output = self.state, self.state.output
        if self._ended:
            return None
        self._ended = state.finished
        start, end = self._tokens_read, len(output.token_ids)
        text = "".join(state.pieces)
        if not (text or end > start or self._ended):
            return None
        state.pieces.clear()
        is_first, self._began, self._tokens_read = not self._began, True, end
        logprobs = None if output.logprobs is None else output.logprobs[start:end]
        ending = (output.finish_reason, output.stop_reason) if self._ended else (None, None)
        return Delta(text, output.token_ids[start:end], logprobs, is_first, *ending)

    def whole(self) -> Delta:
        """Return all of a finished output."""
        output = self.state.output
        return Delta(output.text, output.token_ids, output.logprobs, True, output.finish_reason, output.stop_reason)


class Reply(Response, ABC):
    """The response to a request, which generates when it is sent."""

    prefix: str  # of the response's id
    kind: str  # `object` of the whole response
    chunk_kind: str  # `object` of a chunk

    def __init__(
        self, service: Service, prepared: Prepared, parents: list[ParentRequest], admission: Admission
    ) -> None:
        self.service = service
        self._admission = admission  # released when the requests are submitted
        self.body_fields = body = prepared.body
        self.parents = parents
        pairs = [(parent, state) for parent in parents for state in parent.states]
        texts = service.preprocessor.input_processor.texts
        assert texts is not None
        self._texts = texts
        self.cursors = [Cursor(index, parent, state) for index, (parent, state) in enumerate(pairs)]
        self.background = None
        self.status_code = 200
        self._head = {
            "id": f"{self.prefix}-{body.request_id or uuid.uuid4().hex}",
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": body.model or service.model_name,
        }

    @abstractmethod
    def choice(self, cursor: Cursor, delta: Delta, *, whole: bool = False) -> dict[str, Any] | None:
        """Return the choice of a chunk or of the whole response; None: the chunk would be empty."""

    def about_prompt(self, *, whole: bool) -> dict[str, Any]:
        """Return the fields beside the choices, of the whole response or of the first chunk of a choice."""
        return {}

    async def _choice(self, cursor: Cursor, delta: Delta, *, whole: bool = False) -> dict[str, Any] | None:
        """Return `choice`, which is made in a thread if it has many log-probabilities, so that other tasks run."""
        of_prompt = cursor.parent.output.prompt_logprobs if delta.is_first else None
        if len(delta.logprobs or ()) + len(of_prompt or ()) <= _LOGPROB_CHUNK:
            return self.choice(cursor, delta, whole=whole)
        return await asyncio.to_thread(self.choice, cursor, delta, whole=whole)

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send, until the client disconnects."""
        if request_id := Headers(scope=scope).get("x-request-id"):  # takes precedence, as in vLLM
            self._head["id"] = f"{self.prefix}-{request_id[: protocol.MAX_ID_LENGTH]}"
        failed: Exception | None = None
        sending = self._stream(send) if self.body_fields.stream else self._whole(scope, receive, send)
        try:
            await unless_disconnected(receive, sending)
        except Exception as error:
            failed = error
        finally:
            self._admission.release()
        if self.service.config.log_requests:
            for cursor in self.cursors:
                prompt, output = cursor.parent.output, cursor.state.output
                requested = prompt.prompt_token_ids if prompt.prompt is None else prompt.prompt
                line = (self._head["id"], cursor.index, requested, output.text, output.finish_reason)
                log.info("%s %d: %r -> %r (%s)", *line)
        if self.service.tracer is not None:
            for parent in self.parents:
                self.service.tracer.trace(str(self._head["id"]), parent, self.body_fields, Headers(scope=scope))
        if failed is not None:
            raise failed

    async def _updates(self) -> AsyncGenerator[None, None]:
        """Submit the prompts, and yield whenever their outputs change."""
        service, began = self.service, False
        with service.metrics.tracked(self.parents) as count_tokens:
            async with (
                contextlib.aclosing(service.front.follow(self.parents)) as updates,
                asyncio.timeout(service.request_timeout),
            ):
                self._admission.release()  # the next line submits them
                async for _ in updates:
                    if not began:
                        began = True
                        requests = [request for parent in self.parents for request, _ in parent.children]
                        if not any(request.priority for request in requests):  # priorities override the queue
                            service.queue.began(min(request.start_tag for request in requests))
                    count_tokens()
                    yield

    async def whole(self) -> bytes:
        """Generate, and return the body of the whole response, or raise `HttpError`."""
        try:
            async with contextlib.aclosing(self._updates()) as updates:
                async for _ in updates:
                    pass
        except (GraphdecodeError, TimeoutError) as error:
            raise self._failure(error) from error
        choices = []
        for cursor in self.cursors:
            choice = await self._choice(cursor, cursor.whole(), whole=True)
            assert choice is not None
            choices.append(await in_pieces(choice))
            await asyncio.sleep(0)  # other tasks wait
        head, tail = as_json(self._head), await in_pieces({"usage": self.usage()} | self.about_prompt(whole=True))
        return b"".join([head[:-1], b',"choices":[', b",".join(choices), b"],", tail[1:]])

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response: Response = Response(await self.whole(), media_type="application/json")
        except HttpError as failed:
            response = error_response(failed)
        except asyncio.CancelledError:
            if self.service.draining:
                await error_response(self._cut_off())(scope, receive, send)
            raise
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        options = self.body_fields.stream_options or StreamOptions()
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async with contextlib.aclosing(self._updates()) as updates:
                async for _ in updates:
                    now = {"usage": self.usage() if options.continuous_usage_stats else None}
                    events = []
                    for cursor in self.cursors:
                        if (delta := cursor.take()) is None or (choice := await self._choice(cursor, delta)) is None:
                            continue
                        chunk = self._head | {"choices": [choice]} | (now if options.include_usage else {})
                        if not delta.is_first:
                            events.append(sse_event(chunk))
                            continue
                        chunk |= self.about_prompt(whole=False)
                        events.append(b"data: " + await in_pieces(chunk) + b"\n\n")  # an echo may be long
                    if events:
                        await _send_more(send, b"".join(events))
            end = self._head | {"choices": [], "usage": self.usage()}
            await _send_more(send, (sse_event(end) if options.include_usage else b"") + SSE_DONE)
        except (GraphdecodeError, TimeoutError) as error:
            await _send_more(send, sse_event(self._failure(error).body) + SSE_DONE)
        except asyncio.CancelledError:
            if self.service.draining:
                await _send_more(send, sse_event(self._cut_off().body) + SSE_DONE)
            raise
        await send({"type": "http.response.body", "body": b""})

    def _cut_off(self) -> HttpError:
        log.warning("%s was cut off: drain_timeout_s is over", self._head["id"])
        return HttpError(503, "the server is shutting down, and drain_timeout_s is over", code="shutting_down")

    def _failure(self, error: Exception) -> HttpError:
        if isinstance(error, TimeoutError):
            return HttpError(504, f"the request took longer than {self.service.request_timeout:g} s", code="timeout")
        assert isinstance(error, GraphdecodeError)
        return as_http_error(error, frozenset(type(self.body_fields).model_fields))


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


async def _send_more(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
