"""The ranks of one model: rank 0 leads, the others execute its commands; each notices when the other is lost."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from graphdecode.distributed.collectives import Collectives, GroupCollectives, SharedCollectives
from graphdecode.distributed.link import Link, Message, Watch
from graphdecode.errors import ArgumentError, GraphdecodeError
from graphdecode.kernels.native import library as native


class RankError(GraphdecodeError, RuntimeError):
    """A rank died, stalled, failed, or differed from the others; the message names it."""


class RefusedError(ArgumentError):
    """Another rank refused an attempt; nothing was changed."""


# kinds of `Ranks`' own messages; other kinds are the engine's
REPLY = -1
ATTEMPTED = -2  # to rank 0: what speaks against an attempt; empty: nothing
REFUSED = -3  # from rank 0: the attempt is over
T = TypeVar("T")
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0  # for a rank to end


class GroupSettings(NamedTuple):
    """The settings that all ranks of a group share."""

    count: int  # type: ignore[assignment] # ranks
    device: str  # "cpu" or "cuda": rank i has the i-th GPU of its machine
    backend: str  # "shared", "gloo" or "nccl"
    limit_seconds: float  # without a heartbeat, or in a collective, after which a rank counts as stalled
    threads: int  # per rank, on a CPU
    store: tuple[str, int] | None = None  # address and port of torch.distributed's store, if there is one

    @classmethod
    def chosen(cls, count: int, device: str, backend: str, limit_seconds: float) -> GroupSettings:
        """Return the settings of ranks that share torch's threads of this process; `backend` may be "auto"."""
        if backend == "auto":
            on_cpu = "gloo" if native.library() is None else "shared"
            backend = "nccl" if device == "cuda" else on_cpu
        return cls(count, device, backend, limit_seconds, max(torch.get_num_threads() // count, 1))

    def to_bytes(self) -> bytes:
        """Serialize for another rank."""
        return json.dumps(self).encode()

    @classmethod
    def of_bytes(cls, data: bytes) -> GroupSettings:
        """Parse `to_bytes`."""
        return cls(*json.loads(data))


class Ranks(ABC):
    """A rank's end of the group."""

    collectives: Collectives

    def __init__(self, rank: int, settings: GroupSettings) -> None:
        self.rank, self.settings, self.count = rank, settings, settings.count
        self.device = torch.device("cpu")
        if settings.device == "cpu":
            torch.set_num_threads(settings.threads)
        else:
            self.device = torch.device("cuda", rank % torch.cuda.device_count())

    @abstractmethod
    def agree(self, text: str) -> None:
        """Wait until all ranks have called this with the same text; raises RankError if texts differ."""

    @abstractmethod
    def least(self, number: int) -> int:
        """Return the minimum of all ranks' numbers."""

    @abstractmethod
    def total(self, number: int) -> int:
        """Return the sum of all ranks' numbers."""

    @abstractmethod
    def attempt(self, work: Callable[[], T]) -> T:
        """Return what `work` gives, which may call `agree` and changes nothing, if it raises on no rank.

        Else rank 0 raises its own error, or a RefusedError with that of another rank; the others a RefusedError.
        """

    def collectives_over(self, board: torch.Tensor | None) -> Collectives:
        """Return the collectives: over a shared-memory segment, or torch.distributed."""
        if board is not None:
            return SharedCollectives(self.rank, self.count, self.agree, board)
        self.agree("joins the group")  # a rank may start late, and joining has a time limit
        if not dist.is_initialized() and self.settings.store is not None:
            on_gpu = self.device if self.device.type == "cuda" else None  # NCCL connects now, not in a capture
            if on_gpu is not None:
                torch.cuda.set_device(on_gpu)
            limit, (rank, count) = timedelta(seconds=self.settings.limit_seconds), (self.rank, self.count)
            store = dist.TCPStore(*self.settings.store, count, is_master=False, timeout=limit)
            whole = {"store": store, "timeout": limit, "rank": rank, "world_size": count, "device_id": on_gpu}
            dist.init_process_group(self.settings.backend, **whole)  # type: ignore[arg-type]
        return GroupCollectives(self.rank, self.count, self.agree)


class Leader(Ranks):
    """Rank 0's end of the group."""

    def __init__(
        self,
        settings: GroupSettings,
        links: list[Link],
        heartbeats: list[socket.socket],
        board: torch.Tensor | None,
        processes: list[subprocess.Popen[bytes]],
    ) -> None:
        self._threads_before = torch.get_num_threads()
        super().__init__(0, settings)
        self._tried: dict[int, str] = {}  # what other ranks said of the attempt
        self._links, self._processes = links, processes
        self._failure: str | None = None
        self._closed = False
        self._watch = Watch(dict(enumerate(heartbeats, 1)), settings.limit_seconds, self._lost)
        self._watch.start()
        at_exit = weakref.WeakMethod(self.close)
        atexit.register(lambda: (close := at_exit()) and close())
        self.collectives = self.collectives_over(board)

    def _lost(self, rank: int, fate: str) -> None:
        if fate == "died" and self._processes:
            fate = _fate(self._processes[rank - 1])
        self._give_up(rank, f"rank {rank} of {self.count} {fate}")

    def _give_up(self, rank: int, failure: str) -> None:
        self._failure = failure
        if hasattr(self, "collectives"):  # not if joining the group failed
            self.collectives.give_up(rank)
        self._end_others()

    def _end_others(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for link in self._links:  # a send to a stopped rank may be blocked
            link.end()

    @property
    def pids(self) -> list[int]:
        """The processes that this one has started, rank 1 first."""
        return [process.pid for process in self._processes]

    def send(self, kind: int, numbers: tuple[int, int, int] = (0, 0, 0), payload: bytes = b"") -> None:
        """Send a command to the other ranks; raises RankError if one of them is gone."""
        for rank in range(1, self.count):
            self.send_to(rank, kind, numbers, payload)

    def send_to(self, rank: int, kind: int, numbers: tuple[int, int, int], payload: bytes) -> None:
        """Send a command to one rank; raises RankError if it is gone."""
        try:
            self._links[rank - 1].send(Message(kind, numbers, payload))
        except OSError:
            self._raise_lost(rank)

    def agree(self, text: str) -> None:
        texts = [text, *(message.payload.decode() for message in self._replies())]
        if len(set(texts)) == 1:
            self.send(REPLY)
            return
        differing = next(rank for rank, other in enumerate(texts) if other != text)
        verdict = f"the ranks differ: rank 0 {text}, and rank {differing} {texts[differing]}"
        self.send(REPLY, payload=verdict.encode())
        self.fail(verdict)
        raise RankError(verdict)

    def least(self, number: int) -> int:
        return self._combined(min, number)

    def total(self, number: int) -> int:
        return self._combined(sum, number)

    def _combined(self, combine: Callable[[Iterable[int]], int], number: int) -> int:
        combined = combine([number, *(int(message.payload) for message in self._replies())])
        self.send(REPLY, payload=b"%d" % combined)
        return combined

    def attempt(self, work: Callable[[], T]) -> T:
        self._tried.clear()
        try:
            result = work()
        except RankError:
            raise
        except Exception:
            self.send(REFUSED)
            self._await_attempts()
            raise
        self._await_attempts()
        refused = min((rank for rank, text in self._tried.items() if text), default=None)
        self.send(REPLY if refused is None else REFUSED)
        if refused is not None:
            raise RefusedError(f"rank {refused} of {self.count}: {self._tried[refused]}")
        return result

    def _await_attempts(self) -> None:
        """Wait until all ranks have ended their attempts; what they said within is past."""
        for rank in range(1, self.count):
            while rank not in self._tried:
                self._receive(rank)

    def _replies(self) -> list[Message]:
        replies = []
        for rank in range(1, self.count):
            replies.append(self._receive(rank))
            if replies[-1].kind == ATTEMPTED:
                raise RefusedError(f"rank {rank} of {self.count}: {self._tried[rank]}")
        return replies

    def _receive(self, rank: int) -> Message:
        link = self._links[rank - 1]
        while not select.select([link], [], [], _POLL_SECONDS)[0]:
            self.check()
        try:
            message = link.receive()
        except EOFError:
            self._raise_lost(rank)
        if message.kind == ATTEMPTED:
            self._tried[rank] = message.payload.decode()
        return message

    def _raise_lost(self, rank: int) -> NoReturn:
        self._await_failure(_GRACE_SECONDS)
        self.check()
        self.fail(f"rank {rank} of {self.count} died")
        raise RankError(str(self._failure))

    def _await_failure(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while self._failure is None and time.monotonic() < ends:
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise a RankError if a rank is gone, or was late."""
        if self._failure is None:
            late = self.collectives.late() if hasattr(self, "collectives") else None
            if late is None:
                return
            self.fail(f"{late} within {self.settings.limit_seconds:g} s")
        raise RankError(str(self._failure))

    def explain(self, error: BaseException) -> None:
        """End the group because of an error here; raises RankError if the loss of another rank is the cause."""
        if isinstance(error, Exception) and not isinstance(error, GraphdecodeError):
            # gloo may raise before the watch has noticed that a rank is gone
            self._await_failure(2 * min(self.settings.limit_seconds, 1.0))
            if self._failure is not None:
                raise RankError(self._failure) from error
        self.fail(f"rank 0 of {self.count} failed: {type(error).__name__}: {error}")

    def fail(self, text: str) -> None:
        """Mark the group as failed, and end the other ranks."""
        if self._failure is None:
            self._give_up(0, text)

    def close(self, last: int | None = None) -> None:
        """End the other ranks, by a message of the kind `last` or by closing their links, and wait for them."""
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        for link in self._links:
            if last is not None:
                with contextlib.suppress(OSError):
                    link.send(Message(last, (0, 0, 0), b""))
            link.close()
        ends = time.monotonic() + _GRACE_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(ends - time.monotonic(), 0))
        self._end_others()
        for process in self._processes:
            process.wait()
        torch.set_num_threads(self._threads_before)
        leave_group(self.settings)


class Follower(Ranks):
    """Another rank's end of the group; its process ends when rank 0 is gone."""

    def __init__(
        self, rank: int, settings: GroupSettings, link: Link, heartbeats: socket.socket, board: torch.Tensor | None
    ) -> None:
        super().__init__(rank, settings)
        self._link = link
        self._watch = Watch({0: heartbeats}, settings.limit_seconds, self._lost)
        self._watch.start()
        self.collectives = self.collectives_over(board)

    def _lost(self, rank: int, fate: str) -> None:
        # the main thread may wait for ever
        self.fail(f"rank {rank} {fate}")
        print(f"graphdecode: rank {self.rank} of {self.count} ends: rank {rank} {fate}", file=sys.stderr, flush=True)
        os._exit(1)

    def receive(self) -> Message:
        """Wait for a command of rank 0; raises EOFError if it ended the group."""
        try:
            return self._link.receive()
        except EOFError:
            self._watch.join()  # ends the process if rank 0 was lost
            raise

    def agree(self, text: str) -> None:
        verdict = self._reply_to(Message(REPLY, (0, 0, 0), text.encode())).payload
        if verdict:
            raise RankError(verdict.decode())

    def least(self, number: int) -> int:
        return int(self._reply_to(Message(REPLY, (0, 0, 0), b"%d" % number)).payload)

    def total(self, number: int) -> int:
        return self.least(number)  # rank 0 knows what is asked for

    def attempt(self, work: Callable[[], T]) -> T:
        try:
            result = work()
        except (RankError, EOFError):
            raise
        except RefusedError as error:  # rank 0 has said so
            with contextlib.suppress(OSError):
                self._link.send(Message(ATTEMPTED, (0, 0, 0), str(error).encode()))
            raise
        except Exception as error:
            text = f"{error}" if isinstance(error, GraphdecodeError) else f"{type(error).__name__}: {error}"
            self._reply_to(Message(ATTEMPTED, (0, 0, 0), text.encode()))
            raise
        self._reply_to(Message(ATTEMPTED, (0, 0, 0), b""))
        return result

    def _reply_to(self, message: Message) -> Message:
        with contextlib.suppress(OSError):  # rank 0 is gone: `receive` raises
            self._link.send(message)
        reply = self.receive()
        if reply.kind == REFUSED:
            raise RefusedError("another rank refused")
        return reply

    def fail(self, text: str) -> None:
        """Send rank 0 the reason why this rank ends."""
        self._watch.fail(text)

    def close(self) -> None:
        """Leave the group."""
        self._watch.close()
        self._link.close()
        leave_group(self.settings)


def leave_group(settings: GroupSettings) -> None:
    """Destroy torch.distributed's default group, if these ranks made it."""
    if settings.store is not None and dist.is_initialized():
        dist.destroy_process_group()


def _fate(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
