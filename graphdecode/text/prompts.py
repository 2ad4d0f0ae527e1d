"""What `generate` and `stream` take as prompts: texts, token ids, and vLLM's dicts of either."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from graphdecode.errors import ArgumentError, shown

Prompt = str | Sequence[int] | Mapping[str, Any]

_EXPECTED = "a prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`"
_DICT_KEYS = {"prompt", "prompt_token_ids"}


def as_prompt(prompt: Any) -> str | list[int]:
    """Return one prompt as a text or a list of token ids.

    Args:
        prompt: a text; integers in a sequence, a NumPy array or a tensor; or a dict as vLLM takes it, in which
            `prompt_token_ids` wins over `prompt`.

    Raises:
        ValueError: it is none of these, or a text with halves of surrogate pairs.
    """
    if isinstance(prompt, Mapping):
        if not prompt or set(prompt) - _DICT_KEYS:
            raise ArgumentError(f"{_EXPECTED}, got a dict with {sorted(map(str, prompt))}")
        return as_prompt(prompt.get("prompt_token_ids", prompt.get("prompt")))
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ArgumentError(f"a prompt is no valid text: {error}") from error
        return prompt
    ids = _listed(prompt)
    if type(ids) is list and set(map(type, ids)) == {int}:  # of a million, each would be looked at for a while
        return list(ids)
    if not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray) or not all(map(_is_token, ids)):
        raise ArgumentError(f"{_EXPECTED}, got {shown(prompt)}")
    return [int(token) for token in ids]


def as_prompts(prompts: Any) -> list[str | list[int]]:
    """Return what `generate` was given as a list of prompts.

    Args:
        prompts: one prompt, or an iterable of prompts; integers are one prompt.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(prompts, str | Mapping):
        return [as_prompt(prompts)]
    prompts = _listed(prompts)
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise ArgumentError(f"{_EXPECTED}, and prompts are a list of them, got {shown(prompts)}")
    items = list(prompts)
    return [as_prompt(items)] if items and all(map(_is_token, items)) else [as_prompt(item) for item in items]


def _listed(given: Any) -> Any:
    return given.tolist() if hasattr(given, "tolist") else given


def _is_token(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
