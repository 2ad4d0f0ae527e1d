"""Random schemas, and random outputs that a grammar lets pass."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from graphdecode.text.chat_formats import ChatFormat
from graphdecode.text.chat_formats.source import words

_WORDS = ("the", " a", "true", "name", '": "', "é", "\n\n", "0", "12", '"', "{", "}", "]", ", ")


class Vocabulary:
    """Bytes, some words, the words of a format's markers, and some of them as special tokens."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, chat_format: ChatFormat, special: tuple[str, ...] = ()) -> None:
        marks = {word for marker in chat_format.markers for word in words(marker)} - set(special)
        self.marks = [mark.encode() for mark in sorted(marks) if len(mark) > 1]
        texts = [bytes([value]) for value in range(256)] + [b"<|eos|>"]
        self.special_tokens = {text: len(texts) + index for index, text in enumerate(special)}
        self.special_token_ids = (256, *self.special_tokens.values())
        texts += [text.encode() for text in special]
        self.first_mark = len(texts)
        texts += self.marks
        self.first_word = len(texts)
        self.tokens = tuple(texts + [word.encode() for word in _WORDS])
        self.tokenizer = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: Any) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(self.tokenizer, grammar_from("grammar", grammar), log_level=0)

    def output(self, matcher: LLMatcher, rng: np.random.Generator, *, limit: int = 400) -> tuple[str, bool]:
        """Return a text that random logits choose, and whether it is complete."""
        ids: list[int] = []
        for step in range(limit):
            if matcher.is_stopped():
                break
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            logits = rng.gumbel(size=len(self.tokens))
            logits[256 : self.first_word] += 1 + step / 20  # so that texts end
            logits[257 : self.first_mark] += 3
            logits[[34, 44, 58, 93, 125]] += step / 20
            logits = np.where(bits[: len(self.tokens)], logits, -np.inf)
            token = int(logits.argmax())
            matcher.consume_token(token)
            if token == self.eos_token_id:
                break
            ids.append(token)
        text = b"".join(self.tokens[token] for token in ids).decode(errors="replace")
        return text, matcher.is_accepting() or matcher.is_stopped()


def schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random schema of a value."""
    kinds = ["string", "string", "integer", "number", "boolean", "enum", "null", "nullable", "bounded"]
    kind = draw.choice([*kinds, "array", "object"] if depth < 2 else kinds)
    if kind == "enum":
        return {"type": "string", "enum": draw.sample(["one", 'two "2"', "3", "vier\nfünf", ""], draw.randint(1, 4))}
    if kind == "nullable":
        return {"anyOf": [{"type": draw.choice(["string", "integer"])}, {"type": "null"}]}
    if kind == "bounded":
        return draw.choice(
            [
                {"type": "string", "minLength": 1, "maxLength": 5},
                {"type": "integer", "minimum": -3, "maximum": 40},
                {"type": "string", "pattern": "^[a-c]+$"},
                {"type": ["string", "integer"]},
            ]
        )
    if kind == "array":
        return {"type": "array", "items": schema(draw, depth + 1), "maxItems": 3}
    if kind == "object":
        return object_schema(draw, depth + 1)
    return {"type": kind}


def object_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random schema of an object."""
    names = draw.sample(["a", "b", "path", "old_text", "n"], draw.randint(0, 3))
    properties = {name: schema(draw, depth) for name in names}
    required = [name for name in names if draw.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def tools(draw: random.Random) -> Mapping[str, dict[str, Any]]:
    """Return functions with random schemas of parameters."""
    return {name: object_schema(draw) for name in draw.sample(["f", "get_weather", "edit-file"], draw.randint(1, 3))}
