"""What a client sends, and whether it is still there."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from graphdecode.config import ServerConfig
from graphdecode.server.http_errors import HttpError


async def read_body(request: Request, limits: ServerConfig) -> bytes:
    """Return the whole body of a request.

    Args:
        request: whose body nobody has read.
        limits: of its size and time.

    Raises:
        HttpError: it is too large, or did not come.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(limits.idle_timeout_s or None):
            async for piece in request.stream():
                data += piece
                if len(data) > limits.max_body_bytes:
                    raise HttpError(413, f"the body is larger than {limits.max_body_bytes} bytes")
    except TimeoutError:
        raise HttpError(408, "the body did not come in time", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise HttpError(499, "the client went away") from None
    return bytes(data)


async def disconnected(receive: Receive) -> None:
    """Come back when the client, whose body was read, goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
