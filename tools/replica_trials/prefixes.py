"""What routing by prefixes finds in the caches, beside routing by chance."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from replica_trials.server import served
from replica_trials.streams import ANSWERED, ask_all, by_replica, outcomes

SMALL_CACHE = "[capacity]\ntotal_num_pages = 400\nmax_sequence_length = 512\n"  # all beginnings together need more
AT_A_TIME = 8


def prefixes(model: str, groups: int = 24, asked: int = 6) -> dict[str, Any]:
    """Ask for many prompts of few beginnings, under each routing: what share of the prompts' tokens was cached?"""
    draw = random.Random(4)
    beginnings = ["".join(draw.choices("abcdefghijklmnop ", k=300)) for _ in range(groups)]
    bodies = [
        {"prompt": f"{beginning} {number}=", "max_tokens": 4, "temperature": 0}
        for number in range(asked)
        for beginning in beginnings
    ]
    draw.shuffle(bodies)
    found: dict[str, Any] = {"prompts": len(bodies), "beginnings": groups}
    for routing in ("random", "prefix"):
        settings = SMALL_CACHE + f'[replicas]\nrouting = "{routing}"\n'
        with served(model, "--replicas", "2", settings=settings) as server:
            server.until_replicas(2)
            began, streams = time.monotonic(), []
            for start in range(0, len(bodies), AT_A_TIME):
                streams += asyncio.run(ask_all(server.address, model, bodies[start : start + AT_A_TIME]))
            seconds = time.monotonic() - began
            hits, queries = (server.counts(f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
        if set(outcomes(streams)) != {ANSWERED}:
            raise RuntimeError(str(outcomes(streams)))
        found[routing] = {
            "hit_rate": sum(hits.values()) / sum(queries.values()),
            "by_replica": by_replica(streams),
            "seconds": seconds,
        }
    return found
