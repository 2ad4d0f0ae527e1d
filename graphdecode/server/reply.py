"""One request that generates, from its orders to its response: whole, or event by event."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from graphdecode.errors import GraphdecodeError
from graphdecode.server import sse
from graphdecode.server.body import disconnected
from graphdecode.server.cursor import Cursor, Delta, cursors_of
from graphdecode.server.http_errors import HttpError, as_http_error
from graphdecode.server.protocol import Generation
from graphdecode.server.service import Service
from graphdecode.text.intake import Order
from graphdecode.text.outputs import Logprob

_PLACES_AT_ONCE = 50  # of a prompt, each with up to 21 log-probabilities: some milliseconds
log = logging.getLogger(__name__)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Reply(Response, ABC):
    """Answers one request of HTTP; it is the response too.

    Args:
        service: what generates.
        body: of the request.
        orders: its prompts, none of them refused.
    """

    prefix: str  # of its id
    kind: str  # `object` of the whole response
    chunk_kind: str  # `object` of a chunk

    def __init__(self, service: Service, body: Generation, orders: list[Order]) -> None:
        self.service = service
        self.body_fields = body
        self.orders = orders
        self.cursors = cursors_of(orders)
        self.background = None
        self._promise_kept: Callable[[], None] = _nothing
        self.status_code = 200
        self._usage_wanted = bool(body.stream_options and body.stream_options.include_usage)
        self._usage_always = bool(body.stream_options and body.stream_options.continuous_usage_stats)
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": service.model_name,
        }

    @abstractmethod
    def choices_of(self, cursor: Cursor, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices that tell of something new in a stream, each for a chunk of its own."""

    @abstractmethod
    def whole_choice(self, cursor: Cursor) -> dict[str, Any]:
        """Return the choice of a finished answer; `prompt_logprobs` are as the prompt's output has them."""

    def usage(self) -> dict[str, Any]:
        """Return the tokens so far."""
        prompt = sum(len(order.output.prompt_token_ids) for order in self.orders)
        generated = sum(len(cursor.answer.output.token_ids) for cursor in self.cursors)
        cached = sum(order.output.metrics.num_cached_tokens for order in self.orders)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send, until the client goes away.

        Raises:
            HttpError: there is no room for it now.
        """
        self._promise_kept = self.service.promise(len(self.cursors))
        work = asyncio.ensure_future(
            self._stream(send) if self.body_fields.stream else self._whole(scope, receive, send)
        )
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
            self._promise_kept()
        if self.service.limits.log_requests:
            self._log()
        if self.service.tracer is not None:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            for order in self.orders:
                self.service.tracer.trace(str(self._head["id"]), order, self.body_fields, headers)
        if isinstance(results[0], Exception):
            raise results[0]

    def _log(self) -> None:
        for cursor in self.cursors:
            prompt, output = cursor.order.output, cursor.answer.output
            asked = prompt.prompt_token_ids if prompt.prompt is None else prompt.prompt
            log.info("%s %d: %r -> %r (%s)", self._head["id"], cursor.index, asked, output.text, output.finish_reason)

    async def _news(self) -> AsyncGenerator[None, None]:
        """Come back whenever there is news; tell the metrics of it."""
        service = self.service
        with service.metrics.tracked(self.orders) as clocks:
            async with (
                contextlib.aclosing(service.front.follow(self.orders)) as news,
                asyncio.timeout(service.request_timeout),
            ):
                began = False
                self._promise_kept()  # the next line hands them in
                async for _ in news:
                    if not began:
                        began = True
                        service.queue.began(min(request.turn for order in self.orders for request, _ in order.requests))
                    for clock in clocks:
                        clock.tick()
                    yield

    async def whole(self) -> dict[str, Any]:
        """Generate, and return the whole response's body.

        Raises:
            HttpError: the answer was given up.
        """
        choices = [_told(choice) async for choice in self._choices()]
        return self._head | {"choices": choices, "usage": self.usage()}

    async def _choices(self) -> AsyncGenerator[dict[str, Any], None]:
        """Generate, and give the finished choices; others have their turn between two of them.

        Raises:
            HttpError: the answer was given up.
        """
        try:
            async with contextlib.aclosing(self._news()) as news:
                async for _ in news:
                    pass
        except (GraphdecodeError, TimeoutError) as error:
            raise self._failure(error) from error
        for cursor in self.cursors:
            yield self.whole_choice(cursor)
            await asyncio.sleep(0)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            choices = [await in_pieces(choice) async for choice in self._choices()]
        except HttpError as failed:
            await JSONResponse(failed.body, failed.status, failed.headers)(scope, receive, send)
        else:
            head, usage = sse.as_json(self._head), sse.as_json(self.usage())
            body = b"".join([head[:-1], b',"choices":[', b",".join(choices), b'],"usage":', usage, b"}"])
            await Response(body, media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async with contextlib.aclosing(self._news()) as news:
                async for _ in news:
                    chunks = [
                        self._chunk(choice)
                        for cursor in self.cursors
                        if (delta := cursor.take()) is not None
                        for choice in self.choices_of(cursor, delta)
                    ]
                    if chunks:
                        await _send_more(send, b"".join(chunks))
            end = self._head | {"choices": [], "usage": self.usage()}
            await _send_more(send, (sse.event(end) if self._usage_wanted else b"") + sse.DONE)
        except (GraphdecodeError, TimeoutError) as error:
            await _send_more(send, sse.event(self._failure(error).body) + sse.DONE)
        await send({"type": "http.response.body", "body": b""})

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = self._head | {"choices": [_told(choice)]}
        if self._usage_wanted:
            chunk["usage"] = self.usage() if self._usage_always else None
        return sse.event(chunk)

    def _failure(self, error: Exception) -> HttpError:
        if isinstance(error, TimeoutError):
            return HttpError(504, f"the request took longer than {self.service.request_timeout:g} s", code="timeout")
        assert isinstance(error, GraphdecodeError)
        return as_http_error(error, frozenset(type(self.body_fields).model_fields))


def _scores_as_json(entries: list[dict[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """Return a prompt's log-probabilities in vLLM's form: by token id, for each token but the first."""
    return [None if each is None else {str(token): vars(entry) for token, entry in each.items()} for each in entries]


def _told(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice as it goes into JSON."""
    scores = choice.get("prompt_logprobs")
    return choice if scores is None else choice | {"prompt_logprobs": _scores_as_json(scores)}


async def in_pieces(choice: dict[str, Any]) -> bytes:
    """Return a choice as JSON; others have their turn between two pieces of a prompt's log-probabilities."""
    scores = choice.get("prompt_logprobs")
    if scores is None:
        return sse.as_json(choice)
    del choice["prompt_logprobs"]
    pieces = [sse.as_json(choice)[:-1] + b',"prompt_logprobs":[']
    for first in range(0, len(scores), _PLACES_AT_ONCE):
        piece = sse.as_json(_scores_as_json(scores[first : first + _PLACES_AT_ONCE]))
        pieces.append((b"," if first else b"") + piece[1:-1])
        await asyncio.sleep(0)
    return b"".join([*pieces, b"]}"])


def _nothing() -> None:
    """Nothing was promised."""


async def _send_more(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
