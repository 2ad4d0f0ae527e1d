"""Plain regular expressions, compiled to automata over UTF-8 bytes.

Python's own parser reads them. Characters, classes, groups, alternatives and repeats are supported; everything else is
left to llguidance. The automaton is Thompson's construction (1968), followed by the subset construction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from re import _parser  # type: ignore[attr-defined]
from typing import Any, TypeAlias

import numpy as np

from graphdecode.errors import GraphdecodeError

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # ranges of code points, both ends included, ascending

_LAST, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
_NEWLINE: Ranges = ((10, 10),)
_SET_OPERATION = re.compile(r"\[\[|&&|--|~~|\|\|")
_MOST_REPEATS = 1000
_MOST_NODES, _MOST_WORK = 50_000, 2_000_000
# code points by their number of bytes, without surrogates
_LENGTHS = ((0, 0x7F, 1), (0x80, 0x7FF, 2), (0x800, 0xD7FF, 3), (0xE000, 0xFFFF, 3), (0x10000, 0x10FFFF, 4))


class UnknownPatternError(GraphdecodeError):
    """A regular expression that is not supported here."""


def complement(ranges: Ranges) -> Ranges:
    """Return all other characters, without surrogates."""
    gaps, first = [], 0
    for low, high in merged((*ranges, _SURROGATES)):
        if first < low:
            gaps.append((first, low - 1))
        first = high + 1
    return (*gaps, (first, _LAST)) if first <= _LAST else tuple(gaps)


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the same characters in ascending ranges that do not touch."""
    disjoint: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if disjoint and low <= disjoint[-1][1] + 1:
            disjoint[-1] = disjoint[-1][0], max(high, disjoint[-1][1])
        else:
            disjoint.append((low, high))
    return tuple(disjoint)


def byte_automaton(text: str, class_of: Callable[[str], Ranges], most_states: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the deterministic automaton of a regular expression that matches whole texts; state 0 is the initial one.

    It is int32 [states, 256], the next state by byte, -1 for none; and bool [states], whether the text may end.
    `class_of` returns the characters of `d`, `w` and `s`. Raises `UnknownPatternError` if the expression is not
    supported, or there are more states.
    """
    if _SET_OPERATION.search(text):  # Python would warn of these
        raise UnknownPatternError("an operation on classes")
    try:
        parsed = _parser.parse(text)
    except (re.error, OverflowError) as error:
        raise UnknownPatternError(str(error)) from error
    if parsed.state.flags != re.UNICODE:
        raise UnknownPatternError("flags")
    nodes = _Nodes(class_of)
    end = nodes.new()
    first = nodes.closure([nodes.sequence(parsed, end)])
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
    """A nondeterministic automaton with transitions by byte ranges, and free ones."""

    def __init__(self, class_of: Callable[[str], Ranges]) -> None:
        self._class_of = class_of
        self._free: list[list[int]] = []
        self._edges: list[Sequence[tuple[int, int, int]]] = []  # first and last byte, and the target
        self._work = 0  # bytes and nodes visited

    def new(self, *, free: Sequence[int] = (), edges: Sequence[tuple[int, int, int]] = ()) -> int:
        if len(self._free) == _MOST_NODES:
            raise UnknownPatternError(f"more than {_MOST_NODES} nodes")
        self._free.append(list(free))
        self._edges.append(edges)
        return len(self._free) - 1

    def sequence(self, parsed: Iterable[tuple[Any, Any]], end: int) -> int:
        """Add the parts of Python's syntax tree before a node; return the first node."""
        for operator, argument in reversed(list(parsed)):
            end = self._part(str(operator), argument, end)
        return end

    def _part(self, operator: str, argument: Any, end: int) -> int:
        match operator:
            case "LITERAL":
                return self._characters(((argument, argument),), end)
            case "NOT_LITERAL":
                return self._characters(complement(((argument, argument),)), end)
            case "ANY":
                return self._characters(complement(_NEWLINE), end)
            case "IN":
                return self._characters(self._class(argument), end)
            case "BRANCH":
                return self.new(free=[self.sequence(each, end) for each in argument[1]])
            case "SUBPATTERN" if not any(argument[1:3]):  # no flags
                return self.sequence(argument[3], end)
            case "MAX_REPEAT" | "MIN_REPEAT" if argument[0] <= _MOST_REPEATS:
                least, most, inside = argument
                if most is _parser.MAXREPEAT or most <= _MOST_REPEATS:
                    return self._repeat(inside, least, None if most is _parser.MAXREPEAT else most, end)
        raise UnknownPatternError(f"{operator} is not supported, or repeats too often")

    def _class(self, parsed: Sequence[tuple[Any, Any]]) -> Ranges:
        characters: list[tuple[int, int]] = []
        is_negated = str(parsed[0][0]) == "NEGATE"
        for operator, argument in parsed[is_negated:]:
            if isinstance(argument, tuple):
                characters.append(argument)
            elif str(operator) == "LITERAL":
                characters.append((argument, argument))
            else:  # such as CATEGORY_NOT_SPACE
                *_, opposite, name = str(argument).split("_")
                ranges = self._class_of(name[0].lower())
                characters += complement(ranges) if opposite == "NOT" else ranges
        return complement(merged(characters)) if is_negated else merged(characters)

    def _characters(self, ranges: Ranges, end: int) -> int:
        edges = []
        for first, *others in _utf8_ranges(ranges):
            node = end
            for low, high in reversed(others):
                node = self.new(edges=[(low, high, node)])
            edges.append((*first, node))
        return self.new(edges=edges)

    def _repeat(self, inside: Any, least: int, most: int | None, end: int) -> int:
        node = end
        if most is None:
            node = self.new(free=[end])
            self._free[node].append(self.sequence(inside, node))
        for _ in range((most or least) - least):
            node = self.new(free=[self.sequence(inside, node), end])
        for _ in range(least):
            node = self.sequence(inside, node)
        return node

    def closure(self, nodes: Iterable[int]) -> frozenset[int]:
        """Return the nodes that free transitions reach."""
        reached = set(nodes)
        waiting = list(reached)
        while waiting:
            new = [node for node in self._free[waiting.pop()] if node not in reached]
            reached.update(new)
            waiting += new
        return frozenset(node for node in reached if self._edges[node] or not self._free[node])

    def steps(self, state: frozenset[int]) -> Iterator[tuple[int, frozenset[int]]]:
        """Yield bytes, and the nodes that each leads to."""
        targets: list[list[int]] = [[] for _ in range(256)]
        for node in state:
            for low, high, target in self._edges[node]:
                self._work += high - low + 1
                for byte in range(low, high + 1):
                    targets[byte].append(target)
        if self._work > _MOST_WORK:
            raise UnknownPatternError("too much work")
        closures: dict[frozenset[int], frozenset[int]] = {}
        for byte, nodes in enumerate(map(frozenset, targets)):
            if nodes:
                if nodes not in closures:
                    closures[nodes] = self.closure(nodes)
                    self._work += len(closures[nodes])
                yield byte, closures[nodes]


def _utf8_ranges(ranges: Ranges) -> Iterator[list[tuple[int, int]]]:
    """Yield sequences of byte ranges that together encode the characters of some ranges, without surrogates."""
    for low, high in ranges:
        for first, last, length in _LENGTHS:
            if max(low, first) <= min(high, last):
                yield from _split(max(low, first), min(high, last), length)


def _split(low: int, high: int, length: int) -> Iterator[list[tuple[int, int]]]:
    """Split a range of characters of one length where their trailing bytes do not cover their whole range."""
    for trailing in range(1, length):
        block = (1 << 6 * trailing) - 1
        if low & ~block == high & ~block:
            continue
        cut = low | block if low & block else (high & ~block) - 1
        if low & block or high & block != block:
            yield from _split(low, cut, length)
            yield from _split(cut + 1, high, length)
            return
    yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))
