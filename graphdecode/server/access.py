"""Access to the server: by path, host name and API key; what identifies a caller."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import uuid
from collections.abc import Callable, MutableMapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphdecode.config import ServerConfig
from graphdecode.server.http import HttpError, error_response, path_below_root
from graphdecode.server.protocol import MAX_ID_LENGTH

_KEY = "graphdecode.key"  # in a scope: the digest of the request's key
_NETWORK_BYTES = 8  # network part of an IPv6 address; a client may choose the rest
DEV_PATHS = "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache"
_GUARDED = "/v1", "/v2", "/api", "/rerank", "/score", *DEV_PATHS  # paths that need a key begin with these


class Addressed:
    """Middleware: the path below which a proxy serves, and each response's X-Request-Id: the request's, or a new one.

    A proxy may strip the path or not.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = Headers(scope=scope).get("x-request-id", "")[:MAX_ID_LENGTH] or uuid.uuid4().hex
        header = (b"x-request-id", name.encode("latin-1"))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        scope["root_path"] = scope.get("root_path", "") + self._root_path
        await self._app(scope, receive, send_named)


class Guard:
    """Middleware that refuses requests for which `check` raises an `HttpError`."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], None]) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        try:
            if scope["type"] == "http":
                self._check(scope)
        except HttpError as error:
            await error_response(error, scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def check_host(hosts: Sequence[str], scope: Scope) -> None:
    """Refuse a `Host` that is neither in `hosts` nor `localhost` nor an address, against DNS rebinding."""
    allowed = {host.lower().rstrip(".") for host in (*hosts, "localhost")}
    for host in Headers(scope=scope).getlist("host"):
        # without port, and an IPv6 address without brackets
        name = host[1:].partition("]")[0] if host[:1] == "[" else host.partition(":")[0].lower().rstrip(".")
        if name not in allowed and _address(name) is None:
            message = f"unknown host {name[:200]!r}: [server] allowed_hosts allows more than localhost and addresses"
            raise HttpError(403, message, code="host")


def check_key(keys: Sequence[str], scope: Scope) -> None:
    """Refuse requests without a key to /v1, and to what controls the engine; keep its digest for `caller_of`.

    Comparing takes as long for a wrong key as for a right one.
    """
    if not path_below_root(scope).startswith(_GUARDED) or scope["method"] == "OPTIONS":
        return
    headers = dict(scope["headers"])
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    given = [bearer if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"")]
    # the sum compares with all of them
    valid = [key.strip() for key in given if sum(hmac.compare_digest(key.strip(), known.encode()) for known in keys)]
    if not valid:
        challenge = {"WWW-Authenticate": "Bearer"}
        raise HttpError(401, "the API key is missing or wrong", code="invalid_api_key", headers=challenge)
    scope[_KEY] = hashlib.blake2b(valid[0], digest_size=16).hexdigest()


def caller_of(scope: MutableMapping[str, Any]) -> str:
    """Return what identifies a caller, and cannot be forged: the digest of the API key, else the client's address."""
    if _KEY in scope:
        return str(scope[_KEY])
    host = (scope.get("client") or ("",))[0]
    address = _address(host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return address.packed[:_NETWORK_BYTES].hex()
    return host


def allowed_host_names(config: ServerConfig) -> tuple[str, ...] | None:
    """Return the host names, besides localhost, that requests may use; None: any."""
    names, address = tuple(config.allowed_hosts), _address(config.host)
    is_local = config.host == "localhost" or (address is not None and address.is_loopback)
    return None if "*" in names or not (names or is_local) else names


def _address(name: str) -> IPv4Address | IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ip_address(name)
    return None
