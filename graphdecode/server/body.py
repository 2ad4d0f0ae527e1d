"""What a client sends, and whether it is still there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from graphdecode.config import ServerConfig
from graphdecode.server.http_errors import HttpError

LARGE_BYTES = 32 << 10  # larger bodies are read in a child, for here all others would wait
AT_A_TIME = 8  # as many of the largest bodies may be here before they are read
T = TypeVar("T")


@dataclass
class _Held:
    """What of one body is counted.

    Attributes:
        nbytes: as many.
    """

    nbytes: int = 0


class Bodies:
    """Reads bodies, and bounds the memory that they take together before they have become something else.

    Args:
        limits: of the size and time of one.
    """

    def __init__(self, limits: ServerConfig) -> None:
        self._limits = limits
        self._held = 0  # bytes of large ones

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Give the whole body of a request; it counts until this is left.

        Args:
            request: whose body nobody has read.

        Raises:
            HttpError: it is too large, did not come, or others take the room that it needs.
        """
        held = _Held()
        try:
            yield await self._whole(request, held)
        finally:
            self._held -= held.nbytes

    async def _whole(self, request: Request, held: _Held) -> bytes:
        limits, data = self._limits, bytearray()
        try:
            async with asyncio.timeout(limits.idle_timeout_s or None):
                async for piece in request.stream():
                    data += piece
                    if len(data) > limits.max_body_bytes:
                        raise HttpError(413, f"the body is larger than {limits.max_body_bytes} bytes")
                    if len(data) > LARGE_BYTES:
                        self._held += len(data) - held.nbytes
                        held.nbytes = len(data)
                        self._check_room()
        except TimeoutError:
            raise HttpError(408, "the body did not come in time", headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise HttpError(499, "the client went away") from None
        return bytes(data)

    def _check_room(self) -> None:
        most = AT_A_TIME * self._limits.max_body_bytes
        if self._held > most:
            headers = {"Connection": "close", "Retry-After": "1"}
            raise HttpError(429, f"large bodies take more than {most} bytes already", code="bodies", headers=headers)


async def disconnected(receive: Receive) -> None:
    """Come back when the client, whose body was read, goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what some work gives; it is given up when the client, whose body was read, goes away.

    Raises:
        HttpError: the client went away.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HttpError(499, "the client went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
