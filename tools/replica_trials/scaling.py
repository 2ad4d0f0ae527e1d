"""From one replica to two and back while requests come: by the load, and by other commands."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from replica_trials.server import (
    END_SECONDS,
    LARGE_CACHE,
    START_SECONDS,
    Server,
    ray_environment,
    served,
    until_none_is_left,
)
from replica_trials.streams import Stream, ask, client_of, longest_gap, outcomes, requests_of

CLIENTS = 16


def scale_by_load(model: str, tokens: int) -> dict[str, Any]:
    """Let the load make two replicas of one, and its end one of two."""
    settings = LARGE_CACHE + "[replicas]\ntarget_requests = 4\nupscale_delay_s = 1.0\ndownscale_delay_s = 8.0\n"

    async def scaled(server: Server) -> tuple[list[Stream], dict[str, float]]:
        async with Load(server, tokens) as many:
            up = await asyncio.to_thread(server.until_replicas, 2)
            await asyncio.sleep(3)
        async with Load(server, tokens, clients=1) as one:  # goes on while the other replica leaves
            down = await asyncio.to_thread(server.until_replicas, 1)
            await asyncio.sleep(1)
        return many.streams + one.streams, {"up_s": up, "down_s": down}

    with served(model, "--autoscale", "1:2", settings=settings) as server:
        return _told(*asyncio.run(scaled(server)))


def scale_by_command(model: str, tokens: int) -> dict[str, Any]:
    """Join a Ray that others began, with one replica, and let other commands make two of it, and one again."""

    async def scaled(stack: ExitStack, folder: str, options: tuple[str, ...]) -> tuple[list[Stream], dict[str, float]]:
        async def to(count: int) -> float:
            began = time.monotonic()
            one_more = served(model, *options, "--replicas", str(count), folder=folder)
            server = await asyncio.to_thread(stack.enter_context, one_more)
            await asyncio.to_thread(server.until_replicas, count)
            return time.monotonic() - began

        first = stack.enter_context(served(model, *options, "--replicas", "1", folder=folder))
        async with Load(first, tokens) as load:
            await asyncio.sleep(3)
            up = await to(2)
            await asyncio.sleep(3)
            down = await to(1)
            await asyncio.sleep(3)
        return load.streams, {"up_s": up, "down_s": down}

    with cluster() as (folder, address), ExitStack() as stack:
        options = ("--ray-address", address, "--port", str(free_port()))
        return _told(*asyncio.run(scaled(stack, folder, options)))


@contextmanager
def cluster() -> Iterator[tuple[str, str]]:
    """Begin a Ray as an administrator would, and leave no process of it; yield its folder and its address."""
    with tempfile.TemporaryDirectory(prefix="gd", ignore_cleanup_errors=True) as folder:
        address = f"127.0.0.1:{free_port()}"
        command = ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        command += [f"--port={address.partition(':')[2]}", "--num-cpus=4", "--object-store-memory=200000000"]
        null = subprocess.DEVNULL
        head = subprocess.Popen(command, env=ray_environment(folder), stdin=null, stdout=null, stderr=null)
        try:
            _until_it_listens(address)
            yield folder, address
        finally:
            head.terminate()
            head.wait(END_SECONDS)
            until_none_is_left(folder)


def _until_it_listens(address: str) -> None:
    host, _, port = address.partition(":")
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
        else:
            return


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _told(streams: list[Stream], took: dict[str, float]) -> dict[str, Any]:
    return {"requests": len(streams), "outcomes": outcomes(streams), "longest_gap_s": longest_gap(streams)} | took


class Load:
    """Clients that ask again and again, each of them one request at a time, until the end of the context.

    Args:
        server: that they ask.
        tokens: of an answer.
        clients: that there are.

    Attributes:
        streams: what came of the requests.
    """

    def __init__(self, server: Server, tokens: int, clients: int = CLIENTS) -> None:
        self._server = server
        self._bodies = iter(requests_of(100_000, 3, tokens))
        self._clients = clients
        self._ended = asyncio.Event()
        self.streams: list[Stream] = []

    async def __aenter__(self) -> Load:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended.set()
        await self._task

    async def _run(self) -> None:
        async with client_of(self._server.address) as http, asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client(http))

    async def _client(self, http: Any) -> None:
        while not self._ended.is_set():
            self.streams.append(await ask(http, self._server.model, next(self._bodies)))
