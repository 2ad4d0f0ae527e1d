"""Regular expressions of a plain kind, read into what an automaton is made of.

What is known: characters and escapes of them, classes in brackets, `.`, `\\d`, `\\w`, `\\s` and their opposites,
groups, alternatives, and the quantifiers `?`, `*`, `+`, `{n}`, `{n,}` and `{n,m}`. Anything else is left to the library
that reads forms: flags, assertions, lazy quantifiers, named groups, properties, operations on classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from graphdecode.errors import GraphdecodeError

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # of code points, both ends included, ascending

_LAST, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_CLASSES = "dws"
_MOST_REPEATS = 1000
_MOST_DEPTH = 100  # of groups


class UnknownPatternError(GraphdecodeError):
    """A regular expression that is not of the plain kind."""


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
        text: the expression.
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
