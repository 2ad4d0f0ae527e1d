"""Fuzzing of two replicas behind one front; one of them is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import httpx2 as httpx
from mutated_requests import greedy_request, mutated_request

from attacks.http import asked
from checks.replicas import Server, replicas_of, served

_AT_A_TIME = 4
_SHARE_BEFORE = 0.4  # of the time, before a replica is killed
_ANSWERS = {"12+30=": "42", "417+385=": "802", "rev oceanic=": "cinaeco"}


class ReplicasOutcome(NamedTuple):
    """The result of an attack.

    Attributes:
        statuses: count of each.
        failures: wrong responses.
        right: correct outputs.
        lost: requests that failed because a replica was killed.
        two_again_s: seconds until two replicas served again.
        replaced: whether another replica has replaced the killed one.
    """

    statuses: Counter[str]
    failures: list[str]
    right: int
    lost: int
    two_again_s: float
    replaced: bool


def attacked_replicas(minutes: float, first: int, report: Callable[[str], object]) -> ReplicasOutcome:
    """Attack two replicas of the demo model, and kill the process of one while it answers.

    Args:
        minutes: for how long.
        first: seed of the first request.
        report: called with each failure.
    """
    with served("demo", replicas=2) as server:
        first_two = set(replicas_of(server.folder))
        statuses, failures, answers = asyncio.run(_attack(server, minutes, first, report))
        again = server.until_replicas(2)
        now = set(replicas_of(server.folder))
        replaced = len(now) == len(first_two) and len(now - first_two) == 1
    return ReplicasOutcome(statuses, failures, answers["right"], answers["lost"], again, replaced)


async def _attack(
    server: Server, minutes: float, first: int, report: Callable[[str], object]
) -> tuple[Counter[str], list[str], Counter[str]]:
    statuses, answers, failures = Counter[str](), Counter[str](), list[str]()
    began, seconds, seeds = time.monotonic(), 60 * minutes, iter(range(first, 2 * 10**9))

    def fail(what: str) -> None:
        failures.append(what)
        report(what)

    async def hostile(http: httpx.AsyncClient) -> None:
        while time.monotonic() < began + seconds:
            seed = next(seeds)
            status, wrong = await asked(http, greedy_request(seed) if seed % 2 else mutated_request(seed), 200)
            statuses[str(status)] += 1
            if wrong is not None and not (_is_lost(wrong) and time.monotonic() > began + _SHARE_BEFORE * seconds):
                fail(f"{'greedy' if seed % 2 else 'mutated'} {seed}: {wrong}")

    async def questions(http: httpx.AsyncClient) -> None:
        draw = random.Random(first)
        while time.monotonic() < began + seconds:
            prompt = draw.choice(sorted(_ANSWERS))
            body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
            try:
                answer = await http.post("/v1/completions", json=body, timeout=200)
            except httpx.HTTPError as error:
                told_lost = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == 200:
                    text = answer.json()["choices"][0]["text"].strip()
                    answers["right"] += text == _ANSWERS[prompt]
                    if text != _ANSWERS[prompt]:
                        fail(f"{prompt!r} is {text!r}")
                    continue
                told_lost = answer.text[:300]
            answers["lost"] += 1
            if time.monotonic() < began + _SHARE_BEFORE * seconds and "queue_full" not in told_lost:
                fail(f"{prompt!r} before one was killed: {told_lost}")
            await asyncio.sleep(0.1)

    async def kill() -> None:
        await asyncio.sleep(_SHARE_BEFORE * seconds)
        os.kill(replicas_of(server.folder)[0], signal.SIGKILL)

    async with httpx.AsyncClient(base_url=server.address) as http:
        await asyncio.gather(kill(), questions(http), *(hostile(http) for _ in range(_AT_A_TIME)))
    return statuses, failures, answers


def _is_lost(wrong: str) -> bool:
    """Return whether a response was lost with its replica."""
    return "replica" in wrong or "RemoteProtocolError" in wrong or "ReadError" in wrong
