"""uvicorn's HTTP, with patience that ends: who sends no whole head of a request, or takes no answer, is let go."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class PatientProtocol(HttpToolsProtocol):
    """One connection.

    Attributes:
        patience_seconds: for the head of a request, and for room to send more of an answer; None: for ever.
    """

    patience_seconds: ClassVar[float | None] = None
    _awaiting_head: asyncio.TimerHandle | None = None
    _awaiting_room: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has come."""
        super().connection_made(transport)
        self._awaiting_head = self._patience()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        _end(self._awaiting_head)
        self._awaiting_head = self._patience()

    def on_headers_complete(self) -> None:
        """Its head is whole."""
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

    def _patience(self) -> asyncio.TimerHandle | None:
        """Return what ends the connection in time; closing it would wait until the client has taken all."""
        if self.patience_seconds is None:
            return None
        return self.loop.call_later(self.patience_seconds, self.transport.abort)


def _end(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def protocol_with(patience_seconds: float | None) -> type[PatientProtocol]:
    """Return the protocol with some patience."""
    return type("PatientProtocol", (PatientProtocol,), {"patience_seconds": patience_seconds})
