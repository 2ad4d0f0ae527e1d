"""Messages between two ranks: a few numbers and some bytes, over a socket."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import NamedTuple

_HEADER = struct.Struct("<4iq")  # kind, three numbers, bytes that follow


class Message(NamedTuple):
    """One message.

    Attributes:
        kind: what it is about; the two sides agree on the numbers.
        numbers: three of them.
        payload: bytes.
    """

    kind: int
    numbers: tuple[int, int, int]
    payload: bytes


class Link:
    """One end of a connected stream socket, which it owns."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the socket's descriptor, for who waits for several."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """
        header = _HEADER.pack(message.kind, *message.numbers, len(message.payload))
        self._socket.sendall(header + message.payload)

    def receive(self) -> Message:
        """Wait for a message.

        Raises:
            EOFError: the other end is gone.
        """
        kind, *numbers, size = _HEADER.unpack(self._exactly(_HEADER.size))
        first, second, third = numbers
        return Message(kind, (first, second, third), bytes(self._exactly(size)))

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except ConnectionError:
                count = 0
            if not count:
                raise EOFError
            view = view[count:]
        return data

    def end(self) -> None:
        """Send and receive no more; who waits for either, on this end or the other, is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
