"""The tensors in an operator's arguments and results, which nest in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leaves(value: Any) -> list[Any]:
    """Return what is neither tuple, list nor dict, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return [value]
    return [leaf for member in value for leaf in leaves(member)]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same nest with a function's results for leaves; named tuples become plain ones."""
    if isinstance(value, dict):
        return {key: mapped(function, member) for key, member in value.items()}
    if isinstance(value, tuple):
        return tuple(mapped(function, member) for member in value)
    if isinstance(value, list):
        return [mapped(function, member) for member in value]
    return function(value)
