"""Clients: streamed requests, and what came of each."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

SILENT_SECONDS = 90.0  # without a byte
ANSWERED, TOLD, REFUSED, CUT, SILENT = "answered", "told of an error", "refused", "cut", "silent"


@dataclass
class Stream:
    """What came of one streamed request; times are of `time.monotonic`."""

    text: str = ""
    replica: str = ""
    began: float | None = None
    ended: float = 0.0
    outcome: str = CUT
    why: str = ""
    gaps: list[float] = field(default_factory=list)


async def ask(http: httpx.AsyncClient, model: str, body: dict[str, Any]) -> Stream:
    """Ask for a stream, and follow it to its end, whatever that is."""
    stream, last, is_whole = Stream(), time.monotonic(), False
    try:
        async with http.stream("POST", "/v1/completions", json=body | {"model": model, "stream": True}) as response:
            stream.replica = response.headers.get("x-graphdecode-replica", "")
            if response.status_code != 200:
                stream.outcome, stream.why = REFUSED, (await response.aread()).decode()[:200]
            async for line in response.aiter_lines():
                now = time.monotonic()
                if line == "data: [DONE]":
                    stream.outcome = TOLD if stream.why else ANSWERED if is_whole else CUT
                elif line.startswith("data: "):
                    told = json.loads(line.removeprefix("data: "))
                    stream.why = told.get("error", {}).get("message", "")
                    if not stream.why:
                        stream.began = stream.began or now
                        stream.text += told["choices"][0]["text"]
                        is_whole = told["choices"][0]["finish_reason"] is not None
                    stream.gaps.append(now - last)
                    last = now
    except httpx.TimeoutException:
        stream.outcome = SILENT
    except httpx.HTTPError as error:
        stream.outcome, stream.why = CUT, f"{type(error).__name__}: {error}"
    stream.ended = time.monotonic()
    return stream


def client_of(address: str) -> httpx.AsyncClient:
    """Return what asks a server, in a loop that is yet to run."""
    timeout = httpx.Timeout(10.0, read=SILENT_SECONDS)
    return httpx.AsyncClient(base_url=address, timeout=timeout, limits=httpx.Limits(max_connections=None))


async def ask_all(address: str, model: str, bodies: Iterable[dict[str, Any]]) -> list[Stream]:
    """Ask for all at once."""
    async with client_of(address) as http:
        return list(await asyncio.gather(*(ask(http, model, body) for body in bodies)))


def outcomes(streams: Iterable[Stream]) -> dict[str, int]:
    """Return how many streams came to which end."""
    return dict(Counter(stream.outcome for stream in streams))


def by_replica(streams: Iterable[Stream]) -> list[int]:
    """Return how many streams each replica had, the most first."""
    return sorted(Counter(stream.replica for stream in streams if stream.replica).values(), reverse=True)


def longest_gap(streams: Sequence[Stream]) -> float:
    """Return the seconds that a stream was silent at most, before its first event too."""
    return max(max(stream.gaps, default=0.0) for stream in streams)


def requests_of(count: int, seed: int, tokens: int) -> list[dict[str, Any]]:
    """Return seeded requests whose answers have their full length."""
    draw = random.Random(seed)
    return [
        {
            "prompt": "sort " + "".join(draw.choices("abcdefghij", k=12)) + "=",
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": number,
            "ignore_eos": True,
        }
        for number in range(count)
    ]
