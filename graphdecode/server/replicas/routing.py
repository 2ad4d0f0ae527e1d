"""Routing of requests: the least loaded replica, preferring one that has the prompt's prefix.

Nothing here knows Ray.
"""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar

R = TypeVar("R", bound=Hashable)

BLOCK_CHARACTERS = 32  # a replica caches whole pages, commonly 16 tokens of 1..4 characters
MAX_BLOCKS = 256  # per prompt
MAX_CACHED_BLOCKS = 1 << 16  # per replica: 2 million characters, about the size of its cache


class RoutedPrefixes(Generic[R]):
    """Prefixes of prompts that each replica was sent; the oldest are evicted, as in its cache."""

    def __init__(self, max_blocks: int = MAX_CACHED_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, set[R]] = {}
        self._blocks: dict[R, OrderedDict[int, None]] = {}  # the latest are last

    def matched(self, blocks: Sequence[int]) -> dict[R, int]:
        """Return the number of a prompt's leading blocks that each replica has; replicas without any are left out."""
        depths: dict[R, int] = {}
        holding = self._holders.get(blocks[0], set()) if blocks else set()
        for depth in range(1, len(blocks) + 1):
            further = holding & self._holders.get(blocks[depth], set()) if depth < len(blocks) else set()
            depths.update(dict.fromkeys(holding - further, depth))
            if not further:
                break
            holding = further
        return depths

    def add(self, replica: R, blocks: Sequence[int]) -> None:
        """Record that a replica computes a prompt."""
        cached = self._blocks.setdefault(replica, OrderedDict())
        for block in reversed(blocks):  # so that the end of a prompt is evicted before its beginning
            cached[block] = None
            cached.move_to_end(block)
            self._holders.setdefault(block, set()).add(replica)
        while len(cached) > self._max_blocks:
            self._drop(replica, cached.popitem(last=False)[0])

    def keep_only(self, replicas: Sequence[R]) -> None:
        """Forget all other replicas, which have ended."""
        for replica in self._blocks.keys() - set(replicas):
            for block in self._blocks.pop(replica):
                self._drop(replica, block)

    def _drop(self, replica: R, block: int) -> None:
        holders = self._holders[block]
        holders.discard(replica)
        if not holders:
            del self._holders[block]


class RequestsInFlight(Generic[R]):
    """This front's requests in flight at each replica.

    A replica reports its total, of all fronts, when it accepts a request; but Ray drops that after ten seconds, and
    reports that arrive out of order are stale.
    """

    def __init__(self) -> None:
        self._counts: Counter[R] = Counter()
        self._chosen: dict[Hashable, R] = {}

    def chosen(self, request: Hashable, replica: R) -> None:
        """Count a request once its replica is chosen, so that simultaneous ones spread; the last choice counts."""
        self.settled(request)
        self._chosen[request] = replica
        self.sent(replica)

    def settled(self, request: Hashable) -> None:
        """Stop counting a choice: its request was sent or cancelled."""
        if request in self._chosen:
            self.ended(self._chosen.pop(request))

    def sent(self, replica: R) -> None:
        """Count a request until it has `ended`."""
        self._counts[replica] += 1

    def ended(self, replica: R) -> None:
        """Stop counting a request."""
        self._counts[replica] -= 1
        if self._counts[replica] <= 0:
            del self._counts[replica]

    def load(self, replica: R, reported: int | None) -> int:
        """Return the requests in flight at a replica; `reported`: its own total, if known."""
        return max(reported or 0, self._counts[replica])


def choose(loads: Mapping[R, int], matched: Mapping[R, int], slack: int, draw: random.Random) -> R:
    """Return the replica for a request.

    `loads` are requests in flight by replica, `matched` the blocks of the prompt that a replica has, and `slack` the
    requests by which a replica may be ahead of the least loaded one.
    """
    limit = min(loads.values()) + slack
    best = max((matched.get(each, 0), -load) for each, load in loads.items() if load <= limit)
    return draw.choice([each for each, load in loads.items() if (matched.get(each, 0), -load) == best])


def prompt_blocks(body: Any) -> list[int]:
    """Return hashes of the prefix blocks of a request's prompt, each of all characters up to its end.

    Prompts with the same beginning share their first blocks; tokenizer and chat template are not applied.
    """
    body = body if isinstance(body, dict) else {"prompt": ""}
    if "messages" in body or "input" in body:  # tools stand before the messages in most chat templates
        named = ("tools", "instructions", "messages", "input")
        text = json.dumps([body[name] for name in named if body.get(name)], ensure_ascii=False)
    else:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]  # the others mostly begin alike
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    blocks, digest = [], b""
    for end in range(BLOCK_CHARACTERS, min(len(text), MAX_BLOCKS * BLOCK_CHARACTERS) + 1, BLOCK_CHARACTERS):
        piece = text[end - BLOCK_CHARACTERS : end].encode("utf-8", "surrogatepass")
        digest = blake2b(digest + piece, digest_size=8).digest()
        blocks.append(int.from_bytes(digest))
    return blocks
