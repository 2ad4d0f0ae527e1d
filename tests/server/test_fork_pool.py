"""Work in children: what it takes too much of is its own fault, and what the machine or a process does is not."""

import asyncio
import operator
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from served import children_of

from graphdecode.errors import ArgumentError
from graphdecode.server.fair_queue import FairSemaphore
from graphdecode.server.fork_pool import MAX_CHILDREN, MAX_WAITING, ForkPool, PoolTimeouts
from graphdecode.server.fork_server import ForkServer
from graphdecode.server.http import HttpError
from graphdecode.server.jobs import Accepted, ChildExited, JobError, JobLimits
from graphdecode.server.messages import MessageSocket

T = TypeVar("T")
LIMITS = JobLimits(cpu_seconds=1, wall_seconds=240.0, memory_bytes=64 << 20)
PATIENT, IMPATIENT = PoolTimeouts(60.0, 60.0), PoolTimeouts(1.0, 3.0)
ENDLESS, ASLEEP = "sum(iter(int, 1))", "__import__('time').sleep(600)"
HANG_SECONDS = 60.0

InLoop = Callable[[Awaitable[T]], T]


@pytest.fixture(scope="module")
def in_loop() -> Iterator[InLoop[Any]]:
    with asyncio.Runner() as runner:

        async def awaited(given: Awaitable[Any]) -> Any:
            return await given

        yield lambda given: runner.run(awaited(given))


def pool(in_loop: InLoop[Any], patience: PoolTimeouts) -> Iterator[ForkPool]:
    """Its functions get Python's `eval`, and what they are told is what a child evaluates."""
    work = ForkPool(lambda: partial(partial, eval), ["graphdecode.errors"], patience)
    assert in_loop(told(work, "6 * 7")) == 42
    yield work
    work.close()


@pytest.fixture(scope="module")
def work(in_loop: InLoop[Any]) -> Iterator[ForkPool]:
    yield from pool(in_loop, PATIENT)


@pytest.fixture(scope="module")
def impatient(in_loop: InLoop[Any]) -> Iterator[ForkPool]:
    yield from pool(in_loop, IMPATIENT)


def told(work: ForkPool, text: str, limits: JobLimits = LIMITS, caller: str = "a") -> Awaitable[Any]:
    return work.run(operator.call, text, limits=limits, caller=caller, size=1)


def server_of(work: ForkPool) -> int:
    assert work.pid is not None
    return work.pid


def test_a_job_beyond_a_limit_fails_with_the_limit(work: ForkPool, in_loop: InLoop[Any], tmp_path: Path) -> None:
    with pytest.raises(JobError, match="1 s"):
        in_loop(told(work, ENDLESS))
    tries = tmp_path / "tries"
    for number, text in enumerate(("bytearray(1 << 30)", "__import__('os').abort()"), 1):
        with pytest.raises(JobError, match="64 MiB"):
            in_loop(told(work, f"(open({str(tries)!r}, 'a').write('.'), {text})"))
        assert tries.read_text() == "." * number  # it is not tried again


def test_what_the_machine_does_is_no_fault_of_the_work(
    work: ForkPool, impatient: ForkPool, in_loop: InLoop[Any]
) -> None:
    killed = "__import__('os').kill(__import__('os').getpid(), 9)"
    short = LIMITS._replace(wall_seconds=0.3)
    for asked, why in (
        (told(impatient, ASLEEP, short), "it did not finish in 0.3 s"),
        (told(work, killed), "its child was killed"),
    ):
        with pytest.raises(HttpError, match=why) as error:
            in_loop(asked)
        assert (error.value.status, error.value.headers) == (503, {"Retry-After": "1"})


def test_answers_that_cannot_be_read_are_an_error_in_words(work: ForkPool, in_loop: InLoop[Any]) -> None:
    broken = "type('B', (), {'__reduce__': lambda self: (int, ('x',))})()"
    with pytest.raises(HttpError, match="cannot be read"):
        in_loop(told(work, broken))
    with pytest.raises(RuntimeError, match="a job failed"):
        in_loop(told(work, "1 / 0"))
    with pytest.raises(RuntimeError, match="a job failed"):
        in_loop(work.run(_Unreadable(), limits=LIMITS, caller="a", size=1))
    raiser = "(_ for _ in ()).throw(__import__('graphdecode.errors').errors.ArgumentError('wrong'))"
    with pytest.raises(ArgumentError, match="wrong"):
        in_loop(told(work, raiser))
    assert in_loop(told(work, "6 * 7")) == 42


class _Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("x",)

    def __call__(self, state: Any) -> None: ...


def test_a_process_that_stands_still_is_started_again(impatient: ForkPool, in_loop: InLoop[Any]) -> None:
    before = server_of(impatient)
    os.kill(before, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(HttpError, match="did not respond") as error:
        in_loop(told(impatient, "1"))
    assert (error.value.status, error.value.headers) == (503, {"Retry-After": "1"})
    assert time.monotonic() - began < HANG_SECONDS < LIMITS.wall_seconds
    assert in_loop(told(impatient, "6 * 7")) == 42
    assert server_of(impatient) != before


def test_children_end_with_the_process_that_forked_them(work: ForkPool, in_loop: InLoop[Any]) -> None:
    async def main() -> list[int]:
        asleep = asyncio.ensure_future(told(work, ASLEEP))
        while not (children := [pid for pid, _ in children_of(server_of(work))]):
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        os.kill(server_of(work), signal.SIGKILL)
        with pytest.raises(HttpError, match="has ended"):
            await asleep
        return children

    for child in in_loop(main()):
        end = time.monotonic() + HANG_SECONDS
        while os.path.exists(f"/proc/{child}"):
            with open(f"/proc/{child}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    break
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_start_that_never_ends_is_given_up(in_loop: InLoop[Any]) -> None:
    slow = ForkPool(lambda: partial(time.sleep, 60), [], PoolTimeouts(start_seconds=0.2))
    with pytest.raises(HttpError, match="has ended"):
        in_loop(told(slow, "1"))
    assert slow.pid is None


def test_a_failed_fork_fails_only_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    handler, woken = signal.getsignal(signal.SIGCHLD), signal.set_wakeup_fd(-1)
    (control, _), (job, asker) = socket.socketpair(), socket.socketpair()
    try:
        server = ForkServer(control, None)
        monkeypatch.setattr(os, "fork", fork)
        assert not server.fork(job)
        messages = []
        while len(messages) < 2:
            messages += MessageSocket(asker).receive(wait=True)
        assert messages == [Accepted(), ChildExited(None)]
        assert job.fileno() == -1
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, handler)


def test_one_caller_alone_cannot_fill_the_queue_for_others(in_loop: InLoop[Any]) -> None:
    async def main() -> None:
        lane, done = FairSemaphore(MAX_CHILDREN, MAX_WAITING), asyncio.Event()

        async def wait(caller: str) -> str:
            async with lane.acquire(caller, 10):
                await done.wait()
                return caller

        greedy = [asyncio.ensure_future(wait("greedy")) for _ in range(MAX_CHILDREN + MAX_WAITING)]
        await asyncio.sleep(0)
        other = asyncio.ensure_future(wait("other"))
        await asyncio.sleep(0.01)
        refused = [task for task in greedy if task.done()]
        assert refused == [greedy[-1]]  # who would have waited longest
        assert isinstance(refused[0].exception(), HttpError)
        for task in greedy[MAX_CHILDREN : MAX_CHILDREN + 100]:
            task.cancel()
        await asyncio.sleep(0)
        more = [asyncio.ensure_future(wait("greedy")) for _ in range(50)]  # those who left take no place
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in [other, *more])
        done.set()
        assert await other == "other"
        assert await asyncio.gather(*more) == ["greedy"] * 50

    in_loop(main())
