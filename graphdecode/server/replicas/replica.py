"""One engine and its application, as an actor of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import ray
from ray import serve
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphdecode.server.address import bind
from graphdecode.server.app import make_app
from graphdecode.server.batch import BatchRequest, answer_request
from graphdecode.server.replicas.front import REPLICA_HEADER
from graphdecode.server.replicas.ray_channel import LEASE_HEADER, Route
from graphdecode.server.run import make_server
from graphdecode.server.service import Service

_RESTART_SECONDS = 60.0  # for an engine to restart; then Ray replaces the replica
_LEASE_SECONDS = 30.0  # for the request of a lease to come

log = logging.getLogger(__name__)


class Replica:
    """Ray actor of one engine and its application, which `listens` on HTTP too."""

    async def __init__(self, make_service: Callable[[], Service], listens: bool) -> None:  # type: ignore[misc]
        self.service = make_service()
        self.name = serve.get_replica_context().replica_id.unique_id
        self._leases: dict[str, tuple[asyncio.Event, asyncio.Event]] = {}  # set at the request's arrival and end
        self._served_at = time.monotonic()
        await self.service.start()
        self._app = _signed(make_app(self.service, is_alone=False), self.name)
        self._address = ""
        if listens:
            node = ray.util.get_node_ip_address()
            bound = bind(node, 0)
            server = make_server(self._leased, self.service.config)
            self._serving = asyncio.create_task(server.serve(sockets=[bound]))
            self._address = f"http://{node}:{bound.getsockname()[1]}"

    async def answer(self, scope: Scope, body: bytes, *, route: Route) -> AsyncGenerator[list[Message], None]:
        """Yield the ASGI messages of the response to a request, all that are ready at a time."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        sent: list[Message] = [{"type": "http.request", "body": body}]

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()  # a client that disconnects cancels this call
            raise AssertionError

        async def work() -> None:
            try:
                await self._app(scope, receive, messages.put)
            finally:
                messages.put_nowait(None)

        working = asyncio.create_task(work())
        try:
            is_last = False
            while not is_last:
                several = [await messages.get()]
                while not messages.empty():
                    several.append(messages.get_nowait())
                is_last = several[-1] is None
                if whole := [message for message in several if message is not None]:
                    yield whole
        finally:
            working.cancel()
            await asyncio.wait((working,))

    async def whole(self, request: BatchRequest, *, route: Route) -> tuple[int, dict[str, Any]]:
        """Return status and body of the response to a request of a batch."""
        return await answer_request(self.service, request)

    async def lease(self, number: str, *, route: Route) -> AsyncGenerator[str, None]:
        """Yield the address for a request over HTTP, and end when its response has ended."""
        arrived, ended = self._leases[number] = asyncio.Event(), asyncio.Event()
        try:
            yield self._address
            async with asyncio.timeout(_LEASE_SECONDS):
                await arrived.wait()
            await ended.wait()
        except TimeoutError:
            log.warning("no request came for a lease")
        finally:
            del self._leases[number]

    async def _leased(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = Headers(scope=scope).get(LEASE_HEADER, "")
        arrived, ended = self._leases.get(number) or (asyncio.Event(), asyncio.Event())
        arrived.set()
        try:
            await self._app(scope, receive, send)
        finally:
            ended.set()

    async def metrics(self) -> tuple[str, str]:
        """Return this replica's name, and its metrics."""
        return self.name, self.service.metrics.text().decode()

    async def check_health(self) -> None:
        """Raise if the engine has not served for long; Ray calls this periodically."""
        now = time.monotonic()
        if self.service.client.serves:
            self._served_at = now
        elif now - self._served_at > _RESTART_SECONDS:
            raise RuntimeError(f"the engine has not served for {now - self._served_at:.0f} s")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the statistics for `PrefixRouter`; Ray calls this periodically."""
        return {"serves": self.service.client.serves}

    async def __del__(self) -> None:
        """End the engine; Ray calls this when no request is in flight, or time is up."""
        self.service.close(force=True)


def _signed(app: ASGIApp, name: str) -> ASGIApp:
    """Return an application that adds the replica's name to its responses."""
    header = (REPLICA_HEADER.encode(), name.encode("latin-1"))

    async def signed(scope: Scope, receive: Receive, send: Send) -> None:
        async def sign(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        await app(scope, receive, sign)

    return signed
