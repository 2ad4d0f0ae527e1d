"""The address of a server. Light to import, so that one that is in use is said before anything is loaded."""

from __future__ import annotations

import errno
import socket

from graphdecode.errors import ArgumentError, cause


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that holds an address, refusing connections until the server listens; raises `ArgumentError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # named as TCP, or asyncio leaves Nagle's algorithm on, which holds an answer back for 40 ms
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        hint = "; --port 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
        raise ArgumentError(f"cannot listen on {host} port {port}: {cause(error)}{hint}") from error
    return bound
