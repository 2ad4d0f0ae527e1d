"""The life of a server: bind, load, serve, drain, end; uvicorn's HTTP with bounds on time and connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar, Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from graphdecode.config import ServerConfig
from graphdecode.errors import ArgumentError, cause
from graphdecode.server.http import HttpError

MAX_HEAD_BYTES = 64 << 10
_REFUSALS = 64  # connections beyond the limit that are told so; further ones are closed without a word
_REFUSED_SECONDS = 1.0  # that one may take to read it: closing at once could take the answer away
_FRAMING = 8  # bytes that a byte of a body may be sent in, where it comes in chunks; trailers are no body
_LOOK_EVERY_SECONDS = 0.05  # whether all is drained
_BACKLOG = 2048
log = logging.getLogger(__name__)


class PatientProtocol(HttpToolsProtocol):
    """One connection.

    Attributes:
        patience_seconds: for the head of a request, and for room to send more of an answer; None: for ever.
        max_connections: open at a time; one more is answered with 503.
        max_message_bytes: of a request, with all that is around its body.
    """

    patience_seconds: ClassVar[float | None] = None
    max_connections: ClassVar[int] = 0
    max_message_bytes: ClassVar[int] = 0
    _awaiting_head: asyncio.TimerHandle | None = None
    _awaiting_room: asyncio.TimerHandle | None = None
    _in_head = False
    _refused = False
    _received = 0  # bytes of a request, behind those that came together with its first one

    def connection_made(self, transport: Any) -> None:
        """A client has come."""
        super().connection_made(transport)
        self._awaiting_head = self._patience()
        beyond = len(self.connections) - self.max_connections
        if beyond > _REFUSALS:
            transport.abort()
        elif beyond > 0:
            self._refuse(503, f"{self.max_connections} connections are open already", {"Retry-After": "1"})

    def data_received(self, data: bytes) -> None:
        """Some of a request has come, or of several."""
        if self._refused:
            return
        self._received += len(data)
        if self._received > (MAX_HEAD_BYTES if self._in_head else self.max_message_bytes):
            self._refuse(431, f"the head of a request must be at most {MAX_HEAD_BYTES} bytes")
            return
        super().data_received(data)
        is_idle = not self._in_head and (self.cycle is None or self.cycle.response_complete)
        if is_idle and (self._awaiting_head is None or self._awaiting_head.cancelled()):
            self._awaiting_head = self._patience()  # what came was no request, but empty lines

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._received = True, 0
        _end(self._awaiting_head)
        self._awaiting_head = self._patience()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has come, or what stands behind a body in chunks, which nobody asks for."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its head is whole."""
        self._in_head = False
        _end(self._awaiting_head)
        super().on_headers_complete()

    def connection_lost(self, error: Exception | None) -> None:
        """The client has left."""
        _end(self._awaiting_head)
        _end(self._awaiting_room)
        super().connection_lost(error)

    def pause_writing(self) -> None:
        """The client does not take what it was sent."""
        super().pause_writing()
        self._awaiting_room = self._patience()

    def resume_writing(self) -> None:
        """It has taken most of it."""
        _end(self._awaiting_room)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came behind an answer."""
        self.transport.abort()

    def _refuse(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        """Say why nothing that comes over this connection will be read, and let it go soon."""
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:  # its answer stands in the way
            self.transport.abort()
            return
        _end(self._awaiting_head)
        self._awaiting_head = self.loop.call_later(_REFUSED_SECONDS, self.transport.abort)
        body = json.dumps(HttpError(status, message).body).encode()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (fields | (headers or {})).items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.write_eof()

    def _patience(self) -> asyncio.TimerHandle | None:
        """Return what ends the connection in time; closing it would wait until the client has taken all."""
        if self.patience_seconds is None:
            return None
        return self.loop.call_later(self.patience_seconds, self.transport.abort)


def _end(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def protocol_with(limits: ServerConfig) -> type[PatientProtocol]:
    """Return the protocol within some limits."""
    own = {
        "patience_seconds": limits.idle_timeout_s or None,
        "max_connections": limits.max_connections,
        "max_message_bytes": _FRAMING * limits.max_body_bytes + MAX_HEAD_BYTES,
    }
    return type("PatientProtocol", (PatientProtocol,), own)


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


class _Served(Protocol):
    """An engine (`Service`), or several (`Cluster`)."""

    limits: ServerConfig
    draining: bool  # nothing new is taken on

    @property
    def num_open(self) -> int: ...

    async def start(self) -> None: ...

    def close(self, *, at_once: bool = False) -> None: ...


async def run(
    served: _Served, make_app: Callable[[], ASGIApp], bound: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Start what is served, serve it until told to end, let running work finish, and end.

    SIGTERM and Ctrl-C drain: new work is answered with 503, and running work may finish for `drain_timeout_s`. A second
    one ends at once. While it loads, nothing waits for an end: the process exits with 128 and the signal's number.

    Args:
        make_app: returns the application over it, once it was started.
        bound: where; see `bind`.

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
    """Return what serves an application over HTTP."""
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
    """Shutdown state, set by signals."""

    def __init__(self, served: _Served) -> None:
        self._served = served
        self.asked = asyncio.Event()  # the end was asked for
        self.at_once = asyncio.Event()  # it was asked for again
        self.on_second: Callable[[], object] = lambda: None  # is called when it is asked for again
        self.signal = 0  # that asked last

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
