"""Counts the tokens of an output's thoughts, markers included."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphdecode.text.chat_formats.chat_format import ChatFormat

_LONGEST_MARKER = 64  # bytes


class ThoughtTokens:
    """The tokens of an output's thoughts so far; `bytes_of` tells the bytes of a token."""

    def __init__(self, chat_format: ChatFormat, bytes_of: Callable[[int], bytes], *, in_reasoning: bool) -> None:
        if chat_format.channels is not None:
            channels = chat_format.channels
            self._opening = f"{channels.channel}{channels.reasoning}".encode()
            self._closings = tuple(each.encode() for each in channels.endings)
        elif chat_format.thinking is not None:
            self._opening = chat_format.thinking.opening.strip().encode()
            self._closings = (chat_format.thinking.closing.strip().encode(),)
        else:
            self._opening, self._closings = b"", ()
        self._repeats = chat_format.channels is not None  # thoughts come again, and not only at the beginning
        self._bytes_of = bytes_of
        self._is_open, self._is_over = in_reasoning, not self._closings
        self._before = b""  # the last bytes
        self._since = 0  # tokens outside of thoughts, which may be of a marker
        self._read = 0
        self._count = 0

    def count(self, token_ids: Sequence[int]) -> int:
        """Return the number of thoughts' tokens in an output, which has grown since the last call."""
        for index in range(self._read, len(token_ids)):
            if self._is_over:
                break
            self._take(self._bytes_of(token_ids[index]))
        self._read = len(token_ids)
        return self._count

    def _take(self, data: bytes) -> None:
        self._before = (self._before + data)[-_LONGEST_MARKER - len(data) :]
        if self._is_open:
            self._count += 1
            if any(closing in self._before for closing in self._closings):
                self._is_open, self._is_over = False, not self._repeats
                self._before, self._since = b"", 0
            return
        self._since += 1
        if self._opening in self._before:
            self._is_open, self._count = True, self._count + (1 if self._repeats else self._since)
            self._before = b""
        elif not (self._repeats or self._opening.startswith(self._before.lstrip())):
            self._is_over = True
