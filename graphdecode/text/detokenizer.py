"""Incremental detokenization that holds back partial characters and possible stop strings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from graphdecode.text.token_texts import IncrementalText, TokenTexts


class Detokenizer:
    """Incremental text of one output.

    A piece is returned once no later token can change it: unfinished UTF-8 characters are held back, and so is text
    that may be the beginning of a stop string.

    Args:
        texts: those of the tokenizer's tokens.
        min_tokens: tokens before which stop strings are ignored.
        spaced: put the tokenizer's spaces between special tokens.
        include_stop: cut after the stop string; nothing is held back for it.
        prompt: tokens before the output.
    """

    def __init__(
        self,
        texts: TokenTexts,
        stop_strings: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        include_stop: bool = False,
        spaced: bool = True,
        prompt: Sequence[int] = (),
    ) -> None:
        self._incremental = IncrementalText(texts, skip_special_tokens=skip_special_tokens, spaced=spaced)
        self._incremental.follow(prompt)
        self._stop_strings = stop_strings
        self._sorted_stops = sorted(stop_strings)  # sorted, strings with a common prefix are adjacent
        self._longest_stop = max(map(len, stop_strings), default=0)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self.text = ""  # all that is complete
        self._handed_out = 0
        self._scanned = 0  # no stop string begins before this position
        self._num_tokens = 0

    def push(self, token_id: int) -> str | None:
        """Take the next token; return the stop string that it completed, if any."""
        self._num_tokens += 1
        piece = self._incremental.push(token_id)
        return self._append(piece) if piece else None

    def text_of(self, token_id: int) -> str:
        """Return the text of a token that may come next."""
        return self._incremental.text_of(token_id)

    def _append(self, piece: str) -> str | None:
        before = len(self.text)
        self.text += piece
        if not self._stop_strings or self._num_tokens <= self._min_tokens:
            return None
        # where a stop string that ends in the new piece can begin
        starts = [(stop, max(before - len(stop) + 1, 0)) for stop in self._stop_strings]
        hits = [(at, stop) for stop, start in starts if (at := self.text.find(stop, start)) >= 0]
        if not hits:
            return None
        at, stop = min(hits)
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        return stop

    def finish(self) -> str | None:
        """Add the text of unfinished characters; return the stop string that it completes, if any."""
        tail = self._incremental.flush()
        return self._append(tail) if tail else None

    def take(self, final: bool = False) -> str:
        """Return the new text that is safe to show; with `final` all of it."""
        end = len(self.text) if final else len(self.text) - self._num_held_back()
        piece = self.text[self._handed_out : end]
        self._handed_out = max(end, self._handed_out)
        return piece

    def _num_held_back(self) -> int:
        if self._include_stop or not self._stop_strings:
            return 0
        end = len(self.text)
        # each position is checked once
        self._scanned = min(max(self._scanned, end - self._longest_stop + 1), end)
        while self._scanned < end and not self._begins_a_stop(self.text[self._scanned :]):
            self._scanned += 1
        return end - self._scanned

    def _begins_a_stop(self, text: str) -> bool:
        at = bisect_right(self._sorted_stops, text)  # the first that may be longer than the text
        return at < len(self._sorted_stops) and self._sorted_stops[at].startswith(text)
