"""The fork server: a child, within limits, for each job with untrusted input.

    python -m graphdecode.server.fork_server FD

FD is the socket to the HTTP process. After the setup, each byte over it comes with the socket of a job, from which a
child reads the job, and to which it writes the result. The child is killed if that socket is closed. The fork server
has one thread, so that a fork finds no lock taken, and ends with the HTTP process.

A child inherits the tokenizer and what all grammars share: seconds of work for a large vocabulary, which a pool of
workers, of the standard library or `pebble`, does again for each worker that a limit has ended. Their limits are of
wall time; a job here has its own of processor time, memory and stack.
"""

from __future__ import annotations

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

from graphdecode.child import leave_signals, signal_at_end_of
from graphdecode.errors import GraphdecodeError
from graphdecode.server.jobs import STACK_BYTES, Accepted, ChildExited, Job, JobLimits, JobResult
from graphdecode.server.messages import MessageSocket, framed

_NICE = 10  # steps and HTTP go first
_MAX_PAUSE_MS = 1000
_STATM, _TASKS = Path("/proc/self/statm"), Path("/proc/self/task")  # Linux has them

log = logging.getLogger(__name__)


class ForkServer:
    """Forks a child for each job that comes over `control`, and kills children whose client has closed the socket."""

    def __init__(self, control: socket.socket, state: Any) -> None:
        self._control = control
        self._state = state
        self._pid = os.getpid()
        self._children: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a job's socket -> child, socket
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # with a handler it writes to the pipe, and ends the poll
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Fork until the HTTP process is gone."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(_MAX_PAUSE_MS):
                if descriptor == self._woken:
                    os.read(self._woken, 4096)
                elif descriptor == self._control.fileno():
                    data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not data:
                        for child, _ in self._children.values():
                            os.kill(child, signal.SIGKILL)
                        return
                    for each in descriptors:  # none if this process has too many
                        job = socket.socket(fileno=each)
                        if self.fork(job):
                            poll.register(job, 0)  # only POLLHUP: the client has closed it
                elif descriptor in self._children:
                    os.kill(self._children[descriptor][0], signal.SIGKILL)
                    poll.unregister(descriptor)
            self._reap(poll)

    def fork(self, job: socket.socket) -> bool:
        """Fork for a job, which comes over a socket; report a failure to its sender, and return False."""
        _send_now(job, Accepted())
        try:
            child = os.fork()
        except OSError as error:
            log.warning("cannot fork for a job: %s", error.strerror)
            _send_now(job, ChildExited(None))
            job.close()
            return False
        if child == 0:
            signal_at_end_of(self._pid, signal.SIGKILL)
            for descriptor in (self._control.fileno(), self._woken, self._wake, *self._children):
                os.close(descriptor)  # else the clients of other jobs would not see them end
            _run(job, self._state)
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
                    _send_now(job, ChildExited(code))
                job.close()


def _send_now(job: socket.socket, message: Any) -> None:
    """Send a short message without blocking; errors are ignored."""
    with suppress(OSError):
        job.send(framed(message), socket.MSG_DONTWAIT)


def _run(job: socket.socket, state: Any) -> NoReturn:
    """Do a job in a child, and exit without the parent's cleanup."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        connection = MessageSocket(job)
        done = _done(connection, state)
        resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        connection.send(done)
        code = 0
    finally:  # without a result it exceeded a limit
        os._exit(code)


def _done(connection: MessageSocket, state: Any) -> JobResult:
    try:
        (job_read,) = connection.receive(wait=True)
    except (EOFError, OSError):  # it was cancelled
        raise
    except Exception:  # unpickling may raise anything
        return JobResult(fault=traceback.format_exc())
    assert isinstance(job_read, Job)
    try:
        _limit(job_read.limits)
        done = JobResult(job_read.function(state, *job_read.arguments))
        pickle.dumps(done, protocol=pickle.HIGHEST_PROTOCOL)
        return done
    except GraphdecodeError as error:
        return JobResult(error=error)
    except MemoryError:
        raise
    except BaseException:  # a bug of this package
        return JobResult(fault=traceback.format_exc())


def _limit(limits: JobLimits) -> None:
    """Apply the limits, and silence standard error, to which libraries would print untrusted input."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    if _STATM.exists():  # other systems do not enforce such a limit either
        most = int(_STATM.read_text().split()[0]) * resource.getpagesize() + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hardest = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hardest))  # less than in the engine's process
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, resource.RLIM_INFINITY))  # from 0 in a child
    os.nice(_NICE)


def main() -> None:
    """Make the state of all jobs, acknowledge, and serve."""
    leave_signals()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    control = socket.socket(fileno=int(sys.argv[1]))
    connection = MessageSocket(control)
    try:
        ((modules, make_state),) = connection.receive(wait=True)
        for name in modules:
            importlib.import_module(name)
        state = make_state()
        connection.send(None)
    except (EOFError, OSError):
        return
    threads = len(os.listdir(_TASKS)) if _TASKS.exists() else 1
    if threads > 1:
        log.warning("the fork server has %d threads: children may wait for locks that these hold", threads)
    gc.collect()
    gc.freeze()  # a child's collector need not look at it, nor copy its pages
    ForkServer(control, state).serve()


if __name__ == "__main__":
    main()
