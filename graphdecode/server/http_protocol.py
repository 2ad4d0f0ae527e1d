"""uvicorn's HTTP, with patience that ends: for heads without end, for who takes no answer, and for too many of them."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from graphdecode.config import ServerConfig
from graphdecode.server.http_errors import HttpError

MAX_HEAD_BYTES = 64 << 10
_REFUSALS = 64  # connections beyond the limit that are told so; further ones are closed without a word
_REFUSED_SECONDS = 1.0  # that one may take to read it: closing at once could take the answer away
_FRAMING = 8  # bytes that a byte of a body may be sent in, where it comes in chunks; trailers are no body


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
        if self._is_idle and (self._awaiting_head is None or self._awaiting_head.cancelled()):
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

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being read or answered."""
        return not self._in_head and (self.cycle is None or self.cycle.response_complete)

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
