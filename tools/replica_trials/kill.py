"""One of two replicas is killed under load."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from typing import Any

from replica_trials.server import GENERATED, ROWS, START_SECONDS, Server, replicas_of, served
from replica_trials.streams import (
    ANSWERED,
    Stream,
    ask,
    ask_all,
    by_replica,
    client_of,
    longest_gap,
    outcomes,
    requests_of,
)

STREAMS = 200


def kill_under_load(model: str, tokens: int, *options: str) -> dict[str, Any]:
    """Kill one of two replicas while 200 streams run; the other one answers what had not begun."""
    with served(model, "--replicas", "2", *options) as server:
        server.until_replicas(2)
        streams, killed, again = asyncio.run(_storm(server, tokens))
        calm = asyncio.run(ask_all(server.address, model, requests_of(STREAMS, 1, tokens)))
    later = [stream for stream in streams if stream.ended > killed]
    pairs = [
        (one.text, other.text)
        for one, other in zip(streams, calm, strict=True)
        if one.outcome == other.outcome == ANSWERED
    ]
    return {
        "streams": len(streams),
        "outcomes": outcomes(streams),
        "open_when_killed": len(later),
        "outcomes_without_a_token": outcomes(stream for stream in streams if stream.began is None),
        "outcomes_behind_a_token": outcomes(stream for stream in later if stream.began is not None),
        "told": sorted({stream.why for stream in streams if stream.why}),
        "longest_gap_s": longest_gap(streams),
        "two_again_after_s": again,
        "outcomes_after": outcomes(calm),
        "by_replica_after": by_replica(calm),
        "same_text_as_after": [sum(one == other for one, other in pairs), len(pairs)],
    }


async def _storm(server: Server, tokens: int) -> tuple[list[Stream], float, float]:
    """Return the streams, when the replica was killed, and how long it took until there were two again."""
    async with client_of(server.address) as http:
        bodies = requests_of(STREAMS, 1, tokens)
        tasks = [asyncio.create_task(ask(http, server.model, body)) for body in bodies]
        end = time.monotonic() + START_SECONDS
        while sum((await asyncio.to_thread(server.counts, GENERATED)).values()) < ROWS * tokens // 4:
            if time.monotonic() > end or all(task.done() for task in tasks):
                raise RuntimeError(str(Counter(task.result().why for task in tasks if task.done())))
            await asyncio.sleep(0.2)
        os.kill(random.Random(2).choice(replicas_of(server.folder)), signal.SIGKILL)
        killed = time.monotonic()
        again = asyncio.create_task(asyncio.to_thread(_two_again, server))
        return await asyncio.gather(*tasks), killed, await again


def _two_again(server: Server) -> float:
    """Wait until the killed replica is gone from the counts, and then until there are two."""
    return server.until_replicas(1) + server.until_replicas(2)
