"""A server's life: bind, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from graphdecode.config import ServerConfig
from graphdecode.errors import ArgumentError, cause
from graphdecode.server.http_protocol import protocol_with

_LOOK_EVERY_SECONDS = 0.05  # whether all is drained
_BACKLOG = 2048

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that holds the address, and refuses connections until the server listens on it.

    Raises:
        ArgumentError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ArgumentError(f"cannot listen on {host} port {port}: {cause(error)}") from error
    return bound


class Served(Protocol):
    """What a server stands before: an engine, or several.

    Attributes:
        limits: of the server.
        draining: nothing new is taken on.
    """

    limits: ServerConfig
    draining: bool

    @property
    def num_open(self) -> int:
        """Requests under way."""
        ...

    async def start(self) -> None:
        """Load, and come back when requests can be served."""
        ...

    def close(self, *, at_once: bool = False) -> None:
        """End it."""
        ...


async def run(
    served: Served, make_app: Callable[[], ASGIApp], bound: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Start what is served, serve it until told to end, let running work finish, and end.

    SIGTERM and Ctrl-C drain: new work is answered with 503, and running work may finish for `drain_timeout_s`. A second
    one ends at once. While it loads, nothing waits for an end: the process exits with 128 and the signal's number.

    Args:
        served: what is served.
        make_app: returns the application over it, once it was started.
        bound: where; see `bind`.
        on_ready: is called when clients can come.

    Raises:
        ArgumentError: the model or a setting cannot be used.
    """
    life = _Life(served)
    on_signals(life.told_to_end)
    try:
        loading = asyncio.ensure_future(served.start())
        life.on_second = loading.cancel
        await asyncio.wait((loading, asyncio.ensure_future(life.asked.wait())), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            log.info("stopping before the model is loaded")
            life.at_once.set()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            sys.exit(128 + life.signal)
        loading.result()
        on_signals(life.told_to_end)  # what was loaded may have taken them: Ray does
        server = make_server(make_app(), served.limits)
        life.on_second = server.end_now
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        if not serving.done():
            gc.collect()
            gc.freeze()  # what was loaded stays, and looking through it takes a tenth of a second
            on_ready()
        await asyncio.wait((serving, asyncio.ensure_future(life.drained())), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        served.close(at_once=life.at_once.is_set())
        bound.close()


def make_server(app: ASGIApp, limits: ServerConfig) -> _Server:
    """Return what serves an application over HTTP.

    Args:
        app: as ASGI has it.
        limits: of the server.
    """
    logger = logging.getLogger("uvicorn.error")
    if _is_news not in logger.filters:
        logger.addFilter(_is_news)
    config = uvicorn.Config(
        app,
        interface="asgi3",  # it cannot be told of a method that Ray has wrapped
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a client on this machine could say with each request that it is another one
        backlog=_BACKLOG,
        http=protocol_with(limits),
        ws="none",
        timeout_keep_alive=int(limits.idle_timeout_s) or 5,
        timeout_graceful_shutdown=1,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """uvicorn's, which leaves the signals alone: they drain first."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    def end_now(self) -> None:
        """Wait for nothing more."""
        self.should_exit = self.force_exit = True


def on_signals(call: Callable[[int], object]) -> None:
    """Have SIGTERM and Ctrl-C call something in the loop that runs, with the signal's number."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, call, number)


def off_signals() -> None:
    """Have SIGTERM and Ctrl-C end this process at once from now on."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)


class _Life:
    """What signals ask for.

    Args:
        served: that is to drain.

    Attributes:
        asked: the end was asked for.
        at_once: it was asked for again.
        on_second: is called when it is asked for again.
        signal: that asked last.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        self.on_second: Callable[[], object] = _nothing
        self.signal = 0

    def told_to_end(self, number: int) -> None:
        """Take a signal."""
        self.signal = number
        if self.asked.is_set():
            self.at_once.set()
            self.on_second()
        self._served.draining = True
        self.asked.set()

    async def drained(self) -> None:
        """Come back when the end was asked for and nothing runs any more, or time is up."""
        await self.asked.wait()
        running = self._served.num_open
        if running:
            log.warning("finishing %d requests; ask again to end at once", running)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._served.limits.drain_timeout_s):
                while self._served.num_open and not self.at_once.is_set():
                    await asyncio.sleep(_LOOK_EVERY_SECONDS)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's tells more than that a task was cancelled, whose client had left or was let go."""
    cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cancelled and "without completing response" not in record.getMessage()


def _nothing() -> None:
    """Nothing runs yet."""
