"""Responses that generate while they are sent: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphdecode.errors import GraphdecodeError
from graphdecode.server import protocol
from graphdecode.server.admission import Admission
from graphdecode.server.http import (
    HttpError,
    as_http_error,
    error_response,
    unless_disconnected,
)
from graphdecode.server.protocol import Generation
from graphdecode.server.service import Service
from graphdecode.server.structured_outputs import StructuredOutput
from graphdecode.text.chat_formats import ChatFormat, ReplyParser
from graphdecode.text.input_processor import ParentRequest, TokenizedPrompt
from graphdecode.text.outputs import Logprob, RequestState

log = logging.getLogger(__name__)
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Prepared(NamedTuple):
    """A request that was validated and tokenized."""

    body: Generation  # without its large parts
    prompts: list[TokenizedPrompt]
    structured: StructuredOutput | None
    chat_format: ChatFormat | None = None  # None: outputs are not parsed
    tools: Mapping[str, Mapping[str, Any]] | None = None  # functions that may be called: schemas of their parameters
    echoed: str = ""  # the text before the answer in its message
    in_reasoning: bool = False  # the prompt ends within the thought
    is_constrained: bool = False  # a grammar makes the calls
    about: Any = None  # what the reply of another API needs to know of its request

    def parser(self, parent: ParentRequest) -> ReplyParser | None:
        """Return a new parser of an output of a prompt; None: it is content as it is."""
        if self.chat_format is None:
            return None
        # a grammar that could not be compiled may have been left out
        constrained = self.is_constrained and any(request.grammar is not None for request, _ in parent.children)
        tools, in_reasoning = self.tools or {}, self.in_reasoning
        return ReplyParser(self.chat_format, tools=tools, in_reasoning=in_reasoning, is_constrained=constrained)


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
    stream_type: bytes = b"text/event-stream; charset=utf-8"

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
        self.response_id = self.prefix + (body.request_id or uuid.uuid4().hex)
        self.created = int(time.time())

    @abstractmethod
    async def whole_body(self) -> bytes:
        """Return the body of the whole response, once its outputs have ended."""

    def name_as(self, request_id: str) -> None:
        """Name the response by its request's `X-Request-Id`."""
        self.response_id = self.prefix + request_id

    def update(self) -> None:
        """Take in what the outputs have grown by, while the whole response is awaited."""

    async def first_events(self) -> bytes:
        """Return the events with which a stream begins, before its first token."""
        return b""

    @abstractmethod
    async def new_events(self) -> bytes:
        """Return the events of what the outputs have grown by; empty: nothing worth an event."""

    @abstractmethod
    async def last_events(self) -> bytes:
        """Return the events with which a stream ends, once its outputs have ended."""

    @abstractmethod
    def failure_events(self, error: HttpError) -> bytes:
        """Return the events with which a stream ends that fails."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send, until the client disconnects."""
        if request_id := Headers(scope=scope).get("x-request-id"):  # takes precedence, as in vLLM
            self.name_as(request_id[: protocol.MAX_ID_LENGTH])
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
                line = (self.response_id, cursor.index, requested, output.text, output.finish_reason)
                log.info("%s %d: %r -> %r (%s)", *line)
        if self.service.tracer is not None:
            for parent in self.parents:
                self.service.tracer.trace(self.response_id, parent, self.body_fields, Headers(scope=scope))
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
                    self.update()
        except (GraphdecodeError, TimeoutError) as error:
            raise self._failure(error) from error
        return await self.whole_body()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response: Response = Response(await self.whole(), media_type="application/json")
        except HttpError as failed:
            response = error_response(failed, scope)
        except asyncio.CancelledError:
            if self.service.draining:
                await error_response(self._cut_off(), scope)(scope, receive, send)
            raise
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", self.stream_type), *_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await _send_more(send, await self.first_events())
            async with contextlib.aclosing(self._updates()) as updates:
                async for _ in updates:
                    await _send_more(send, await self.new_events())
            await _send_more(send, await self.last_events())
        except (GraphdecodeError, TimeoutError) as error:
            await _send_more(send, self.failure_events(self._failure(error)))
        except asyncio.CancelledError:
            if self.service.draining:
                await _send_more(send, self.failure_events(self._cut_off()))
            raise
        await send({"type": "http.response.body", "body": b""})

    def _cut_off(self) -> HttpError:
        log.warning("%s was cut off: drain_timeout_s is over", self.response_id)
        return HttpError(503, "the server is shutting down, and drain_timeout_s is over", code="shutting_down")

    def _failure(self, error: Exception) -> HttpError:
        if isinstance(error, TimeoutError):
            return HttpError(504, f"the request took longer than {self.service.request_timeout:g} s", code="timeout")
        assert isinstance(error, GraphdecodeError)
        return as_http_error(error, frozenset(type(self.body_fields).model_fields))


async def _send_more(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})
