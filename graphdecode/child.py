"""Child processes that run a module of the package."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM)  # these may reach the whole process group


class ConnectedChild(NamedTuple):
    """A child process, and this process's end of the socket between the two."""

    process: subprocess.Popen[bytes]
    socket: socket.socket


def start_connected(module: str, environment: Mapping[str, str]) -> ConnectedChild:
    """Start a module as a process whose argument is its end of a socket; see `start_child`."""
    ours, theirs = socket.socketpair()
    with theirs:
        return ConnectedChild(start_child(module, [theirs.fileno()], environment), ours)


def start_child(
    module: str, descriptors: Sequence[int], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a module as a process, with signals blocked until it calls `leave_signals` after its imports.

    Its arguments are `descriptors`, which it inherits, or -1; `environment` is in addition to this process's.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)  # inherited by the child
    try:
        command, passed = [sys.executable, "-m", module, *map(str, descriptors)], [fd for fd in descriptors if fd >= 0]
        env = {**os.environ, **environment} if environment else None
        return subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, env=env)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals() -> None:
    """Ignore Ctrl-C and SIGTERM, pending ones too: the parent process handles them."""
    for number in _LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_PARENT)


def signal_at_end_of(parent: int, number: int) -> None:
    """Let the kernel send this process a signal when its parent ends (Linux); exit if it has ended already."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
