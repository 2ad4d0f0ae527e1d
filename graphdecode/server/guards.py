"""Who is let in: by the name that the server was called by, and by the key; and whose a request is then."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import MutableMapping, Sequence
from ipaddress import IPv6Address, ip_address
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from graphdecode.config import ServerConfig
from graphdecode.server.http_errors import HttpError

_KEY = "graphdecode.key"  # in a scope: the digest of the key that let it in
_NETWORK_BYTES = 8  # of an address of IPv6; what is behind them one client may choose


class HostGuard:
    """Refuses requests that call the server by a name which is not its own.

    A page of elsewhere can let its own name point to this machine (DNS rebinding), and then read what the server says:
    to the browser both are one origin. Its name stands in `Host`, and an address there is nobody's name.

    Args:
        app: behind it.
        hosts: names that are the server's own, besides localhost.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower().rstrip(".") for host in (*hosts, "localhost"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it through."""
        if scope["type"] == "http":
            for host in [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]:
                name = _name_of(host)
                if name not in self._hosts and not _is_address(name):
                    wrong = HttpError(
                        403, f"this server is not called {name[:200]!r}; [server] allowed_hosts names more", code="host"
                    )
                    await JSONResponse(wrong.body, wrong.status)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


class KeyGuard:
    """Lets into /v1 only who brings a key; comparing takes as long for a wrong key as for a right one.

    Args:
        app: behind it.
        keys: that are let in.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it through."""
        if scope["type"] == "http" and scope["path"].startswith("/v1") and scope["method"] != "OPTIONS":
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
            if scheme.lower() != b"bearer" or not any(matches):
                wrong = HttpError(401, "the API key is missing or wrong", code="invalid_api_key")
                await JSONResponse(wrong.body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
            scope[_KEY] = hashlib.blake2b(key.strip(), digest_size=16).hexdigest()
        await self._app(scope, receive, send)


def caller_of(scope: MutableMapping[str, Any]) -> str:
    """Return whose a request is, as far as nobody can say so himself: a key's that let it in, else an address's."""
    if _KEY in scope:
        return str(scope[_KEY])
    host = (scope.get("client") or ("",))[0]
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return address.packed[:_NETWORK_BYTES].hex()
    return host


def own_names(limits: ServerConfig) -> tuple[str, ...] | None:
    """Return the names, besides localhost, that a server may be called by; None: any."""
    names = tuple(limits.allowed_hosts)
    is_local = limits.host == "localhost" or (_is_address(limits.host) and ip_address(limits.host).is_loopback)
    return None if "*" in names or not (names or is_local) else names


def _name_of(host: str) -> str:
    """Return a `Host` header without its port, and an address of IPv6 without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
