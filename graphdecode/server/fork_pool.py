"""Runs jobs in children of a fork server, within limits and in a fair order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from graphdecode.child import start_connected
from graphdecode.errors import GraphdecodeError
from graphdecode.server.fair_queue import RETRY_AFTER, FairSemaphore
from graphdecode.server.http import RESTARTING, HttpError
from graphdecode.server.jobs import STACK_BYTES, ChildExited, CpuTimeError, Job, JobError, JobLimits, JobResult
from graphdecode.server.messages import MessageSocket, end_process, framed, receive

MAX_CHILDREN = 2
MAX_WAITING = 256
_QUICK_CPU_SECONDS = 1
_END_SECONDS = 1.0
_ONE_THREAD = {  # a fork would not copy other threads
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
}
log = logging.getLogger(__name__)


class PoolTimeouts(NamedTuple):
    """Timeouts in seconds that do not depend on the job."""

    quick_seconds: float = 5.0  # limit of a first attempt
    accept_seconds: float = 5.0  # for the fork server to accept a job, which it does at once
    start_seconds: float = 120.0  # for the fork server to start


class ForkPool:
    """Client of the fork server, for use from one event loop; it starts the process when needed.

    A job that takes more than a second is started again among slow ones. `state_maker` returns a picklable function
    that makes, in the fork server, the first argument of all jobs; `modules` are imported there once.
    """

    def __init__(
        self, state_maker: Callable[[], Callable[[], Any]], modules: Sequence[str], timeouts: PoolTimeouts | None = None
    ) -> None:
        self._state_maker = state_maker
        self._modules = tuple(modules)
        self._timeouts = timeouts or PoolTimeouts()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._start: asyncio.Task[socket.socket] | None = None
        self._quick, self._slow = (FairSemaphore(MAX_CHILDREN, MAX_WAITING) for _ in range(2))

    @property
    def pid(self) -> int | None:
        """Process id of the fork server; None: it does not run."""
        return None if self._process is None else self._process.pid

    async def run(
        self, function: Callable[..., Any], *arguments: Any, limits: JobLimits, caller: str, size: int
    ) -> Any:
        """Return what `function(state, *arguments)` returns in a child, or raise its `GraphdecodeError`; cancelling
        kills it.

        Raises `JobError` if it exceeds a limit, `HttpError` if too many jobs wait, the machine is under load, or the
        process has ended.
        """
        job = Job(function, arguments, limits)
        quick = limits._replace(cpu_seconds=_QUICK_CPU_SECONDS, wall_seconds=self._timeouts.quick_seconds)
        try:
            async with self._quick.acquire(caller, size):
                done = await self._done(await self._started(), job._replace(limits=quick))
        except (CpuTimeError, TimeoutError):
            async with self._slow.acquire(caller, size):
                try:
                    done = await self._done(await self._started(), job)
                except TimeoutError:  # it did not get the CPU time that it may have
                    raise _overloaded(f"it did not finish in {limits.wall_seconds:g} s") from None
        if done.fault is not None:
            log.error("a job failed\n%s", done.fault)
            raise RuntimeError("a job failed")
        if done.error is not None:
            raise done.error
        return done.result

    async def _done(self, control: socket.socket, job: Job) -> JobResult:
        """Run a job in a child; raises `JobError`, `TimeoutError` or, for outside causes, `HttpError`."""
        try:
            local, remote = socket.socketpair()
        except OSError as error:
            raise _overloaded(f"cannot open a socket: {error.strerror}") from error
        with remote:
            try:
                socket.send_fds(control, [b"."], [remote.fileno()])
            except OSError as error:  # it has ended, or reads nothing
                local.close()
                raise _server_ended() from error
        reader, writer = await asyncio.open_unix_connection(sock=local, limit=1 << 24)
        try:
            writer.write(framed(job))
            try:
                async with asyncio.timeout(self._timeouts.accept_seconds):
                    await receive(reader)
            except TimeoutError:
                if self._control is control:
                    log.error("the preprocessing server does not respond; restarting it")
                    self.close(force=True)
                raise _overloaded("the preprocessing server did not respond, and is being restarted") from None
            async with asyncio.timeout(job.limits.wall_seconds):
                message = await receive(reader)
        except (TimeoutError, GraphdecodeError):
            raise
        except (asyncio.IncompleteReadError, OSError) as error:
            raise _server_ended() from error
        except Exception as error:  # unpickling may raise anything
            log.exception("the result of a job cannot be unpickled")
            raise HttpError(500, "the result of preprocessing cannot be read; see the server's log") from error
        finally:
            writer.close()  # ends the child
        if isinstance(message, ChildExited):
            raise _reason(message.code, job.limits)
        assert isinstance(message, JobResult)
        return message

    async def _started(self) -> socket.socket:
        """Return the socket to the fork server, which is started if needed."""
        if self._process is not None and self._process.poll() is not None:  # it has ended
            self.close()
        if self._start is None:
            self._start = asyncio.create_task(asyncio.to_thread(self._begin), name="fork server")
        start = self._start
        try:
            return await asyncio.shield(start)  # other jobs wait for it too
        except Exception as error:
            if self._start is start:  # the first job that sees the error
                log.error("the preprocessing server cannot be started: %s: %s", type(error).__name__, error)
                self.close(force=True)
            raise _server_ended() from error

    def _begin(self) -> socket.socket:
        self._process, local = start_connected("graphdecode.server.fork_server", _ONE_THREAD)
        self._control = local
        local.settimeout(self._timeouts.start_seconds)
        connection = MessageSocket(local)
        connection.send((self._modules, self._state_maker()))
        connection.receive(wait=True)
        local.setblocking(False)  # the event loop never waits for it
        return local

    def close(self, *, force: bool = False) -> None:
        """End the fork server and its children; the next job starts another one."""
        self._start = None
        if force and self._process is not None:
            self._process.kill()
        end_process(self._process, self._control, _END_SECONDS)
        if self._control is not None:
            self._control.close()
        self._control = self._process = None


def _reason(code: int | None, limits: JobLimits) -> GraphdecodeError:
    """Return why a child exited: a limit, or an outside cause."""
    if code is None:
        return _overloaded("no process can be forked")
    if code == -signal.SIGXCPU:
        return CpuTimeError(f"takes more than {limits.cpu_seconds} s of a processor")
    if code == -signal.SIGKILL:  # by the kernel, if memory is short, or by a person
        return _overloaded("its child was killed")
    memory, stack = limits.memory_bytes >> 20, STACK_BYTES >> 20
    return JobError(f"takes more than {memory} MiB of memory or {stack} MiB of stack")


def _overloaded(reason: str) -> HttpError:
    return HttpError(503, f"cannot preprocess the request, try again: {reason}", code="overloaded", headers=RETRY_AFTER)


def _server_ended() -> HttpError:
    return HttpError(503, "the preprocessing server has ended", code=RESTARTING, headers=RETRY_AFTER)
