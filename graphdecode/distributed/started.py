"""Ranks that rank 0 starts as processes of its machine: they are given one end of each connection, and the board."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

import torch.distributed as dist

from graphdecode.distributed.board_file import mapped_board, new_board
from graphdecode.distributed.child import start_child
from graphdecode.distributed.link import Link, Message
from graphdecode.distributed.ranks import SAID, Follower, Leader, Terms, chosen, shared_threads, terms_of, terms_text

_PR_SET_PDEATHSIG = 1


def start_ranks(count: int, device: str, how: str, limit_seconds: float, module: str) -> Leader:
    """Start the other ranks as processes of this machine, and return the end that leads them.

    Args:
        count: ranks, this process among them.
        device: "cpu" or "cuda".
        how: "auto", "shared", "gloo" or "nccl".
        limit_seconds: see `Terms`.
        module: what such a process runs; it is given the descriptors of link, life and board (-1: none).
    """
    how = chosen(how, device)
    store = None
    if how != "shared":
        held = dist.TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
        store = ("127.0.0.1", held.port)
    terms = Terms(count, device, how, limit_seconds, shared_threads(count), store)
    descriptor, board = new_board(count, limit_seconds) if how == "shared" else (-1, None)
    links, lives, processes = [], [], []
    for rank in range(1, count):
        (link, their_link), (life, their_life) = socket.socketpair(), socket.socketpair()
        given = [their_link.fileno(), their_life.fileno(), descriptor]
        with their_link, their_life:
            processes.append(start_child(module, given))
        links.append(Link(link))
        lives.append(life)
        links[-1].send(Message(SAID, (rank, os.getpid(), 0), terms_text(terms)))
    if descriptor >= 0:
        os.close(descriptor)
    return Leader(terms, links, lives, board, processes)


def follower_of(descriptors: list[int]) -> Follower:
    """Return the end of a rank that `start_ranks` has started, given what it was given."""
    link, life, board = descriptors
    connected = Link(socket.socket(fileno=link))
    hello = connected.receive()
    rank, leader, _ = hello.numbers
    _wake_behind(leader)
    mapped = mapped_board(board) if board >= 0 else None
    return Follower(rank, terms_of(hello.payload), connected, socket.socket(fileno=life), mapped)


def _wake_behind(parent: int) -> None:
    """Let the kernel wake this process, if it is stopped, when the one that started it ends: so it can end, too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
        if os.getppid() != parent:
            os._exit(1)
