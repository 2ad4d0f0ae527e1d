"""What a GGUF file says of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # of `tokenizer.ggml.token_type`
# how a turn or a text ends where a file does not say it, as llama.cpp takes it
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>",
)  # fmt: skip
_HARMONY = {"<|return|>", "<|call|>"}  # where these end an answer, <|end|> ends a part of it


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
