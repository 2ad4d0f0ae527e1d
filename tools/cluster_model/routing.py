"""Who gets a request in the simulation; the policies that the server has are the server's own code."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from graphdecode.server.replicas.routing import PrefixIndex, choose

Policy = Callable[[Mapping[int, int], int], int]


def policies(prefixes: PrefixIndex[int], slack: int, seed: int) -> dict[str, Policy]:
    """Return ways to choose a replica, by the loads of all and the prefix of a prompt.

    Args:
        prefixes: what each replica has in its cache.
        slack: of the policy `prefix`; see `choose`.
        seed: of chance.
    """
    draw = random.Random(seed)
    turn = 0

    def in_turn(loads: Mapping[int, int], prefix: int) -> int:
        nonlocal turn
        turn += 1
        names = list(loads)
        return names[turn % len(names)]

    return {
        "random": lambda loads, prefix: draw.choice(list(loads)),
        "round robin": in_turn,
        "least loaded": lambda loads, prefix: choose(loads, {}, 0, draw),
        "prefix": lambda loads, prefix: choose(loads, prefixes.matched([prefix]), slack, draw),
    }
