"""The fork server: a child for each piece of untrusted work, within limits.

    python -m graphdecode.server.fork_server FD

FD is the socket to the process that speaks HTTP. The first message over it makes what all the work needs; behind it
each byte comes with the socket of one piece of work, which its child reads and answers. A child whose other side closes
that socket is killed. It has one thread, so that a fork finds no lock held, and lives as long as the other side does.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import pickle
import resource
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from graphdecode.distributed.child import leave_signals
from graphdecode.errors import GraphdecodeError
from graphdecode.server.fork_pool import STACK_BYTES, Accepted, ChildExited, Job, JobLimits, JobResult
from graphdecode.server.messages import MessageSocket, framed

_NICE = 10  # steps and HTTP go first
_LONGEST_PAUSE_MS = 1000
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_STATM, _TASKS = Path("/proc/self/statm"), Path("/proc/self/task")  # Linux has them

log = logging.getLogger(__name__)


class ForkServer:
    """Forks a child for each job that comes over `control`, and kills those whose other side is closed."""

    def __init__(self, control: socket.socket, state: Any) -> None:
        self._control = control
        self._state = state
        self._pid = os.getpid()
        self._children: dict[int, tuple[int, socket.socket]] = {}  # descriptor of the socket -> child, socket
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # with a handler it reaches the pipe, and ends the poll
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Fork until the other side is gone."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(_LONGEST_PAUSE_MS):
                if descriptor == self._woken:
                    os.read(self._woken, 4096)
                elif descriptor == self._control.fileno():
                    data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not data:
                        for child, _ in self._children.values():
                            os.kill(child, signal.SIGKILL)
                        return
                    for each in descriptors:  # none where this process has too many
                        job = socket.socket(fileno=each)
                        if self.fork(job):
                            poll.register(job, 0)  # POLLHUP alone: the other side has closed it
                elif descriptor in self._children:
                    os.kill(self._children[descriptor][0], signal.SIGKILL)
                    poll.unregister(descriptor)
            self._reap(poll)

    def fork(self, job: socket.socket) -> bool:
        """Fork for a job, which comes over a socket; tell its sender and return False if that fails."""
        _tell(job, Accepted())
        try:
            child = os.fork()
        except OSError as error:
            log.warning("no child for a piece of work: %s", error.strerror)
            _tell(job, ChildExited(None))
            job.close()
            return False
        if child == 0:
            _end_with(self._pid)
            for descriptor in (self._control.fileno(), self._woken, self._wake, *self._children):
                os.close(descriptor)  # else the askers of the others would not see them end
            _work(job, self._state)
        self._children[job.fileno()] = child, job
        return True

    def _reap(self, poll: select.poll) -> None:
        for descriptor, (child, job) in list(self._children.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del self._children[descriptor]
                with suppress(KeyError):  # it was killed
                    poll.unregister(descriptor)
                code = os.waitstatus_to_exitcode(status)
                if code:
                    _tell(job, ChildExited(code))
                job.close()


def _tell(job: socket.socket, message: Any) -> None:
    """Send a short message without blocking; errors are ignored."""
    with suppress(OSError):
        job.send(framed(message), socket.MSG_DONTWAIT)


def _end_with(parent: int) -> None:
    """Have this process killed when its parent ends (Linux)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _work(job: socket.socket, state: Any) -> NoReturn:
    """Do one piece of work in a child, and exit without the parent's cleanup."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        connection = MessageSocket(job)
        done = _done(connection, state)
        resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        connection.send(done)
        code = 0
    finally:  # without an answer the asker is told that it took too much
        os._exit(code)


def _done(connection: MessageSocket, state: Any) -> JobResult:
    try:
        (work,) = connection.receive(wait=True)
    except (EOFError, OSError):  # its asker has left
        raise
    except Exception:  # what cannot be read raises whatever it likes
        return JobResult(fault=traceback.format_exc())
    assert isinstance(work, Job)
    try:
        _limit(work.limits)
        done = JobResult(work.function(state, *work.arguments))
        pickle.dumps(done, protocol=pickle.HIGHEST_PROTOCOL)
        return done
    except GraphdecodeError as error:
        return JobResult(error=error)
    except MemoryError:
        raise
    except BaseException:  # whatever it is, it is this package's fault
        return JobResult(fault=traceback.format_exc())


def _limit(limits: JobLimits) -> None:
    """Apply the limits, and silence standard error, where libraries would print untrusted input."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    if _STATM.exists():  # elsewhere the system does not hold to such a limit either
        most = int(_STATM.read_text().split()[0]) * resource.getpagesize() + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hardest = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hardest))  # it ends here, and not there
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, resource.RLIM_INFINITY))  # a child's own starts at 0
    os.nice(_NICE)


def main() -> None:
    """Make the state that the first message asks for, acknowledge, and serve."""
    leave_signals()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    control = socket.socket(fileno=int(sys.argv[1]))
    connection = MessageSocket(control)
    try:
        (setup,) = connection.receive(wait=True)
        for name in setup.modules:
            importlib.import_module(name)
        state = setup.make_state()
        connection.send(None)
    except (EOFError, OSError):
        return
    threads = len(os.listdir(_TASKS)) if _TASKS.exists() else 1
    if threads > 1:
        log.warning("the process that forks has %d threads: what they hold, its children wait for", threads)
    gc.collect()
    gc.freeze()  # a child's collector need not look at it, nor copy its pages
    ForkServer(control, state).serve()


if __name__ == "__main__":
    main()
