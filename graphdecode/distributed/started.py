"""How ranks start: as processes of rank 0, or by torchrun, on one machine or several.

Ranks of one machine may share a memory segment, the board: a mapped, unnamed file. Ranks started by torchrun find each
other through its store.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from graphdecode.child import signal_at_end_of, start_child
from graphdecode.distributed.link import Link, Message
from graphdecode.distributed.ranks import REPLY, Follower, GroupSettings, Leader
from graphdecode.errors import ArgumentError
from graphdecode.kernels.collective.shared_collectives import LIMIT_MS, board_words

_AREA_BYTES = 4 << 20  # for one rank's data in a collective; resident once written
_MEMORY = Path("/dev/shm")
_JOIN_SECONDS = 300.0  # for all ranks to join
_TOKEN_BYTES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def new_board(ranks: int, limit_seconds: float) -> tuple[int, Tensor]:
    """Return the descriptor of a new board, and the board; it exists until the last process has closed it."""
    with tempfile.TemporaryFile(dir=_MEMORY if _MEMORY.is_dir() else None) as file:
        file.truncate(8 * board_words(ranks, _AREA_BYTES))
        descriptor = os.dup(file.fileno())
    board = mapped_board(descriptor)
    board[LIMIT_MS] = round(1000 * limit_seconds)
    return descriptor, board


def mapped_board(descriptor: int) -> Tensor:
    """Return the board of a descriptor, int64 [words]."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.int64)


def start_ranks(count: int, device: str, backend: str, limit_seconds: float, module: str) -> Leader:
    """Start the other ranks as processes of this machine, and return rank 0's end.

    Arguments are those of `GroupSettings.chosen`, and the module that the processes run. Its arguments are the
    descriptors of link, heartbeats and board (-1: none).
    """
    settings = GroupSettings.chosen(count, device, backend, limit_seconds)
    settings, descriptor, board, _store = _rendezvous(settings, "127.0.0.1")
    links, heartbeats, processes = [], [], []
    for rank in range(1, count):
        (link, their_link), (heartbeat, their_heartbeat) = socket.socketpair(), socket.socketpair()
        with their_link, their_heartbeat:
            processes.append(start_child(module, [their_link.fileno(), their_heartbeat.fileno(), descriptor]))
        links.append(Link(link))
        heartbeats.append(heartbeat)
        links[-1].send(Message(REPLY, (rank, os.getpid(), 0), settings.to_bytes()))
    if descriptor >= 0:
        os.close(descriptor)
    return Leader(settings, links, heartbeats, board, processes)


def _rendezvous(settings: GroupSettings, host: str) -> tuple[GroupSettings, int, Tensor | None, dist.TCPStore | None]:
    """Return the settings, and what ranks join through: a descriptor and board (else -1, None), or a store to keep."""
    if settings.backend == "shared":
        return settings, *new_board(settings.count, settings.limit_seconds), None
    store = dist.TCPStore(host, 0, settings.count, is_master=True, wait_for_workers=False)
    return settings._replace(store=(host, store.port)), -1, None, store


def follower_of(descriptors: list[int]) -> Follower:
    """Return the end of a rank that `start_ranks` started, given its descriptors."""
    link, heartbeats, board = descriptors
    connected = Link(socket.socket(fileno=link))
    hello = connected.receive()
    rank, leader, _ = hello.numbers
    signal_at_end_of(leader, signal.SIGCONT)  # else a stopped process would stay
    mapped = mapped_board(board) if board >= 0 else None
    return Follower(rank, GroupSettings.of_bytes(hello.payload), connected, socket.socket(fileno=heartbeats), mapped)


@dataclass(frozen=True)
class LaunchedRank:
    """This process's rank under torchrun, by its environment variables."""

    rank: int  # this process's
    count: int  # number of processes
    host: str  # the store's
    port: int  # the store's
    has_store: bool  # whether torchrun runs the store, and rank 0 need not

    @classmethod
    def from_environment(cls, count: int) -> LaunchedRank | None:
        """Return this process's rank, or None without torchrun; raises ArgumentError if not `count` were started."""
        env = os.environ
        if "TORCHELASTIC_RUN_ID" not in env:
            return None
        if int(env["WORLD_SIZE"]) != count:
            raise ArgumentError(
                f"tensor_parallel_size is {count}, and torchrun has started {env['WORLD_SIZE']} processes"
            )
        has_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(int(env["RANK"]), count, env["MASTER_ADDR"], int(env["MASTER_PORT"]), has_store)

    def join(self, device: str, backend: str, limit_seconds: float) -> Leader | Follower:
        """Join the other ranks, and return this one's end of the group; for arguments see `GroupSettings`."""
        limit = timedelta(seconds=_JOIN_SECONDS)
        is_master = self.rank == 0 and not self.has_store
        store = dist.PrefixStore(
            "graphdecode", dist.TCPStore(self.host, self.port, self.count, is_master=is_master, timeout=limit)
        )
        store.set(f"machine/{self.rank}", _machine())
        machines = {store.get(f"machine/{rank}") for rank in range(self.count)}
        if backend in ("auto", "shared") and device == "cpu" and len(machines) > 1:
            backend = "gloo"
        settings = GroupSettings.chosen(self.count, device, backend, limit_seconds)
        return self._follow(store) if self.rank else self._lead(store, settings)

    def _lead(self, store: dist.Store, settings: GroupSettings) -> Leader:
        token = os.urandom(_TOKEN_BYTES)
        settings, descriptor, board, _store = _rendezvous(settings, self.host)
        connected: dict[tuple[int, int], socket.socket] = {}
        with socket.create_server((self.host, 0)) as server:
            server.settimeout(_JOIN_SECONDS)
            board_path = "" if board is None else f"/proc/{os.getpid()}/fd/{descriptor}"
            store.set("leader", f"{server.getsockname()[1]} {token.hex()} {board_path}")
            while len(connected) < 2 * (self.count - 1):
                end, _ = server.accept()
                end.settimeout(_JOIN_SECONDS)
                if end.recv(_TOKEN_BYTES, socket.MSG_WAITALL) != token:
                    end.close()
                    continue
                rank, which = end.recv(2, socket.MSG_WAITALL)
                end.settimeout(None)
                connected[rank, which] = end
        links = [Link(connected[rank, 0]) for rank in range(1, self.count)]
        for rank, link in enumerate(links, 1):
            link.send(Message(REPLY, (rank, 0, 0), settings.to_bytes()))
        leader = Leader(settings, links, [connected[rank, 1] for rank in range(1, self.count)], board, [])
        leader.least(0)  # all have mapped the board
        if descriptor >= 0:
            os.close(descriptor)
        return leader

    def _follow(self, store: dist.Store) -> Follower:
        port, token, *board_path = store.get("leader").split()
        ends = []
        for which in range(2):
            end = socket.create_connection((self.host, int(port)), timeout=_JOIN_SECONDS)
            end.settimeout(None)
            end.sendall(bytes.fromhex(token.decode()) + bytes((self.rank, which)))
            ends.append(end)
        link = Link(ends[0])
        settings = GroupSettings.of_bytes(link.receive().payload)
        board: torch.Tensor | None = None
        if board_path:
            with open(board_path[0], "r+b") as file:
                board = mapped_board(file.fileno())
        follower = Follower(self.rank, settings, link, ends[1], board)
        follower.least(0)
        return follower


def _machine() -> str:
    return _BOOT_ID.read_text() if _BOOT_ID.exists() else socket.gethostname()
