"""Plain regular expressions to automata over bytes of UTF-8.

Known are characters and their escapes, classes in brackets, `.`, `\\d`, `\\w`, `\\s` and their opposites, groups,
alternatives, and the quantifiers `?`, `*`, `+`, `{n}`, `{n,}` and `{n,m}`. Anything else is left to llguidance: flags,
assertions, lazy quantifiers, named groups, properties, operations on classes. The automaton is Thompson's construction
(1968), then subsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from graphdecode.errors import GraphdecodeError

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # of code points, both ends included, ascending

_LAST, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_CLASSES = "dws"
_MOST_REPEATS = 1000
_MOST_DEPTH = 100  # of groups
_MOST_NODES, _MOST_WORK = 50_000, 2_000_000
# characters of as many bytes; between the two of three lie the halves of surrogate pairs, which are none
_LENGTHS = ((0, 0x7F, 1), (0x80, 0x7FF, 2), (0x800, 0xD7FF, 3), (0xE000, 0xFFFF, 3), (0x10000, 0x10FFFF, 4))


class UnknownPatternError(GraphdecodeError):
    """A regular expression that is not supported here."""


@dataclass(frozen=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Chain:
    """Parts one behind the other."""

    parts: tuple[Pattern, ...]


@dataclass(frozen=True)
class Either:
    """One of some alternatives."""

    parts: tuple[Pattern, ...]


@dataclass(frozen=True)
class Repeat:
    """A part some times; `most` None is without end."""

    part: Pattern
    least: int
    most: int | None


Pattern: TypeAlias = Characters | Chain | Either | Repeat


def literal(text: str) -> Chain:
    """Return the pattern of a text."""
    return Chain(tuple(Characters(((ord(character), ord(character)),)) for character in text))


def complement(ranges: Ranges) -> Ranges:
    """Return all characters but some; halves of surrogate pairs are none."""
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
    """Return the pattern that a regular expression is, from its first character to its last one.

    Args:
        class_of: gives the characters of `d`, `w` and `s`.

    Raises:
        UnknownPatternError: it is not of the plain kind.
    """
    parser = _Parser(text, class_of)
    pattern = parser.alternatives(0)
    if parser.place < len(text):
        raise UnknownPatternError(f"unexpected {text[parser.place]!r}")
    return pattern


class _Parser:
    def __init__(self, text: str, class_of: Callable[[str], Ranges]) -> None:
        self.text = text
        self.place = 0
        self._class_of = class_of

    def peek(self) -> str:
        return self.text[self.place : self.place + 1]

    def take(self) -> str:
        character = self.peek()
        if not character:
            raise UnknownPatternError("it ends too early")
        self.place += 1
        return character

    def alternatives(self, depth: int) -> Pattern:
        if depth > _MOST_DEPTH:
            raise UnknownPatternError("groups in too many groups")
        found = [self.chain(depth)]
        while self.peek() == "|":
            self.place += 1
            found.append(self.chain(depth))
        return found[0] if len(found) == 1 else Either(tuple(found))

    def chain(self, depth: int) -> Pattern:
        found: list[Pattern] = []
        while self.peek() not in ("", "|", ")"):
            found.append(self.quantified(self.atom(depth)))
        return Chain(tuple(found))

    def atom(self, depth: int) -> Pattern:
        character = self.take()
        if character == "(":
            if self.peek() == "?":
                self.place += 1
                if self.take() != ":":
                    raise UnknownPatternError("a group with flags or a name, or an assertion")
            inside = self.alternatives(depth + 1)
            if self.take() != ")":
                raise UnknownPatternError("a group without end")
            return inside
        if character == "[":
            return Characters(self.bracket())
        if character == ".":
            return Characters(complement(((10, 10),)))
        if character == "\\":
            return Characters(self.escape())
        if character in "^$*+?{}]":
            raise UnknownPatternError(f"{character!r} where a character is expected")
        return literal(character).parts[0]

    def escape(self) -> Ranges:
        character = self.take()
        if character.lower() in _CLASSES:
            ranges = self._class_of(character.lower())
            return ranges if character.islower() else complement(ranges)
        character = _CONTROL.get(character, character)
        if character.isalnum() or not (character.isascii()):
            raise UnknownPatternError(f"the escape of {character!r}")
        return ((ord(character), ord(character)),)

    def bracket(self) -> Ranges:
        negated = self.peek() == "^"
        self.place += negated
        found: list[tuple[int, int]] = []
        is_first = True
        while is_first or self.peek() != "]":
            is_first = False
            low = self.in_bracket()
            follows = self.text[self.place + 1 : self.place + 2]
            if self.peek() == "-" and follows != "]":
                self.place += 1
                high = self.in_bracket()
                if len(low) != 1 or len(high) != 1 or low[0][0] > high[0][0]:
                    raise UnknownPatternError("a range that is none")
                found.append((low[0][0], high[0][0]))
            else:
                found += low
        self.place += 1
        ranges = merged(tuple(found))
        return complement(ranges) if negated else ranges

    def in_bracket(self) -> Ranges:
        character = self.take()
        pair = character + self.peek()
        if character in "[]" or pair in ("&&", "--", "~~"):
            raise UnknownPatternError("an operation on classes")
        return self.escape() if character == "\\" else ((ord(character), ord(character)),)

    def quantified(self, part: Pattern) -> Pattern:
        character = self.peek()
        if character not in ("?", "*", "+", "{"):
            return part
        self.place += 1
        if character == "{":
            end = self.text.find("}", self.place)
            least, comma, most = self.text[self.place : max(end, self.place)].partition(",")
            self.place = end + 1
            numbers = [least, most] if most else [least]
            if end < 0 or not all(number.isascii() and number.isdigit() for number in numbers):
                raise UnknownPatternError("a quantifier that is none")
            bounds = int(least), (int(most) if most else None) if comma else int(least)
        else:
            bounds = {"?": (0, 1), "*": (0, None), "+": (1, None)}[character]
        low, high = bounds
        if max(low, high or 0) > _MOST_REPEATS or (high is not None and high < low):
            raise UnknownPatternError("too many repeats")
        if self.peek() in ("?", "*", "+", "{") and self.peek():
            raise UnknownPatternError("a quantifier behind a quantifier")
        return Repeat(part, low, high)


def byte_automaton(pattern: Pattern, most_states: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the states over bytes of a pattern; the first one is the beginning.

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
