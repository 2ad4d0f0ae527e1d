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
Pattern: TypeAlias = Callable[["_Nodes", int], int]  # adds its nodes before a given node; returns its first one

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
    found, first = [], 0
    for low, high in merged((*ranges, _SURROGATES)):
        if first < low:
            found.append((first, low - 1))
        first = high + 1
    return (*found, (first, _LAST)) if first <= _LAST else tuple(found)


def merged(ranges: Ranges) -> Ranges:
    """Return the same characters in ascending ranges that do not touch."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def parse(text: str, class_of: Callable[[str], Ranges]) -> Pattern:
    """Return the pattern of a regular expression that matches whole texts.

    `class_of` returns the characters of `d`, `w` and `s`. Raises `UnknownPatternError` if it is not supported.
    """
    if _SET_OPERATION.search(text):  # Python would warn of these
        raise UnknownPatternError("an operation on classes")
    try:
        parsed = _parser.parse(text)
    except (re.error, OverflowError) as error:
        raise UnknownPatternError(str(error)) from error
    if parsed.state.flags != re.UNICODE:
        raise UnknownPatternError("flags")
    return _sequence(parsed, class_of)


def _sequence(parsed: Iterable[tuple[Any, Any]], class_of: Callable[[str], Ranges]) -> Pattern:
    parts = [_part(str(operator), argument, class_of) for operator, argument in parsed]

    def before(nodes: _Nodes, end: int) -> int:
        for part in reversed(parts):
            end = part(nodes, end)
        return end

    return before


def _part(operator: str, argument: Any, class_of: Callable[[str], Ranges]) -> Pattern:
    """Return the pattern of a node of Python's syntax tree."""
    match operator:
        case "LITERAL":
            return _characters(((argument, argument),))
        case "NOT_LITERAL":
            return _characters(complement(((argument, argument),)))
        case "ANY":
            return _characters(complement(_NEWLINE))
        case "IN":
            return _characters(_class(argument, class_of))
        case "BRANCH":
            parts = [_sequence(each, class_of) for each in argument[1]]
            return lambda nodes, end: nodes.new(free=[part(nodes, end) for part in parts])
        case "SUBPATTERN" if not any(argument[1:3]):  # no flags
            return _sequence(argument[3], class_of)
        case "MAX_REPEAT" | "MIN_REPEAT" if argument[0] <= _MOST_REPEATS:
            least, most, inside = argument
            if most is _parser.MAXREPEAT or most <= _MOST_REPEATS:
                return _repeat(_sequence(inside, class_of), least, None if most is _parser.MAXREPEAT else most)
    raise UnknownPatternError(f"{operator} is not supported, or repeats too often")


def _class(parsed: Iterable[tuple[Any, Any]], class_of: Callable[[str], Ranges]) -> Ranges:
    found: list[tuple[int, int]] = []
    (first, _), *rest = parsed
    is_negated = str(first) == "NEGATE"
    for operator, argument in rest if is_negated else parsed:
        if isinstance(argument, tuple):
            found.append(argument)
        elif str(operator) == "LITERAL":
            found.append((argument, argument))
        else:  # such as CATEGORY_NOT_SPACE
            *_, opposite, name = str(argument).split("_")
            ranges = class_of(name[0].lower())
            found += complement(ranges) if opposite == "NOT" else ranges
    ranges = merged(tuple(found))
    return complement(ranges) if is_negated else ranges


def _characters(ranges: Ranges) -> Pattern:
    def before(nodes: _Nodes, end: int) -> int:
        edges = []
        for first, *others in utf8_ranges(ranges):
            node = end
            for low, high in reversed(others):
                node = nodes.new(edges=[(low, high, node)])
            edges.append((*first, node))
        return nodes.new(edges=edges)

    return before


def _repeat(part: Pattern, least: int, most: int | None) -> Pattern:
    def before(nodes: _Nodes, end: int) -> int:
        node = end
        if most is None:
            node = nodes.new(free=[end])
            nodes.free[node].append(part(nodes, node))
        for _ in range((most or least) - least):
            node = nodes.new(free=[part(nodes, node), end])
        for _ in range(least):
            node = part(nodes, node)
        return node

    return before


def byte_automaton(pattern: Pattern, most_states: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the deterministic automaton of a pattern; state 0 is the initial one.

    It is int32 [states, 256], the next state by byte, -1 for none; and bool [states], whether the text may end. Raises
    `UnknownPatternError` if there are more states.
    """
    nodes = _Nodes()
    end = nodes.new()
    first = nodes.closure([pattern(nodes, end)])
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

    def __init__(self) -> None:
        self.free: list[list[int]] = []
        self.edges: list[Sequence[tuple[int, int, int]]] = []  # first and last byte, and the target
        self._work = 0  # bytes and nodes visited

    def new(self, *, free: Sequence[int] = (), edges: Sequence[tuple[int, int, int]] = ()) -> int:
        if len(self.free) == _MOST_NODES:
            raise UnknownPatternError(f"more than {_MOST_NODES} nodes")
        self.free.append(list(free))
        self.edges.append(edges)
        return len(self.free) - 1

    def closure(self, nodes: Sequence[int]) -> frozenset[int]:
        """Return the nodes that free transitions reach."""
        found, waiting = set(nodes), list(nodes)
        while waiting:
            new = [node for node in self.free[waiting.pop()] if node not in found]
            found.update(new)
            waiting += new
        return frozenset(node for node in found if self.edges[node] or not self.free[node])

    def steps(self, state: frozenset[int]) -> Iterator[tuple[int, frozenset[int]]]:
        """Yield bytes, and the nodes that each leads to."""
        targets: list[list[int]] = [[] for _ in range(256)]
        for node in state:
            for low, high, target in self.edges[node]:
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
