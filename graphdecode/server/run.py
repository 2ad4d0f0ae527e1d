"""Running a server: load, serve, drain, shut down; uvicorn's HTTP with limits on time and connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import resource
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
from graphdecode.server.http import HttpError

MAX_HEAD_BYTES = 64 << 10
_REFUSALS = 64  # connections beyond the limit that get a response; further ones are just closed
_REFUSED_SECONDS = 1.0  # to read that response: closing immediately could lose it
_FRAMING = 8  # bytes on the connection for each byte of a body in chunks
_POLL_SECONDS = 0.05  # until all requests have finished
_BACKLOG = 2048  # connections that wait to be accepted, and as many are accepted at a time,
_BACKLOGS = 4  # of which so many may be open before the first one is counted, or closed
_OTHER_FILES = 256  # open files of the process that are not connections
_SWITCH_SECONDS = 0.001  # for which a thread that prepares a request may keep the event loop waiting
log = logging.getLogger(__name__)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's connection, with limits on time and bytes."""

    timeout_seconds: ClassVar[float | None] = None  # for the head of a request, and for the client to read
    max_connections: ClassVar[int] = 0
    max_message_bytes: ClassVar[int] = 0  # limit of a request, with chunk headers and trailers
    _awaiting_head: asyncio.TimerHandle | None = None
    _awaiting_room: asyncio.TimerHandle | None = None
    _in_head = False
    _refused = False
    _received = 0  # bytes of a request, after those that came together with its first one

    def connection_made(self, transport: Any) -> None:
        """Refuse a connection beyond the limit."""
        super().connection_made(transport)
        self._awaiting_head = self._abort_later()
        beyond = len(self.connections) - self.max_connections
        if beyond > _REFUSALS:
            transport.abort()
        elif beyond > 0:
            self._refuse(503, f"{self.max_connections} connections are open already", {"Retry-After": "1"})

    def data_received(self, data: bytes) -> None:
        """Bound the bytes of a request."""
        if self._refused:
            return
        self._received += len(data)
        if self._received > (MAX_HEAD_BYTES if self._in_head else self.max_message_bytes):
            self._refuse(431, f"the head of a request must be at most {MAX_HEAD_BYTES} bytes")
            return
        super().data_received(data)
        is_idle = not self._in_head and (self.cycle is None or self.cycle.response_complete)
        if is_idle and (self._awaiting_head is None or self._awaiting_head.cancelled()):
            self._awaiting_head = self._abort_later()  # only empty lines came

    def on_message_begin(self) -> None:
        """Bound the time of the head."""
        super().on_message_begin()
        self._in_head, self._received = True, 0
        _cancel(self._awaiting_head)
        self._awaiting_head = self._abort_later()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignore trailers."""
        if self._in_head:  # else a trailer, which is ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the time of the head."""
        self._in_head = False
        _cancel(self._awaiting_head)
        super().on_headers_complete()

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the timers."""
        _cancel(self._awaiting_head)
        _cancel(self._awaiting_room)
        super().connection_lost(error)

    def pause_writing(self) -> None:
        """Bound the time until the client reads."""
        super().pause_writing()
        self._awaiting_room = self._abort_later()

    def resume_writing(self) -> None:
        """End that time."""
        _cancel(self._awaiting_room)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Abort a connection on which no further request came."""
        self.transport.abort()

    def _refuse(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        """Respond with an error, read nothing more, and close soon."""
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:  # another response has begun
            self.transport.abort()
            return
        _cancel(self._awaiting_head)
        self._awaiting_head = self.loop.call_later(_REFUSED_SECONDS, self.transport.abort)
        body = json.dumps(HttpError(status, message).body).encode()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (fields | (headers or {})).items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.write_eof()

    def _abort_later(self) -> asyncio.TimerHandle | None:
        """Abort after `timeout_seconds`; `close` would wait until the client has taken all."""
        if self.timeout_seconds is None:
            return None
        return self.loop.call_later(self.timeout_seconds, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class ServedModel(Protocol):
    """An engine (`Service`), or several (`Cluster`)."""

    config: ServerConfig
    draining: bool  # new requests are refused

    @property
    def num_open(self) -> int:
        """Requests in flight."""

    async def start(self) -> None:
        """Load, and return when requests can be answered."""

    def close(self, *, force: bool = False) -> None:
        """End; `force`: without waiting for requests in flight."""


async def run(
    served: ServedModel, make_app: Callable[[], ASGIApp], bound: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Start one or several engines (`ArgumentError`: a wrong model or setting), and serve until SIGTERM or Ctrl-C.

    The first signal drains: new requests get 503, and requests in flight may finish for `drain_timeout_s`. A second
    signal ends immediately. During loading, the process exits with 128 plus the signal's number.
    """
    shutdown = _Shutdown(served)
    on_signals(shutdown.on_signal)
    try:
        loading = asyncio.ensure_future(served.start())
        shutdown.on_second_signal = loading.cancel
        await asyncio.wait(
            (loading, asyncio.ensure_future(shutdown.ending.wait())), return_when=asyncio.FIRST_COMPLETED
        )
        if not loading.done():
            loading.cancel()
            log.info("stopping before the model is loaded")
            shutdown.forced.set()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            sys.exit(128 + shutdown.signal)
        loading.result()
        on_signals(shutdown.on_signal)  # loading may have replaced the handlers: Ray does
        server = make_server(make_app(), served.config)
        shutdown.on_second_signal = server.end_now
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        if not serving.done():
            gc.collect()
            gc.freeze()  # collecting what was loaded would take 0.1 s each time
            sys.setswitchinterval(_SWITCH_SECONDS)
            on_ready()
        await asyncio.wait((serving, asyncio.ensure_future(shutdown.drained())), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        served.close(force=shutdown.forced.is_set())
        bound.close()


def open_files(connections: int) -> tuple[int, int]:
    """Let this process open as many files as connections may need; return how many connections and how long a backlog.

    Both are smaller, and a log line says so, where the system allows fewer files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _BACKLOGS * _BACKLOG + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections, _BACKLOG
    room = max(soft - _OTHER_FILES, 2 * _BACKLOGS)
    backlog = room // (2 * _BACKLOGS)
    most = min(connections, room // 2)
    if most < connections:
        log.warning("max_connections is %d, not %d: the system allows %d open files", most, connections, soft)
    return most, backlog


def make_server(app: ASGIApp, config: ServerConfig) -> _Server:
    """Return a server of an application."""
    connections, backlog = open_files(config.max_connections)
    bounds = {
        "timeout_seconds": config.idle_timeout_s or None,
        "max_connections": connections,
        "max_message_bytes": _FRAMING * config.max_body_bytes + MAX_HEAD_BYTES,
    }
    protocol = type("BoundedProtocol", (BoundedProtocol,), bounds)
    logger = logging.getLogger("uvicorn.error")
    if _is_unexpected not in logger.filters:
        logger.addFilter(_is_unexpected)
    uvicorn_config = uvicorn.Config(
        app,
        interface="asgi3",  # uvicorn cannot infer it from a method that Ray has wrapped
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a local client could forge its address
        backlog=backlog,
        http=protocol,
        ws="none",
        timeout_keep_alive=int(config.idle_timeout_s) or 5,
        timeout_graceful_shutdown=1,
    )
    return _Server(uvicorn_config)


class _Server(uvicorn.Server):
    """Leaves signals to `_Shutdown`, which drains first."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    def end_now(self) -> None:
        """End without waiting."""
        self.should_exit = self.force_exit = True


def on_signals(call: Callable[[int], object]) -> None:
    """Call a function in the running loop on SIGTERM and Ctrl-C, with the signal's number."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, call, number)


def off_signals() -> None:
    """Let SIGTERM and Ctrl-C end this process immediately."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)


class _Shutdown:
    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.ending = asyncio.Event()  # by a first signal
        self.forced = asyncio.Event()  # by a second one
        self.on_second_signal: Callable[[], object] = lambda: None
        self.signal = 0  # the last one's number

    def on_signal(self, number: int) -> None:
        self.signal = number
        if self.ending.is_set():
            self.forced.set()
            self.on_second_signal()
        self._served.draining = True
        self.ending.set()

    async def drained(self) -> None:
        """Return after a signal, when all requests have finished or time is up."""
        await self.ending.wait()
        running = self._served.num_open
        if running:
            log.warning("finishing %d requests; a second signal ends immediately", running)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._served.config.drain_timeout_s):
                while self._served.num_open and not self.forced.is_set():
                    await asyncio.sleep(_POLL_SECONDS)


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Filter of uvicorn's log: drop records of cancelled requests."""
    cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cancelled and "without completing response" not in record.getMessage()
