"""Connections between ranks: one socket for messages, one for heartbeats."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

_HEADER = struct.Struct("<4iq")  # kind, three numbers, bytes that follow
_MOST_SECONDS = 0.5  # between two heartbeats
_HEARTBEATS_PER_LIMIT = 10
_FAREWELL_SECONDS = 1.0  # to send the reason of a failure
_START_SECONDS = 120.0  # until the first heartbeat: imports come before it
_HEARTBEAT, _FAILED, _ENDED = b".", b"!", b"-"


class Message(NamedTuple):
    """One message."""

    kind: int  # `REPLY`, or a command of the engine
    numbers: tuple[int, int, int]
    payload: bytes


class Link:
    """One end of a connected stream socket, which it owns."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the socket's descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message; raises OSError if the other end is gone."""
        header = _HEADER.pack(message.kind, *message.numbers, len(message.payload))
        self._socket.sendall(header + message.payload)

    def receive(self) -> Message:
        """Wait for a message; raises EOFError if the other end is gone."""
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
        """Shut the connection down, which wakes both ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class Watch(threading.Thread):
    """A thread that sends heartbeats, and calls `on_loss` once, for the first rank that died or stalled.

    A rank is stalled without a heartbeat for the limit. That is counted in polls, not in time, so that ranks that are
    stopped and continued together, as by Ctrl-Z, are not stalled. It owns the sockets of `peers`.
    """

    def __init__(
        self, peers: Mapping[int, socket.socket], limit_seconds: float, on_loss: Callable[[int, str], None]
    ) -> None:
        super().__init__(name="rank-watch", daemon=True)
        self._peers = dict(peers)
        self._every = min(limit_seconds / _HEARTBEATS_PER_LIMIT, _MOST_SECONDS)
        self._limit, self._on_loss = limit_seconds, on_loss
        self._ends = threading.Event()
        for peer in self._peers.values():
            peer.setblocking(False)

    def run(self) -> None:
        """Send and receive heartbeats until a rank is lost, or `close`."""
        silent = dict.fromkeys(self._peers, 0)  # polls since the last heartbeat
        received = dict.fromkeys(self._peers, b"")
        began: set[int] = set()
        while self._peers and not self._ends.is_set():
            self._send(_HEARTBEAT)
            ready, _, _ = select.select(list(self._peers.values()), [], [], self._every)
            if ready:
                self._ends.wait(self._every)  # one poll for the heartbeats of all
            for rank, peer in list(self._peers.items()):
                try:
                    data = peer.recv(1 << 16)
                except BlockingIOError:
                    silent[rank] += 1
                    limit = self._limit if rank in began else max(self._limit, _START_SECONDS)
                    if silent[rank] * self._every > limit:
                        self._report(rank, f"has stalled: no heartbeat for {limit:g} s")
                        return
                    continue
                except OSError:
                    data = b""
                received[rank] = (received[rank] + data).lstrip(_HEARTBEAT)
                silent[rank] = 0
                began.add(rank)
                if received[rank].startswith(_ENDED):
                    del self._peers[rank]
                elif not data:
                    text = received[rank].removeprefix(_FAILED).decode(errors="replace")
                    self._report(rank, f"failed: {text}" if text else "died")
                    return

    def _report(self, rank: int, fate: str) -> None:
        if not self._ends.is_set():
            self._on_loss(rank, fate)

    def _send(self, message: bytes) -> None:
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):  # full if the other is stopped, or gone, which `recv` finds
                peer.send(message)

    def fail(self, text: str) -> None:
        """Send the others the reason why this rank ends."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.settimeout(_FAREWELL_SECONDS)  # it may be full
                peer.sendall(_FAILED + text.encode())

    def close(self) -> None:
        """Stop, and tell the others that this is intended."""
        self._ends.set()
        self._send(_ENDED)
        if self.is_alive() and self is not threading.current_thread():
            self.join()
        for peer in self._peers.values():
            peer.close()
