"""Fronts and replicas on Ray: routing, and transport of requests and responses."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import aiohttp
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.types import Message, Scope

from graphdecode.config import ServerConfig
from graphdecode.server.replicas.front import LostError, make_front
from graphdecode.server.replicas.routing import RequestsInFlight, RoutedPrefixes, choose

LEASE_HEADER = "x-graphdecode-lease"  # header of a request over HTTP
_SENT = ("type", "http_version", "method", "scheme", "path", "query_string", "root_path", "headers", "client", "server")
_NOT_SENT = (b"transfer-encoding", b"content-length", b"connection")  # headers of the connection
_NOT_RETURNED = (b"transfer-encoding", b"connection", b"date")  # headers that the front's own server sets
_METRICS_SECONDS = 10.0


class Route(NamedTuple):
    """Routing hints of a request."""

    blocks: Sequence[int] = ()  # the prompt's; see `prompt_blocks`
    avoid: Sequence[str] = ()  # names of replicas that could not serve it


class PrefixRouter(RequestRouter):
    """Routes a request to the replica that `choose` returns; replicas that do not serve, or should not, are last."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Take `slack` (see `choose`) and `policy` (`routing` of [replicas])."""
        self.slack: int = kwargs["slack"]
        self.policy: str = kwargs["policy"]
        self.prefixes: RoutedPrefixes[ReplicaID] = RoutedPrefixes()
        self.in_flight: RequestsInFlight[ReplicaID] = RequestsInFlight()
        self.draw = random.Random()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget the prefixes of replicas that have ended."""
        super().update_replicas(replicas)
        self.prefixes.keep_only([each.replica_id for each in replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then the others; Ray takes the first one with room."""
        route = pending_request.kwargs.get("route", Route()) if pending_request is not None else Route()
        fit = [
            each
            for each in candidate_replicas
            if each.routing_stats.get("serves", True) and each.replica_id.unique_id not in route.avoid
        ]
        reported = self.replica_queue_len_cache
        names = [each.replica_id for each in fit or candidate_replicas]
        loads = {name: self.in_flight.load(name, reported.get(name)) for name in names}
        if self.policy == "random":
            chosen = self.draw.choice(names)
        else:
            chosen = choose(loads, self.prefixes.matched(route.blocks), self.slack, self.draw)
        if pending_request is not None:
            self.in_flight.chosen(pending_request.future, chosen)
            pending_request.future.add_done_callback(self.in_flight.settled)
        others = [each for each in candidate_replicas if each.replica_id != chosen]
        return [[each for each in candidate_replicas if each.replica_id == chosen], others]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record which replica has the prompt."""
        self.prefixes.add(replica_id, pending_request.kwargs.get("route", Route()).blocks)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that is sent."""
        super().on_send_request(replica_id)
        self.in_flight.sent(replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request that ended."""
        self.in_flight.ended(replica_id)


class RayChannel:
    """Sends requests as Ray calls."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streaming: Any = handle.options(stream=True)

    async def messages(
        self, scope: Scope, body: bytes, blocks: Sequence[int], avoid: Sequence[str]
    ) -> AsyncGenerator[Message, None]:
        """Yield the ASGI messages of a replica's response; raises `LostError`. See `Route`."""
        sent = {name: scope[name] for name in _SENT if name in scope}
        answer = self._streaming.answer.remote(sent, body, route=Route(blocks, avoid))
        try:
            with as_lost_errors():
                async for several in answer:
                    for message in several:
                        yield message
        finally:
            answer.cancel()

    async def metrics(self) -> dict[str, str]:
        """Return the metrics of each replica, by its name."""
        with as_lost_errors():
            answers = self._handle.broadcast("metrics")
            texts = await answers.results_async(timeout_s=_METRICS_SECONDS, return_exceptions=True)
        return dict(each for each in texts if not isinstance(each, BaseException))


class HttpChannel(RayChannel):
    """Leases a replica from Ray, which counts the request; the response itself comes over HTTP."""

    def __init__(self, handle: DeploymentHandle) -> None:
        super().__init__(handle)
        self._session: aiohttp.ClientSession | None = None

    async def messages(
        self, scope: Scope, body: bytes, blocks: Sequence[int], avoid: Sequence[str]
    ) -> AsyncGenerator[Message, None]:
        """See `RayChannel.messages`."""
        lease = uuid4().hex
        leasing = self._streaming.lease.remote(lease, route=Route(blocks, avoid))
        if self._session is None:
            timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        sent = [pair for pair in scope["headers"] if pair[0] not in _NOT_SENT]
        headers = [*((key.decode("latin-1"), value.decode("latin-1")) for key, value in sent), (LEASE_HEADER, lease)]
        path = scope["path"] + ("?" + query.decode("latin-1") if (query := scope["query_string"]) else "")
        try:
            with as_lost_errors():
                url = await anext(leasing) + path
                async with self._session.request(
                    scope["method"], url, data=body, headers=headers, allow_redirects=False
                ) as response:
                    async for message in _asgi_messages(response):
                        yield message
        finally:
            leasing.cancel()


class Ingress:
    """The front as Ray's proxies call it."""

    def __init__(self, replicas: DeploymentHandle, config: ServerConfig) -> None:
        self._replicas = replicas
        self._config = config

    def __serve_build_asgi_app__(self) -> Starlette:
        return make_front(RayChannel(self._replicas), self._config)[0]


async def _asgi_messages(response: aiohttp.ClientResponse) -> AsyncGenerator[Message, None]:
    """Yield the ASGI messages of a response; those of a stream have whole events."""
    raw = [(key.lower(), value) for key, value in response.raw_headers]
    headers = [(key, value) for key, value in raw if key not in _NOT_RETURNED]
    yield {"type": "http.response.start", "status": response.status, "headers": headers}
    by_event = response.content_type == "text/event-stream"
    unsent = b""
    async for piece in response.content.iter_any():
        unsent += piece
        end = unsent.rfind(b"\n\n") + 2 if by_event else len(unsent)
        if end > 1:
            yield {"type": "http.response.body", "body": unsent[:end], "more_body": True}
            unsent = unsent[end:]
    yield {"type": "http.response.body", "body": unsent, "more_body": False}


@contextlib.contextmanager
def as_lost_errors() -> Iterator[None]:
    """Raise `LostError` for errors that mean that a replica ended."""
    try:
        yield
    except (RayError, RayServeException, aiohttp.ClientError, StopAsyncIteration, TimeoutError) as error:
        raise LostError(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # this task was cancelled
            raise
        raise LostError("the replica cancelled the request") from None
