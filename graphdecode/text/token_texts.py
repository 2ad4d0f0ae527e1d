"""Texts and bytes of single tokens, and the text that a sequence of them makes."""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from typing import Any

_UNKNOWN = "\ufffd"  # the text of bytes that are no character
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte in vocabularies of SentencePiece
_LONGEST = 4  # bytes of a character
# with these decoders a token adds the same after any other token
_INDEPENDENT = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"}


def _byte_level() -> dict[str, int]:
    """Return the characters for bytes in vocabularies of byte-level BPE (Radford et al., 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()


class TokenTexts:
    """The text that each token of a tokenizer adds; thread-safe.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.

    Attributes:
        special: the texts of special tokens, by id.
        marks: those of tokens that llguidance's texts never have: special ones, and added ones between angle brackets.
        after_any: what `bytes_after` returned so far where it is the same after any token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self.special: dict[int, str] = {token: data.content for token, data in added if data.special}
        self.marks = self.special | {token: data.content for token, data in added if _is_mark(data.content)}
        self._is_independent = _is_independent(tokenizer.decoder)
        self._word = self._first_word()
        self._bytes_by_id: dict[int, bytes] = {}  # what `bytes_of` returned
        self._parts: dict[int, str | None] = {}  # what `part_of` returned
        self.after_any = self._bytes_by_id if self._is_independent else {}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds within a text."""
        data = self._bytes_by_id.get(token)
        if data is None:
            data = self._bytes_by_id[token] = self._added(token, self._word)
        return data

    def part_of(self, token: int) -> str | None:
        """Return the escaped bytes of a token that is no text, such as a part of a character; None: it is a text."""
        if token not in self._parts:
            data = self.bytes_of(token)
            shown = data.decode(errors="backslashreplace")
            self._parts[token] = None if shown.encode() == data else shown
        return self._parts[token]

    def bytes_after(self, token: int, previous: int | None) -> bytes:
        """Return the bytes that a token adds after another one, or (None) at the beginning of a text."""
        if previous is not None and self._is_independent:
            return self.bytes_of(token)
        return self._added(token, previous)

    def _added(self, token: int, previous: int | None) -> bytes:
        decode = self._tokenizer.decode
        text: str = decode([token], skip_special_tokens=False)
        if previous is not None:
            before = decode([previous], skip_special_tokens=False)
            together = decode([previous, token], skip_special_tokens=False)
            text = together[len(before) :] if together.startswith(before) else text
        if _UNKNOWN not in text:
            return text.encode()
        written = self._tokenizer.id_to_token(token)
        if byte := _BYTE.fullmatch(written):
            return bytes.fromhex(byte[1])
        if all(letter in _BYTE_LEVEL for letter in written):
            return bytes(_BYTE_LEVEL[letter] for letter in written)
        return text.encode()

    def _first_word(self) -> int | None:
        """Return a token that is a text of letters alone, to decode others after it."""
        for token in range(self._tokenizer.get_vocab_size()):
            written = self._tokenizer.id_to_token(token) or ""
            if written.isascii() and written.isalpha() and token not in self.special:
                return token
        return None


def _is_mark(text: str) -> bool:
    """Return whether llguidance takes an added token for a special one, whatever the tokenizer says."""
    return text.startswith("<") and text.endswith(">")


def _is_independent(decoder: Any) -> bool:
    if decoder is None:
        return True
    try:
        described = json.loads(decoder.__getstate__())
    except Exception:  # Python code
        return False
    parts = [described, *described.get("decoders", ())]
    return all(
        part["type"] in _INDEPENDENT and (part["type"] != "Replace" or part["pattern"] == {"String": "▁"})
        for part in parts
    )


class IncrementalText:
    """The text of tokens that come one by one: a character once it is complete.

    Args:
        skip_special_tokens: special tokens have no text.
        spaced: put the tokenizer's spaces between special tokens.
    """

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool = False, spaced: bool = True) -> None:
        self._texts = texts
        self._skips = texts.special if skip_special_tokens else {}
        self._unspaced = {} if spaced or skip_special_tokens else texts.special
        self._bytes_by_id = texts.after_any
        self._previous: int | None = None  # the last token with a text
        self._unfinished = b""  # of a character
        self._is_prompts = True  # it is of tokens before the text

    def follow(self, tokens: Sequence[int]) -> None:
        """Let the text follow other tokens, such as a prompt's; their unfinished character becomes part of it."""
        tail = b""
        for token in reversed(tokens):
            if token in self._skips:
                continue
            if self._previous is None:
                self._previous = token
            tail = self._texts.bytes_of(token) + tail
            if len(tail) >= _LONGEST:
                break
        self._unfinished = tail[utf_8_decode(tail, "replace", False)[1] :]

    def text_of(self, token: int) -> str:
        """Return the text that a token would add; special ones have their own, even if they are skipped."""
        if token in self._skips:
            return self._skips[token]
        return utf_8_decode(self._unfinished + self._bytes(token), "replace", False)[0]

    def push(self, token: int) -> str:
        """Add a token; return the text that it adds, which no later token changes."""
        if token in self._skips:
            return ""
        data = self._unfinished + self._bytes(token)
        self._previous, self._is_prompts = token, False
        text, used = utf_8_decode(data, "replace", False)
        self._unfinished = data[used:] if used < len(data) else b""
        return text

    def flush(self) -> str:
        """Return the text of a character that remains unfinished."""
        unfinished, self._unfinished = self._unfinished, b""
        return "" if self._is_prompts else utf_8_decode(unfinished, "replace", True)[0]

    def _bytes(self, token: int) -> bytes:
        data = self._bytes_by_id.get(token)
        if data is not None and self._previous is not None and not self._unspaced:
            return data
        if token in self._unspaced and self._previous in self._unspaced:
            return self._unspaced[token].encode()
        return self._texts.bytes_after(token, self._previous)


def text_of_tokens(texts: TokenTexts, tokens: Iterable[int]) -> str:
    """Return the text of a prompt with its special tokens, without a character that it leaves unfinished."""
    text = IncrementalText(texts)
    return "".join(map(text.push, tokens))
