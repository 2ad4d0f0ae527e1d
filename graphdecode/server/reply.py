"""One request that generates, from its orders to its response: whole, or event by event."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from graphdecode.errors import GraphdecodeError
from graphdecode.server.http import SSE_DONE, HttpError, as_http_error, as_json, sse_event, while_there
from graphdecode.server.protocol import Generation
from graphdecode.server.service import Service
from graphdecode.text.answer import Answer
from graphdecode.text.input_processor import Order
from graphdecode.text.outputs import Logprob

_PLACES_AT_ONCE = 50  # of a prompt, each with up to 21 log-probabilities: some milliseconds
log = logging.getLogger(__name__)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Delta(NamedTuple):
    """The new part of one answer."""

    text: str  # that can be shown
    token_ids: list[int]  # new ones, of which the text may still be held back
    logprobs: list[dict[int, Logprob]] | None  # of these; None where they were not asked for
    is_first: bool  # nothing was sent of it before
    finish_reason: str | None  # with the last delta
    stop_reason: str | int | None  # with the last delta: the stop text or token


class Cursor:
    """Reads one answer as it grows."""

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


class Reply(Response, ABC):
    """Answers one request of HTTP; it is the response too."""

    prefix: str  # of its id
    kind: str  # `object` of the whole response
    chunk_kind: str  # `object` of a chunk

    def __init__(self, service: Service, body: Generation, orders: list[Order]) -> None:
        self.service = service
        self.body_fields = body
        self.orders = orders
        pairs = [(order, answer) for order in orders for answer in order.answers]
        self.cursors = [Cursor(index, order, answer) for index, (order, answer) in enumerate(pairs)]
        self.background = None
        self._promise_kept: Callable[[], None] = lambda: None
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
        failed: Exception | None = None
        try:
            await while_there(
                receive, self._stream(send) if self.body_fields.stream else self._whole(scope, receive, send)
            )
        except Exception as error:
            failed = error
        finally:
            self._promise_kept()
        if self.service.limits.log_requests:
            for cursor in self.cursors:
                prompt, output = cursor.order.output, cursor.answer.output
                asked = prompt.prompt_token_ids if prompt.prompt is None else prompt.prompt
                told = (self._head["id"], cursor.index, asked, output.text, output.finish_reason)
                log.info("%s %d: %r -> %r (%s)", *told)
        if self.service.tracer is not None:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            for order in self.orders:
                self.service.tracer.trace(str(self._head["id"]), order, self.body_fields, headers)
        if failed is not None:
            raise failed

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
        except asyncio.CancelledError:
            if self.service.draining:
                cut = self._cut_off()
                await JSONResponse(cut.body, cut.status, cut.headers)(scope, receive, send)
            raise
        else:
            head, usage = as_json(self._head), as_json(self.usage())
            body = b"".join([head[:-1], b',"choices":[', b",".join(choices), b'],"usage":', usage, b"}"])
            await Response(body, media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async with contextlib.aclosing(self._news()) as news:
                async for _ in news:
                    chunks = [
                        self._head | {"choices": [_told(choice)]} | self._usage_of_chunk()
                        for cursor in self.cursors
                        if (delta := cursor.take()) is not None
                        for choice in self.choices_of(cursor, delta)
                    ]
                    if chunks:
                        await _send_more(send, b"".join(map(sse_event, chunks)))
            end = self._head | {"choices": [], "usage": self.usage()}
            await _send_more(send, (sse_event(end) if self._usage_wanted else b"") + SSE_DONE)
        except (GraphdecodeError, TimeoutError) as error:
            await _send_more(send, sse_event(self._failure(error).body) + SSE_DONE)
        except asyncio.CancelledError:
            if self.service.draining:
                await _send_more(send, sse_event(self._cut_off().body) + SSE_DONE)
            raise
        await send({"type": "http.response.body", "body": b""})

    def _usage_of_chunk(self) -> dict[str, Any]:
        return {"usage": self.usage() if self._usage_always else None} if self._usage_wanted else {}

    def _cut_off(self) -> HttpError:
        """Return what is said of an answer that the end of the server leaves unfinished."""
        log.warning("%s was left unfinished: drain_timeout_s is over", self._head["id"])
        return HttpError(503, "the server ends, and the time for running answers is over", code="shutting_down")

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
        return as_json(choice)
    del choice["prompt_logprobs"]
    pieces = [as_json(choice)[:-1] + b',"prompt_logprobs":[']
    for first in range(0, len(scores), _PLACES_AT_ONCE):
        piece = as_json(_scores_as_json(scores[first : first + _PLACES_AT_ONCE]))
        pieces.append((b"," if first else b"") + piece[1:-1])
        await asyncio.sleep(0)
    return b"".join([*pieces, b"]}"])


async def _send_more(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
