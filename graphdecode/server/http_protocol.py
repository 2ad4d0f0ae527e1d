"""uvicorn's HTTP, with patience that ends: who connects and sends no whole head of a request is let go."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class PatientProtocol(HttpToolsProtocol):
    """One connection.

    Attributes:
        patience_seconds: for the head of a request; None: for ever.
    """

    patience_seconds: ClassVar[float | None] = None
    _hanging_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has come."""
        super().connection_made(transport)
        self._be_patient()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._be_patient()

    def on_headers_complete(self) -> None:
        """Its head is whole."""
        self._rest()
        super().on_headers_complete()

    def connection_lost(self, error: Exception | None) -> None:
        """The client has left."""
        self._rest()
        super().connection_lost(error)

    def _be_patient(self) -> None:
        self._rest()
        if self.patience_seconds is not None:
            self._hanging_up = self.loop.call_later(self.patience_seconds, self.transport.close)

    def _rest(self) -> None:
        if self._hanging_up is not None:
            self._hanging_up.cancel()
            self._hanging_up = None


def protocol_with(patience_seconds: float | None) -> type[PatientProtocol]:
    """Return the protocol with some patience."""
    return type("PatientProtocol", (PatientProtocol,), {"patience_seconds": patience_seconds})
