"""Readers of the fields of an untrusted configuration, such as config.json.

Each raises an `UnsupportedModelError` with the field, its value and what it must be; callers add the file's name.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from graphdecode.errors import UnsupportedModelError, shown
from graphdecode.hub.model_path import refuse_pointer, require_file

MOST = 2**31 - 1  # limit of fields that are not in `LIMITS` (int32)
LIMITS = {  # several times the largest models; each layer and expert allocates memory before a tensor is read
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 512,  # limit of the attention kernels, as the next two
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 512,
    "v_head_dim": 512,
    "q_lora_rank": 2**17,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "n_routed_experts": 4096,
}
_MOST_TOKEN_IDS = 128  # the engine's default
_MOST_NUMBER = 1e30  # well inside float32
_MOST_BYTES = 256 * 2**20  # of a JSON file; the largest known index has 10 MB


@contextmanager
def errors_name(source: object) -> Iterator[None]:
    """Let the messages of UnsupportedModelErrors begin with a file, or what else is read."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{source}: {error}") from error


def count(settings: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 1) -> int:
    """Return an integer field >= `least`, within `LIMITS`; `default`, if any, if it is absent or null."""
    value = _value(settings, name, default)
    if value is None:
        raise UnsupportedModelError(f"the field {name} is missing")
    most = LIMITS.get(name, MOST)
    if not _is_integer(value) or value < least:
        raise UnsupportedModelError(f"{name} must be an integer >= {least}, got {shown(value)}")
    if value > most:
        raise UnsupportedModelError(f"{name} must be at most {most}, got {shown(value)}")
    return int(value)


def number(settings: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a finite number field > 0; `default`, if any, if it is absent or null."""
    value = settings.get(name)
    if value is None and default is not None:
        return default
    if not is_positive(value):
        raise UnsupportedModelError(f"{name} must be a number > 0, got {shown(value)}")
    return float(value)


def flag(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a boolean field; `default` if it is absent or null."""
    value = _value(settings, name, default)
    if not isinstance(value, bool):
        raise UnsupportedModelError(f"{name} must be true or false, got {shown(value)}")
    return value


def choice(settings: Mapping[str, Any], name: str, choices: Iterable[str]) -> str:
    """Return a field whose value is one of `choices`."""
    value = settings.get(name)
    known = tuple(choices)
    if not isinstance(value, str) or value not in known:
        named = "is missing" if value is None else f"{shown(value)} is not supported"
        raise UnsupportedModelError(f"{name} {named}; supported are {', '.join(known)}")
    return value


def layer_numbers(settings: Mapping[str, Any], name: str) -> list[int] | None:
    """Return a list of layers; None if the field is missing or null."""
    value = settings.get(name)
    if value is not None and not (isinstance(value, list) and all(map(_is_integer, value))):
        raise UnsupportedModelError(f"{name} must be a list of layers, got {shown(value)}")
    return value


def eos_token_ids(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return `eos_token_id`, a token id or a list of them; () if it is absent or null."""
    name = "eos_token_id"
    value = settings.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(_is_integer, ids)):
        raise UnsupportedModelError(f"{name} must be a token id or a list of them, got {shown(value)}")
    if not all(0 <= token <= MOST for token in ids):
        raise UnsupportedModelError(f"{name} must be in 0..{MOST}, got {shown(value)}")
    distinct = tuple(dict.fromkeys(ids))
    if len(distinct) > _MOST_TOKEN_IDS:
        raise UnsupportedModelError(f"{name} must be at most {_MOST_TOKEN_IDS} tokens, got {len(distinct)}")
    return distinct


def is_positive(value: Any) -> TypeGuard[float]:
    """Whether a value is a number > 0, not a bool, that fits float32, as does its inverse."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1 / _MOST_NUMBER <= value <= _MOST_NUMBER


def _value(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    return default if settings.get(name) is None else settings[name]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; an UnsupportedModelError if it holds none. See `read_json_value`."""
    content = read_json_value(path)
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} is not a JSON object")
    return content


def read_json_value(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        UnsupportedModelError: it cannot be read, or is too large.
        ModelSourceError: see `require_file` and `refuse_pointer`.
    """
    require_file(path)
    refuse_pointer(path)
    try:
        size = path.stat().st_size
        content = json.loads(path.read_text(encoding="utf-8")) if size <= _MOST_BYTES else None
    except OSError as error:
        raise UnsupportedModelError(f"{path}: {error.strerror}") from error
    except RecursionError as error:
        raise UnsupportedModelError(f"{path} is nested too deeply") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise UnsupportedModelError(f"{path} is not JSON: {error}") from error
    if size > _MOST_BYTES:
        raise UnsupportedModelError(f"{path} has {size} bytes; at most {_MOST_BYTES} are read")
    return content
