"""Arguments of `generate` and `chat`: prompts, parameters, priorities and adapters, in any of vLLM's types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from graphdecode.config.key import LONG_INTEGER, is_integer
from graphdecode.engine import SamplingParams
from graphdecode.errors import ArgumentError, shown
from graphdecode.text.pooling import PoolingParams

Prompt = str | Sequence[int] | Mapping[str, Any]

_EXPECTED = "a prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`"
_DICT_KEYS = {"prompt", "prompt_token_ids"}
_SALT = "cache_salt"  # a further key
MAX_SALT_LENGTH = 128  # characters


def as_prompt(prompt: Any) -> str | list[int]:
    """Return one prompt as a text or a list of token ids; raises ArgumentError for anything else.

    It may be a text; integers in a sequence, a NumPy array or a tensor; or vLLM's dict, where `prompt_token_ids` takes
    precedence over `prompt`.
    """
    if isinstance(prompt, Mapping):
        if not prompt or set(prompt) - _DICT_KEYS:
            raise ArgumentError(f"{_EXPECTED}, got a dict with {sorted(map(str, prompt))}")
        return as_prompt(prompt.get("prompt_token_ids", prompt.get("prompt")))
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ArgumentError(f"a prompt is not valid text: {error}") from error
        return prompt
    ids = _listed(prompt)
    if type(ids) is list and set(map(type, ids)) == {int}:  # the fast path, for a million tokens
        return list(ids)
    if not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray) or not all(map(is_integer, ids)):
        raise ArgumentError(f"{_EXPECTED}, got {shown(prompt)}")
    return [int(token) for token in ids]


class SaltedPrompt(NamedTuple):
    """A prompt and its cache salt: cached prefixes are shared by prompts of the same salt only."""

    prompt: str | list[int]
    cache_salt: str | None = None


def as_salted_prompt(prompt: Any) -> SaltedPrompt:
    """Return one prompt as `as_prompt` does, with the `cache_salt` of its dict."""
    salt = None
    if isinstance(prompt, Mapping):
        salt, prompt = prompt.get(_SALT), {key: value for key, value in prompt.items() if key != _SALT}
        if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT_LENGTH):
            raise ArgumentError(f"{_SALT} must be a text of 1..{MAX_SALT_LENGTH} characters, got {shown(salt)}")
    return SaltedPrompt(as_prompt(prompt), salt)


def as_prompts(prompts: Any) -> list[SaltedPrompt]:
    """Return one prompt, or an iterable of prompts, as a list; integers are one prompt."""
    if isinstance(prompts, str | Mapping):
        return [as_salted_prompt(prompts)]
    prompts = _listed(prompts)
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise ArgumentError(f"{_EXPECTED}, and prompts are a list of them, got {shown(prompts)}")
    items = list(prompts)
    are_tokens = bool(items) and all(map(is_integer, items))
    return [as_salted_prompt(items)] if are_tokens else [as_salted_prompt(item) for item in items]


def _listed(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request, as vLLM's class of this name.

    Attributes:
        lora_name: names it; the first request with a name loads the adapter.
        lora_int_id: vLLM's number of it, >= 1; names tell adapters apart here.
        lora_path: a folder as PEFT saves it, or a GGUF file of llama.cpp.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ArgumentError(f"lora_name must be a text that is not empty, got {shown(self.lora_name)}")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ArgumentError(f"lora_int_id must be an integer >= 1, got {shown(self.lora_int_id)}")
        if not isinstance(self.lora_path, (str, Path)) or not str(self.lora_path):
            raise ArgumentError(f"lora_path must be a folder or a GGUF file, got {shown(self.lora_path)}")


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return parameters for each prompt; None means the defaults; see `_one_each`."""
    values, expected = SamplingParams() if params is None else params, "SamplingParams, one or a list"
    if isinstance(values, Mapping):
        expected = "SamplingParams, which SamplingParams(**values) makes of a dict"
    return _one_each(values, count, "sampling_params", expected, lambda each: isinstance(each, SamplingParams))


def as_pooling_params(params: PoolingParams | Sequence[PoolingParams] | None, count: int) -> list[PoolingParams]:
    """Return parameters for each prompt; None means the defaults; see `_one_each`."""
    values = PoolingParams() if params is None else params
    expected = "PoolingParams, one or a list"
    return _one_each(values, count, "pooling_params", expected, lambda each: isinstance(each, PoolingParams))


def as_priorities(priority: Sequence[int] | int | None, count: int) -> list[int]:
    """Return a priority for each prompt; None is 0; see `_one_each`."""
    values, expected = 0 if priority is None else priority, "a 64-bit integer for each prompt"
    return _one_each(values, count, "priority", expected, LONG_INTEGER.accepts)


def as_lora_requests(values: LoRARequests, count: int) -> list[LoRARequest | None]:
    """Return an adapter for each prompt; None: the base model; see `_one_each`."""
    expected = "a LoRARequest, a list of them, or None"
    return _one_each(
        values, count, "lora_request", expected, lambda each: each is None or isinstance(each, LoRARequest)
    )


def _one_each(values: Any, count: int, name: str, expected: str, is_one: Callable[[Any], bool]) -> list[Any]:
    """Return a value for each prompt, given one for all of them or a list; raises `ArgumentError` for anything else."""
    if is_one(values):
        return [values] * count
    items = list(values) if isinstance(values, Iterable) and not isinstance(values, Mapping | str) else [values]
    wrong = [item for item in items if not is_one(item)]
    if wrong:
        raise ArgumentError(f"{name} must be {expected}, got {shown(wrong[0])}")
    if len(items) != count:
        raise ArgumentError(f"there are {count} prompts and {len(items)} {name}")
    return items
