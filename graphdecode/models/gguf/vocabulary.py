"""What a GGUF file says of its tokens."""

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


def stop_token_ids(fields: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end an answer: those that the file names, and those that are known to.

    Raises:
        UnsupportedModelError: a field has another type than it can have.
    """
    named = [_named(fields, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = fields.get("tokenizer.ggml.tokens", []), fields.get("tokenizer.ggml.token_type", [])
    for name, value in (("tokens", tokens), ("token_type", kinds)):
        if not isinstance(value, (list, np.ndarray)):
            raise UnsupportedModelError(f"tokenizer.ggml.{name} must be an array, got {value!r:.80}")
    ends = [(token, index) for index, token in enumerate(tokens[: len(kinds)]) if token in _ENDS]
    known = {token: index for token, index in ends if kinds[index] == CONTROL}
    if known.keys() >= _HARMONY:
        known.pop("<|end|>", None)
    return sorted({token for token in (*named, *known.values()) if token is not None})


def _named(fields: Mapping[str, Any], key: str) -> int | None:
    value = fields.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise UnsupportedModelError(f"{key} must be int, got {value!r:.80}")
    return value
