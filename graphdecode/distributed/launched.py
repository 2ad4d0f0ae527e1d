"""Ranks that torchrun has started, on one machine or several: they meet over the store that it names."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from graphdecode.distributed.board_file import mapped_board, new_board
from graphdecode.distributed.link import Link, Message
from graphdecode.distributed.ranks import SAID, Follower, Leader, Terms, chosen, shared_threads, terms_of, terms_text
from graphdecode.errors import ArgumentError

_MEET_SECONDS = 300.0  # for the last of them to come
_TOKEN_BYTES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class LaunchedRank:
    """What torchrun's variables say of this process.

    Attributes:
        rank: of this process.
        count: of all processes.
        host: of the store.
        port: of the store.
        has_store: whether torchrun keeps the store, so that rank 0 need not.
    """

    rank: int
    count: int
    host: str
    port: int
    has_store: bool

    @classmethod
    def here(cls, count: int) -> LaunchedRank | None:
        """Return this process's place among those that torchrun started; None where it has started none.

        Raises:
            ArgumentError: it has started another number of them than `count`.
        """
        given = os.environ
        if "TORCHELASTIC_RUN_ID" not in given:
            return None
        if int(given["WORLD_SIZE"]) != count:
            raise ArgumentError(
                f"tensor_parallel_size is {count}, and torchrun has started {given['WORLD_SIZE']} processes"
            )
        has_store = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(int(given["RANK"]), count, given["MASTER_ADDR"], int(given["MASTER_PORT"]), has_store)

    def meet(self, device: str, how: str, limit_seconds: float) -> Leader | Follower:
        """Find the other ranks, and return this one's end of the group; arguments as of `Terms`."""
        limit = timedelta(seconds=_MEET_SECONDS)
        is_master = self.rank == 0 and not self.has_store
        store = dist.PrefixStore(
            "graphdecode", dist.TCPStore(self.host, self.port, self.count, is_master=is_master, timeout=limit)
        )
        store.set(f"machine/{self.rank}", _machine())
        machines = {store.get(f"machine/{rank}") for rank in range(self.count)}
        if how in ("auto", "shared") and device == "cpu" and len(machines) > 1:
            how = "gloo"
        terms = Terms(self.count, device, chosen(how, device), limit_seconds, shared_threads(self.count))
        if self.rank:
            return self._follow(store)
        return self._lead(store, terms)

    def _lead(self, store: dist.Store, terms: Terms) -> Leader:
        token = secrets.token_bytes(_TOKEN_BYTES)
        descriptor, board = (-1, None)
        if terms.how == "shared":
            descriptor, board = new_board(terms.count, terms.limit_seconds)
        else:
            held = dist.TCPStore(self.host, 0, self.count, is_master=True, wait_for_workers=False)
            terms = replace(terms, store=(self.host, held.port))
        connected: dict[tuple[int, int], socket.socket] = {}
        with socket.create_server((self.host, 0)) as server:
            server.settimeout(_MEET_SECONDS)
            place = "" if board is None else f"/proc/{os.getpid()}/fd/{descriptor}"
            store.set("leader", f"{server.getsockname()[1]} {token.hex()} {place}")
            while len(connected) < 2 * (self.count - 1):
                end, _ = server.accept()
                end.settimeout(_MEET_SECONDS)
                if end.recv(_TOKEN_BYTES, socket.MSG_WAITALL) != token:
                    end.close()
                    continue
                rank, which = end.recv(2, socket.MSG_WAITALL)
                end.settimeout(None)
                connected[rank, which] = end
        links = [Link(connected[rank, 0]) for rank in range(1, self.count)]
        for rank, link in enumerate(links, 1):
            link.send(Message(SAID, (rank, 0, 0), terms_text(terms)))
        leader = Leader(terms, links, [connected[rank, 1] for rank in range(1, self.count)], board, [])
        leader.least(0)  # all have mapped the board
        if descriptor >= 0:
            os.close(descriptor)
        return leader

    def _follow(self, store: dist.Store) -> Follower:
        port, token, *place = store.get("leader").split()
        ends = []
        for which in range(2):
            end = socket.create_connection((self.host, int(port)), timeout=_MEET_SECONDS)
            end.settimeout(None)
            end.sendall(bytes.fromhex(token.decode()) + bytes((self.rank, which)))
            ends.append(end)
        link = Link(ends[0])
        terms = terms_of(link.receive().payload)
        board: torch.Tensor | None = None
        if place:
            with open(place[0], "r+b") as file:
                board = mapped_board(file.fileno())
        follower = Follower(self.rank, terms, link, ends[1], board)
        follower.least(0)
        return follower


def _machine() -> str:
    """Return what tells this machine from others."""
    return _BOOT_ID.read_text() if _BOOT_ID.exists() else socket.gethostname()
