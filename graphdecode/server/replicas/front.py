"""The front of the replicas: forwards each request to one of them, and retries with another if it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from graphdecode.config import ServerConfig
from graphdecode.errors import GraphdecodeError
from graphdecode.server.http import (
    HANDLERS,
    Bodies,
    HttpError,
    error_events,
    error_response,
    unless_disconnected,
)
from graphdecode.server.replicas.routing import prompt_blocks

REPLICA_HEADER = "x-graphdecode-replica"  # names the replica in each response
_MAX_ROUTED_BYTES = 1 << 20  # a larger body is not parsed: other requests would wait
_ATTEMPTS = 3  # for a request: one that crashes engines must not crash all of them
_TRY_ELSEWHERE = (429, 503)
_LOST = "the replica ended before the response was complete"
log = logging.getLogger(__name__)


class LostError(GraphdecodeError, RuntimeError):
    """The replica of a request was lost."""


class _Channel(Protocol):
    """Transport of requests to replicas: `RayChannel`, or `HttpChannel`."""

    def messages(
        self, scope: Scope, body: bytes, blocks: Sequence[int], avoid: Sequence[str]
    ) -> AsyncGenerator[Message, None]: ...

    async def metrics(self) -> dict[str, str]: ...


def merged(texts: Mapping[str, str], label: str | None = "replica") -> str:
    """Merge metrics of several engines by their names, in Prometheus' text format; each sample gets a label, if any."""
    families: dict[str, list[str]] = {}  # the HELP line of a family -> its TYPE, and the samples of all engines
    for engine, text in texts.items():
        family: list[str] = []
        for line in filter(None, text.splitlines()):
            if line.startswith("# HELP"):
                family = families.setdefault(line, [])
            elif not line.startswith("#"):
                name, _, rest = line.partition("{")  # all have a label
                family.append(line if label is None else f'{name}{{{label}="{engine}",{rest}')
            elif line not in family:
                family.append(line)
    return "".join(f"{line}\n" for introduced, lines in families.items() for line in (introduced, *lines))


def make_front(channel: _Channel, config: ServerConfig) -> tuple[Starlette, Front]:
    """Return the application in front of the replicas, and its `Front`."""
    front = Front(channel, config)

    async def metrics(_: Request) -> Response:
        return Response(merged(await channel.metrics()), media_type="text/plain; version=0.0.4; charset=utf-8")

    routes = [Route("/metrics", metrics), Mount("", front)]
    return Starlette(routes=routes, exception_handlers=HANDLERS), front


class Front:
    """Forwards requests to replicas; retries with another replica until a response has begun.

    If a replica is lost later, a stream ends with an error event, and any other response is cut off.
    """

    def __init__(self, channel: _Channel, config: ServerConfig) -> None:
        self._channel = channel
        self._config = config
        self._bodies = Bodies(config)
        self.draining = False  # new requests are refused
        self.num_open = 0  # requests in flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, until the client disconnects."""
        if self.draining:
            raise HttpError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "1"})
        async with self._bodies.read(Request(scope, receive)) as body:
            self.num_open += 1
            try:
                await unless_disconnected(receive, self._respond(scope, body, receive, send))
            finally:
                self.num_open -= 1

    async def _respond(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        blocks, avoid = _blocks_of(body), list[str]()
        error = HttpError(503, "no replica could respond; try again", code="no_replica", headers={"Retry-After": "5"})
        try:
            async with asyncio.timeout(self._config.request_timeout_s or None) as timeout:
                for attempt in range(1, _ATTEMPTS + 1):
                    answer = self._channel.messages(scope, body, blocks, avoid)
                    async with contextlib.aclosing(answer) as messages:
                        try:
                            begin, first = await anext(messages), await anext(messages)
                        except (LostError, StopAsyncIteration) as lost:
                            log.warning("attempt %d of a request: %s", attempt, lost)
                            continue
                        if _is_unavailable(begin, first) and attempt < _ATTEMPTS:
                            avoid.append(Headers(raw=begin["headers"]).get(REPLICA_HEADER, ""))
                            continue
                        timeout.reschedule(None)  # from here on the replica's own timeout applies
                        await self._forward(begin, first, messages, scope, send)
                        return
        except TimeoutError:
            error = HttpError(504, f"no replica responded in {self._config.request_timeout_s:g} s", code="timeout")
        await error_response(error, scope)(scope, receive, send)

    async def _forward(self, begin: Message, first: Message, messages: Any, scope: Scope, send: Send) -> None:
        await send(begin)
        await send(first)
        try:
            async for message in messages:
                await send(message)
        except LostError as lost:
            if not _is_stream(begin):
                raise ConnectionAbortedError(str(lost)) from lost  # closes the connection
            log.warning("a response in progress: %s", lost)
            failed = HttpError(503, _LOST, code="replica_lost")
            await send({"type": "http.response.body", "body": error_events(failed, scope)})


def _is_unavailable(begin: Message, first: Message) -> bool:
    """Whether the replica is full, or its engine is restarting."""
    if _is_stream(begin):
        return first["body"].startswith(b'data: {"error":') and b'"code":"restarting"' in first["body"]
    return begin["status"] in _TRY_ELSEWHERE


def _is_stream(begin: Message) -> bool:
    return Headers(raw=begin["headers"]).get("content-type", "").startswith("text/event-stream")


def _blocks_of(body: bytes) -> list[int]:
    try:
        return prompt_blocks(json.loads(body)) if 0 < len(body) <= _MAX_ROUTED_BYTES else []
    except (ValueError, RecursionError):  # the replica refuses it
        return []
