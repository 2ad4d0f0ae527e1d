"""How fast tokens come through Ray and past it, and from a replica whose tensors are split."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from typing import Any

from replica_trials.server import GENERATED, Server, command_of, processes_of, served
from replica_trials.streams import Stream, ask_all, by_replica, longest_gap, outcomes, requests_of

STREAMS = 32


def speed(model: str, tokens: int, *options: str) -> dict[str, Any]:
    """Ask for 32 streams at once: how many tokens come per second, and how long does the first one take?"""
    with served(model, "--replicas", "2", *options) as server:
        server.until_replicas(2)
        asyncio.run(ask_all(server.address, model, requests_of(8, 6, tokens)))
        began = time.monotonic()
        streams = asyncio.run(ask_all(server.address, model, requests_of(STREAMS, 5, tokens)))
        seconds = time.monotonic() - began
    first = [stream.began - began for stream in streams if stream.began is not None]
    return {
        "outcomes": outcomes(streams),
        "by_replica": by_replica(streams),
        "tokens_per_second": len(streams) * tokens / seconds,
        "first_token_ms": 1e3 * statistics.median(first),
        "longest_gap_s": longest_gap(streams),
    }


def split(model: str, tokens: int) -> dict[str, Any]:
    """Serve one replica of two ranks: the same answers as from one rank; a rank is killed, and it serves again."""
    bodies = [body | {"temperature": 0.0} for body in requests_of(STREAMS, 5, tokens)]
    with served(model, "--replicas", "1") as whole:
        expected = asyncio.run(ask_all(whole.address, model, bodies))
    with served(model, "--replicas", "1", "--tensor-parallel", "2") as server:
        streams = asyncio.run(ask_all(server.address, model, bodies))
        began = time.monotonic()
        lost = asyncio.run(_rank_killed(server, bodies))
        while set(outcomes(after := asyncio.run(ask_all(server.address, model, bodies)))) != {"answered"}:
            time.sleep(0.5)
        again = time.monotonic() - began
    return {
        "outcomes": outcomes(streams),
        "same_text_as_one_rank": [sum(a.text == b.text for a, b in zip(streams, expected, strict=True)), len(expected)],
        "outcomes_when_a_rank_was_killed": outcomes(lost),
        "told": sorted({stream.why for stream in lost if stream.why}),
        "outcomes_after": outcomes(after),
        "serves_again_after_s": again,
    }


async def _rank_killed(server: Server, bodies: list[dict[str, Any]]) -> list[Stream]:
    """Kill the rank that is not the first while some streams run."""
    asking = asyncio.create_task(ask_all(server.address, server.model, bodies))
    while not any((await asyncio.to_thread(server.counts, GENERATED)).values()):
        await asyncio.sleep(0.05)
    for pid in processes_of(server.folder):
        if "graphdecode.engine.rank_process" in command_of(pid):
            os.kill(pid, signal.SIGKILL)
    return await asking
