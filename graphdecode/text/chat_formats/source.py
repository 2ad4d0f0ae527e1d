"""Text that comes in pieces, for readers that are generators: they yield where they need more of it.

What a reader finds depends on the text alone, and not on the pieces in which it came.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from graphdecode.errors import GraphdecodeError

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], None]
_NO_SPACE = re.compile(r"\S")


class NoCallError(GraphdecodeError):
    """The text is not what a reader expects."""


@lru_cache
def words(marker: str) -> tuple[str, ...]:
    """Return the parts of a marker between its spaces."""
    return tuple(marker.split())


class TextSource:
    """Text that comes in pieces. What was read since `remember` can be put back."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # where reading goes on
        self.is_final = False  # no more text comes
        self._offset = 0  # characters before `text`
        self._kept: list[str] | None = None  # what was read since `remember`, and is no longer in `text`
        self._kept_from = 0  # where the rest of it begins in `text`

    @property
    def position(self) -> int:
        """Characters read so far."""
        return self._offset + self.at

    def feed(self, piece: str, *, final: bool) -> None:
        """Add a piece."""
        if self._kept is not None:
            self._kept.append(self.text[self._kept_from : self.at])
            self._kept_from = 0
        self._offset += self.at
        self.text, self.at, self.is_final = self.text[self.at :] + piece, 0, final

    def remember(self) -> None:
        """Begin to keep what is read."""
        self._kept, self._kept_from = [], self.at

    @property
    def num_kept(self) -> int:
        """Characters read since `remember`."""
        return sum(map(len, self._kept or ())) + self.at - self._kept_from

    def forget(self) -> str:
        """End keeping what is read, and return it."""
        kept, self._kept = self._kept or [], None
        return "".join([*kept, self.text[self._kept_from : self.at]])

    def rewind(self) -> None:
        """Go back to where `remember` was called, and end keeping."""
        kept, self._kept = self._kept, None
        if not kept:
            self.at = self._kept_from
            return
        text = "".join([*kept, self.text[self._kept_from : self.at]])
        self._offset += self.at - len(text)
        self.text, self.at = text + self.text[self.at :], 0

    def peek(self) -> Reading[str]:
        """Return the next character; "" at the end."""
        while self.at == len(self.text):
            if self.is_final:
                return ""
            yield
        return self.text[self.at]

    def space(self) -> Reading[str]:
        """Skip spaces, and return the next character; "" at the end."""
        while True:
            match = _NO_SPACE.search(self.text, self.at)
            self.at = len(self.text) if match is None else match.start()
            if match is not None:
                return match[0]
            if self.is_final:
                return ""
            yield

    def starts_with(self, word: str) -> Reading[bool]:
        """Return whether a text comes next."""
        while True:
            there = self.text[self.at : self.at + len(word)]
            if there == word:
                return True
            if self.is_final or not word.startswith(there):
                return False
            yield

    def literal(self, word: str) -> Reading[bool]:
        """Skip a text, and return whether it was there."""
        there = yield from self.starts_with(word)
        if there:
            self.at += len(word)
        return there

    def marker(self, marker: str) -> Reading[None]:
        """Skip a marker, with any spaces before and within it; raise NoCallError if it is not there."""
        for word in words(marker):
            yield from self.space()
            if not (yield from self.literal(word)):
                raise NoCallError

    def first_of(self, found: Sequence[str]) -> Reading[str]:
        """Skip spaces, and return which of some texts comes next; "" if none does."""
        yield from self.space()
        while True:
            there = self.text[self.at : self.at + max(map(len, found), default=0)]
            for word in found:
                if there.startswith(word):
                    return word
            if self.is_final or not any(word.startswith(there) for word in found):
                return ""
            yield

    def closes(self, marker: str) -> Reading[bool]:
        """Skip a closing marker, which the end of the text may cut; return whether it was there."""
        for word in words(marker):
            if not (yield from self.space()):
                return True
            while (there := self.text[self.at : self.at + len(word)]) != word:
                if not word.startswith(there):
                    return False
                if self.is_final:
                    self.at = len(self.text)
                    return True
                yield
            self.at += len(word)
        return True

    def rest(self, sink: Sink) -> Reading[None]:
        """Pass on all text to its end."""
        while True:
            sink(self.text[self.at :])
            self.at = len(self.text)
            if self.is_final:
                return
            yield

    def until(self, stops: Sequence[str], sink: Sink) -> Reading[str]:
        """Pass on the text before the first of some texts, and return which it is; "": the end of the text.

        Where it is not known whether one of them begins, the text waits.
        """
        pattern = re.compile("|".join(map(re.escape, sorted(stops, key=len, reverse=True))))
        while True:
            match = pattern.search(self.text, self.at)
            if match is not None:
                sink(self.text[self.at : match.start()])
                self.at = match.start()
                return match[0]
            if self.is_final:
                sink(self.text[self.at :])
                self.at = len(self.text)
                return ""
            longest = min(max(map(len, stops)) - 1, len(self.text) - self.at)
            tail = self.text[-longest:] if longest else ""
            held = next((size for size in range(longest, 0, -1) if any(s.startswith(tail[-size:]) for s in stops)), 0)
            end = len(self.text) - held
            if end > self.at:
                sink(self.text[self.at : end])
                self.at = end
            yield
