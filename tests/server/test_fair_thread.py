"""The thread that prepares requests: the event loop goes on, and callers are served in a fair order."""

import asyncio
import threading
from functools import partial

import pytest

from graphdecode.server.fair_queue import FairThread
from graphdecode.server.http import HttpError


def test_the_event_loop_goes_on_while_a_call_runs() -> None:
    async def main() -> bool:
        thread, released = FairThread(8), threading.Event()
        waiting = asyncio.create_task(thread.run(lambda: released.wait(60), caller="a", size=1))
        await asyncio.sleep(0.01)
        released.set()  # never, if the call kept the loop
        return await waiting

    assert asyncio.run(main())


def test_a_caller_of_one_request_does_not_wait_for_all_of_a_caller_of_many() -> None:
    order: list[str] = []

    async def main() -> None:
        thread, calls = FairThread(64), list[asyncio.Task[None]]()
        for caller in [*["greedy"] * 8, "modest"]:
            calls.append(asyncio.create_task(thread.run(partial(order.append, caller), caller=caller, size=100)))
        await asyncio.gather(*calls)

    asyncio.run(main())
    assert sorted(order) == [*["greedy"] * 8, "modest"]
    assert order.index("modest") < 3


def test_what_a_call_raises_is_raised_and_the_next_one_is_made() -> None:
    async def main() -> int:
        thread = FairThread(8)
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0, caller="a", size=1)
        return await thread.run(lambda: 3, caller="a", size=1)

    assert asyncio.run(main()) == 3


def test_a_full_queue_refuses_and_a_cancelled_waiter_leaves_it() -> None:
    async def main() -> list[object]:
        thread, released = FairThread(1), threading.Event()
        running = asyncio.create_task(thread.run(lambda: released.wait(60), caller="a", size=1))
        await asyncio.sleep(0.01)
        left = asyncio.create_task(thread.run(lambda: 1, caller="b", size=1))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        waits = asyncio.create_task(thread.run(lambda: 2, caller="c", size=1))
        beyond = asyncio.create_task(thread.run(lambda: 3, caller="c", size=1))
        await asyncio.sleep(0)
        released.set()
        return await asyncio.gather(running, left, waits, beyond, return_exceptions=True)

    ran, left, waited, refused = asyncio.run(main())
    assert (ran, waited) == (True, 2)
    assert isinstance(left, asyncio.CancelledError)
    assert isinstance(refused, HttpError)
    assert refused.status == 429
