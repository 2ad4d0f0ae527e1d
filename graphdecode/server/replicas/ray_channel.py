"""From a front to the replicas: over Ray, or over HTTP past it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any
from uuid import uuid4

import aiohttp
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.types import Message, Scope

from graphdecode.config import ServerConfig
from graphdecode.server.replicas.channel import LostError
from graphdecode.server.replicas.front import make_front
from graphdecode.server.replicas.router import Route

LEASE_HEADER = "x-graphdecode-lease"  # of a request over HTTP: the lease that it was let in by
_SENT = ("type", "http_version", "method", "scheme", "path", "query_string", "root_path", "headers", "client", "server")
_NOT_SENT = (b"transfer-encoding", b"content-length", b"connection")  # they are about the connection, not the request
_NOT_TOLD = (b"transfer-encoding", b"connection", b"date")  # of a response; the front's own server says them
_METRICS_SECONDS = 10.0


class RayChannel:
    """Requests and answers go as calls of Ray, some events of a stream in one message.

    Args:
        handle: of the replicas.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streaming: Any = handle.options(stream=True)

    async def messages(
        self, scope: Scope, body: bytes, blocks: Sequence[int], avoid: Sequence[str]
    ) -> AsyncGenerator[Message, None]:
        """See `Channel`."""
        sent = {name: scope[name] for name in _SENT if name in scope}
        answer = self._streaming.answer.remote(sent, body, route=Route(blocks, avoid))
        try:
            with losses():
                async for several in answer:
                    for message in several:
                        yield message
        finally:
            answer.cancel()

    async def metrics(self) -> dict[str, str]:
        """See `Channel`."""
        with losses():
            answers = self._handle.broadcast("metrics")
            texts = await answers.results_async(timeout_s=_METRICS_SECONDS, return_exceptions=True)
        return dict(each for each in texts if not isinstance(each, BaseException))


class HttpChannel(RayChannel):
    """Ray chooses the replica, counts the request and sees to the replica's life; the answer itself comes over HTTP.

    A request costs two messages of Ray, however long its answer is.

    Args:
        handle: of the replicas.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        super().__init__(handle)
        self._session: aiohttp.ClientSession | None = None

    async def messages(
        self, scope: Scope, body: bytes, blocks: Sequence[int], avoid: Sequence[str]
    ) -> AsyncGenerator[Message, None]:
        """See `Channel`."""
        lease = uuid4().hex
        letting = self._streaming.lease.remote(lease, route=Route(blocks, avoid))
        try:
            with losses():
                address = await anext(letting)
                headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]
                           if key not in _NOT_SENT]  # fmt: skip
                path = scope["path"] + ("?" + query.decode("latin-1") if (query := scope["query_string"]) else "")
                sending = self._open_session().request(
                    scope["method"], address + path, data=body, headers=[*headers, (LEASE_HEADER, lease)],
                    allow_redirects=False,
                )  # fmt: skip
                async with sending as response:
                    async for message in _told(response):
                        yield message
        finally:
            letting.cancel()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        return self._session


class Ingress:
    """The front as Ray's proxies call it.

    Args:
        replicas: that it stands before.
        limits: theirs.
    """

    def __init__(self, replicas: DeploymentHandle, limits: ServerConfig) -> None:
        self._replicas = replicas
        self._limits = limits

    def __serve_build_asgi_app__(self) -> Starlette:
        return make_front(RayChannel(self._replicas), self._limits)[0]


async def _told(response: aiohttp.ClientResponse) -> AsyncGenerator[Message, None]:
    """Yield a response as ASGI has it; of a stream of events, whole ones."""
    raw = [(key.lower(), value) for key, value in response.raw_headers]
    headers = [(key, value) for key, value in raw if key not in _NOT_TOLD]
    yield {"type": "http.response.start", "status": response.status, "headers": headers}
    by_event = response.content_type == "text/event-stream"
    held = b""
    async for piece in response.content.iter_any():
        held += piece
        end = held.rfind(b"\n\n") + 2 if by_event else len(held)
        if end > 1:
            yield {"type": "http.response.body", "body": held[:end], "more_body": True}
            held = held[end:]
    yield {"type": "http.response.body", "body": held, "more_body": False}


@contextlib.contextmanager
def losses() -> Iterator[None]:
    """Say of all that tells of a replica's end that it is lost."""
    try:
        yield
    except (RayError, RayServeException, aiohttp.ClientError, StopAsyncIteration, TimeoutError) as error:
        raise LostError(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # it is we who were cancelled
            raise
        raise LostError("the replica cancelled the request") from None
