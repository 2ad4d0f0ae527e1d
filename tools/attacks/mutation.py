"""Seeded mutations: of bytes, of JSON, of words."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

from graphdecode.errors import shown

HOSTILE_VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, -(2**31), 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 10**9, 10**30, 10**400,
    0.0, -0.0, 0.5, 1.5, 1e-320, 1e30, 1e308, -1e308, math.inf, -math.inf, math.nan, "", "0", "no", "true", "auto",
    "a" * 5000, "\x00", "\ud800", "\x1b[2J", "../x", "/dev/zero", "日本", [], [0], [-1], [[]], [None], ["a"],
    list(range(300)),    {}, {"a": 1}, {"a": {"b": []}}, {"": None},
]  # fmt: skip


def hostile_value(rng: random.Random) -> Any:
    """Return a value that readers do not expect."""
    if rng.random() < 0.05:
        nested: Any = 0
        for _ in range(rng.choice([5, 20, 90])):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return nested
    return copy.deepcopy(rng.choice(HOSTILE_VALUES))


def mutated_json(rng: random.Random, content: Any) -> bytes:
    """Return the text of some JSON with one to three faults in it."""
    content = copy.deepcopy(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        content = _with_fault(rng, content)
    text = json.dumps(content).encode()
    return mutated_bytes(rng, text) if rng.random() < 0.15 else text


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with one to four faults: changed, cut, duplicated or inserted ones."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            del changed[at : at + rng.randrange(1, 40)]
        elif kind == 3:
            changed[at:at] = changed[at : at + rng.randrange(1, 200)]
        elif kind == 4:
            changed[at:at] = rng.randbytes(rng.randrange(1, 16))
        else:
            changed[at:at] = rng.choice(
                [b"\x00", b"[" * 3000, b'{"":' * 3000, b"9" * 5000, b"1e999", b"NaN", b"\xff\xfe"]
            )
    return bytes(changed)


def _with_fault(rng: random.Random, content: Any) -> Any:
    places = list(_places(content)) if isinstance(content, (dict, list)) else []
    if not places or rng.random() < 0.02:
        return hostile_value(rng)
    holder, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind < 3:
        holder[key] = hostile_value(rng)
    elif kind == 3:
        del holder[key]
    elif kind == 4:
        _add(holder, rng.choice(["", "auto_map", "a" * 300, "\ud800", "type"]), hostile_value(rng))
    elif kind == 5:
        other, place = rng.choice(places)
        if holder is not other or key != place:
            try:
                holder[key] = copy.deepcopy(other[place])
            except (LookupError, RecursionError):
                holder[key] = None
    else:
        holder[key] = _near(rng, holder[key])
    return content


def _near(rng: random.Random, value: Any) -> Any:
    """Return a value of the same type that differs a little or a lot."""
    if isinstance(value, bool):
        return rng.choice([not value, int(value), str(value)])
    if isinstance(value, (int, float)):
        return rng.choice([value + 1, value - 1, -value, value * 2, value // 2, value * 10**6, -0.5, shown(value)])
    if isinstance(value, str):
        return rng.choice([value + "a", value[:-1], value.upper(), [value], value * 50, value[::-1]])
    if isinstance(value, list):
        return rng.choice([value * 2, value[:-1], value[::-1], dict.fromkeys(map(str, range(3)), value)])
    return [value]


def _add(holder: Any, key: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[key] = value
    else:
        holder.append(value)


def _places(content: Any) -> Any:
    """Yield (container, key) of all values; only the first few of long lists."""
    pending = [content]
    while pending:
        holder = pending.pop()
        keys = list(holder)[:400] if isinstance(holder, dict) else range(min(len(holder), 40))
        for key in keys:
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                pending.append(holder[key])
