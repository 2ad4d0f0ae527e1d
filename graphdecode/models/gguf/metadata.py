"""The metadata of a GGUF file: by the names that its architecture puts before them, and what they say of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphdecode.models.config import UnsupportedModelError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # of `tokenizer.ggml.token_type`
# how a turn or a text ends where a file does not say it, as llama.cpp takes it
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>",
)  # fmt: skip
_HARMONY = {"<|return|>", "<|call|>"}  # where these end an answer, <|end|> ends a part of it


class Metadata:
    """The fields of one architecture.

    Args:
        fields: all of a file's.

    Attributes:
        architecture: GGUF's name of it.

    Raises:
        UnsupportedModelError: no architecture is named.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._all = fields
        self.architecture = self.whole("general.architecture", str)

    def number(self, name: str, default: float | None = None) -> Any:
        """Return a number of the architecture, such as "embedding_length"; one for all layers where there are many.

        Raises:
            UnsupportedModelError: it is missing and has no default, is no number, or differs between layers.
        """
        return self.whole(f"{self.architecture}.{name}", (int, float), default)

    def count(self, name: str, default: int | None = None) -> int:
        """Return a number that is an integer >= 1.

        Raises:
            UnsupportedModelError: it is none, or see `number`.
        """
        value = self.number(name, default)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(f"{self.architecture}.{name} must be an integer >= 1, got {_shown(value)}")
        return value

    def has(self, name: str) -> bool:
        """Whether the architecture has the field."""
        return f"{self.architecture}.{name}" in self._all

    def text(self, name: str, default: str) -> str:
        """Return a text of the architecture."""
        return self.whole(f"{self.architecture}.{name}", str, default)

    def layers(self, name: str) -> list[Any]:
        """Return what the architecture has for each layer; [] where it is one value for all, or none."""
        value = self._all.get(f"{self.architecture}.{name}")
        return value.tolist() if isinstance(value, np.ndarray) else []

    def whole(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a field by its whole name."""
        value = self._all.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None:
            raise UnsupportedModelError(f"the field {key} is missing")
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
            raise UnsupportedModelError(f"{key} must be {kinds}, got {_shown(value)}")
        return value


def _shown(value: Any) -> str:
    return f"{value!r:.80}"


def stop_token_ids(fields: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end an answer: those that the file names, and those that are known to."""
    named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
    known = {}
    if isinstance(tokens, list) and isinstance(kinds, (list, np.ndarray)):  # else the tokenizer says what is wrong
        known = {
            token: index
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
            if token in _ENDS and kind == CONTROL
        }
    if known.keys() >= _HARMONY:
        known.pop("<|end|>", None)
    return sorted({token for token in (*named, *known.values()) if isinstance(token, int)})
