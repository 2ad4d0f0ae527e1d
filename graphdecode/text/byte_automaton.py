"""From a pattern to an automaton over the bytes of its texts in UTF-8: Thompson's construction (1968), then subsets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graphdecode.text.regex_pattern import Chain, Characters, Either, Pattern, Ranges, Repeat, UnknownPatternError

_MOST_NODES, _MOST_WORK = 50_000, 2_000_000
# characters of as many bytes; between the two of three lie the halves of surrogate pairs, which are none
_LENGTHS = ((0, 0x7F, 1), (0x80, 0x7FF, 2), (0x800, 0xD7FF, 3), (0xE000, 0xFFFF, 3), (0x10000, 0x10FFFF, 4))


def byte_automaton(pattern: Pattern, most_states: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the states over bytes of a pattern; the first one is the beginning.

    Args:
        pattern: what the whole text matches.
        most_states: that there may be.

    Returns:
        int32 [states, 256], the state that a byte leads to, -1 for none; and bool [states], where the text may end.

    Raises:
        UnknownPatternError: there are more states.
    """
    nodes = _Nodes()
    begin, end = nodes.new(), nodes.new()
    nodes.add(pattern, begin, end)
    first = nodes.closure([begin])
    numbers, waiting, following = {first: 0}, [first], []
    while waiting:
        line = np.full(256, -1, dtype=np.int32)
        for byte, targets in nodes.steps(waiting.pop(0)):
            if targets not in numbers:
                if len(numbers) == most_states:
                    raise UnknownPatternError(f"more than {most_states} states")
                numbers[targets] = len(numbers)
                waiting.append(targets)
            line[byte] = numbers[targets]
        following.append(line)
    return np.array(following), np.array([end in state for state in numbers])


class _Nodes:
    """An automaton with choices: steps by a range of bytes, and steps by nothing."""

    def __init__(self) -> None:
        self._free: list[list[int]] = []
        self._by_byte: list[list[tuple[int, int, int]]] = []
        self._work = 0  # bytes and nodes that were looked at

    def new(self) -> int:
        if len(self._free) == _MOST_NODES:
            raise UnknownPatternError(f"more than {_MOST_NODES} nodes")
        self._free.append([])
        self._by_byte.append([])
        return len(self._free) - 1

    def add(self, pattern: Pattern, begin: int, end: int) -> None:
        """Let a pattern lead from one node to another."""
        if isinstance(pattern, Characters):
            for sequence in utf8_ranges(pattern.ranges):
                at = begin
                for low, high in sequence[:-1]:
                    following = self.new()
                    self._by_byte[at].append((low, high, following))
                    at = following
                self._by_byte[at].append((*sequence[-1], end))
        elif isinstance(pattern, Either):
            for part in pattern.parts:
                self._free[begin].append(inner := self.new())
                self.add(part, inner, end)
        elif isinstance(pattern, Chain):
            at = begin
            for part in pattern.parts:
                self.add(part, at, following := self.new())
                at = following
            self._free[at].append(end)
        else:
            self._repeat(pattern, begin, end)

    def _repeat(self, pattern: Repeat, begin: int, end: int) -> None:
        at = begin
        for _ in range(pattern.least):
            self.add(pattern.part, at, following := self.new())
            at = following
        if pattern.most is None:
            self._free[at].append(loop := self.new())
            self.add(pattern.part, loop, loop)
            at = loop
        for _ in range((pattern.most or pattern.least) - pattern.least):
            self._free[at].append(end)
            self.add(pattern.part, at, following := self.new())
            at = following
        self._free[at].append(end)

    def closure(self, nodes: list[int]) -> frozenset[int]:
        """Return what is reached from some nodes by nothing."""
        found, waiting = set(nodes), list(nodes)
        while waiting:
            for node in self._free[waiting.pop()]:
                if node not in found:
                    found.add(node)
                    waiting.append(node)
        return frozenset(node for node in found if self._by_byte[node] or not self._free[node])

    def steps(self, state: frozenset[int]) -> Iterator[tuple[int, frozenset[int]]]:
        """Yield bytes, and what each of them leads to from any of some nodes."""
        targets: list[list[int]] = [[] for _ in range(256)]
        for node in state:
            for low, high, target in self._by_byte[node]:
                self._work += high - low + 1
                for byte in range(low, high + 1):
                    targets[byte].append(target)
        if self._work > _MOST_WORK:
            raise UnknownPatternError("too much work")
        closures: dict[frozenset[int], frozenset[int]] = {}
        for byte, led_to in enumerate(map(frozenset, targets)):
            if led_to:
                if led_to not in closures:
                    closures[led_to] = self.closure(list(led_to))
                    self._work += len(closures[led_to])
                yield byte, closures[led_to]


def utf8_ranges(ranges: Ranges) -> Iterator[list[tuple[int, int]]]:
    """Yield sequences of ranges of bytes that together are the characters of some ranges, without surrogates."""
    for low, high in ranges:
        for first, last, length in _LENGTHS:
            begin, end = max(low, first), min(high, last)
            if begin <= end:
                yield from _split(begin, end, length)


def _split(low: int, high: int, length: int) -> Iterator[list[tuple[int, int]]]:
    """Split a range of characters of one length where their last bytes do not run from the first to the last one."""
    for trailing in range(1, length):
        block = (1 << 6 * trailing) - 1
        if low & ~block == high & ~block:
            continue
        if low & block:
            yield from _split(low, low | block, length)
            yield from _split((low | block) + 1, high, length)
            return
        if high & block != block:
            yield from _split(low, (high & ~block) - 1, length)
            yield from _split(high & ~block, high, length)
            return
    yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))
