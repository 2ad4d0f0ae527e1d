"""Plain regular expressions, compiled to automata over UTF-8 bytes.

Supported: characters, escapes, bracket classes, `.`, `\\d`, `\\w`, `\\s` and their complements, groups, alternatives,
and the quantifiers `?`, `*`, `+`, `{n}`, `{n,}` and `{n,m}`. Everything else is left to llguidance. The automaton is
Thompson's construction (1968), followed by the subset construction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from graphdecode.errors import GraphdecodeError

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # of code points, both ends included, ascending
Pattern: TypeAlias = Callable[["_Nodes", int], int]  # adds its nodes before a given node; returns its first one

_LAST, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_QUANTIFIER = re.compile(r"[?*+]|\{([0-9]+)(?:(,)([0-9]*))?\}")
_BOUNDS: dict[str, tuple[int, int | None]] = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_MOST_REPEATS = 1000
_MOST_DEPTH = 100  # of groups
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

    Args:
        class_of: returns the characters of `d`, `w` and `s`.

    Raises:
        UnknownPatternError: it is not supported.
    """
    parser = _Parser(text, class_of)
    pattern = parser.alternatives(0)
    if parser.position < len(text):
        raise UnknownPatternError(f"unexpected {text[parser.position]!r}")
    return pattern


class _Parser:
    def __init__(self, text: str, class_of: Callable[[str], Ranges]) -> None:
        self.text = text
        self.position = 0
        self._class_of = class_of

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def take(self) -> str:
        character = self.peek()
        if not character:
            raise UnknownPatternError("it ends too early")
        self.position += 1
        return character

    def alternatives(self, depth: int) -> Pattern:
        if depth > _MOST_DEPTH:
            raise UnknownPatternError("groups are nested too deeply")
        found = [self.chain(depth)]
        while self.peek() == "|":
            self.position += 1
            found.append(self.chain(depth))
        return found[0] if len(found) == 1 else lambda nodes, end: nodes.new(free=[part(nodes, end) for part in found])

    def chain(self, depth: int) -> Pattern:
        found: list[Pattern] = []
        while self.peek() not in ("", "|", ")"):
            found.append(self.quantified(self.atom(depth)))

        def before(nodes: _Nodes, end: int) -> int:
            for part in reversed(found):
                end = part(nodes, end)
            return end

        return before

    def atom(self, depth: int) -> Pattern:
        character = self.take()
        if character == "(":
            if self.text.startswith("?", self.position):
                if not self.text.startswith("?:", self.position):
                    raise UnknownPatternError("a group with flags or a name, or an assertion")
                self.position += 2
            inside = self.alternatives(depth + 1)
            if self.take() != ")":
                raise UnknownPatternError("an unclosed group")
            return inside
        if character == "[":
            return _characters(self.bracket())
        if character == ".":
            return _characters(complement(((10, 10),)))
        if character == "\\":
            return _characters(self.escape())
        if character in "^$*+?{}]":
            raise UnknownPatternError(f"{character!r} where a character is expected")
        return _characters(_single(character))

    def escape(self) -> Ranges:
        character = self.take()
        if character in "dwsDWS":
            ranges = self._class_of(character.lower())
            return ranges if character.islower() else complement(ranges)
        character = _CONTROL.get(character, character)
        if character.isalnum() or not character.isascii():
            raise UnknownPatternError(f"the escape of {character!r}")
        return _single(character)

    def bracket(self) -> Ranges:
        negated = self.peek() == "^"
        self.position += negated
        found = [*self.in_bracket()]
        while self.peek() != "]":
            found += self.in_bracket()
        self.position += 1
        ranges = merged(tuple(found))
        return complement(ranges) if negated else ranges

    def in_bracket(self) -> Ranges:
        low = self.member()
        if self.peek() != "-" or self.text.startswith("-]", self.position):
            return low
        self.position += 1
        high = self.member()
        if len(low) != 1 or len(high) != 1 or low[0][0] > high[0][0]:
            raise UnknownPatternError("an invalid range")
        return ((low[0][0], high[0][0]),)

    def member(self) -> Ranges:
        character = self.take()
        if character in "[]" or character + self.peek() in ("&&", "--", "~~"):
            raise UnknownPatternError("an operation on classes")
        return self.escape() if character == "\\" else _single(character)

    def quantified(self, part: Pattern) -> Pattern:
        found = _QUANTIFIER.match(self.text, self.position)
        if found is None:
            return part
        self.position = found.end()
        least, comma, most = found.groups()
        low, high = _BOUNDS.get(found[0]) or (int(least), (int(most) if most else None) if comma else int(least))
        if max(low, high or 0) > _MOST_REPEATS or (high is not None and high < low):
            raise UnknownPatternError("too many repeats")
        if self.peek() and self.peek() in "?*+{":
            raise UnknownPatternError("a quantifier after a quantifier")
        return _repeat(part, low, high)


def _single(character: str) -> Ranges:
    return ((ord(character), ord(character)),)


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

    Returns:
        int32 [states, 256], the next state by byte, -1 for none; and bool [states], whether the text may end.

    Raises:
        UnknownPatternError: there are more states.
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
