"""Errors of the cache, and checks of arguments."""

from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

from torch import Tensor, device, dtype

from graphdecode.errors import GraphdecodeError, shown

_LARGEST = 3.4e38  # largest float32


class CacheFullError(GraphdecodeError, ValueError):
    """There are not enough free pages."""


class UnknownSequenceError(GraphdecodeError, ValueError):
    """No sequence of that id is in the cache."""


def _require(is_right: Callable[[Any], bool], expected: str, values: dict[str, object]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not is_right(value):
            raise ValueError(f"{name} must be {expected}, got {shown(value)}")


def require_positive(**values: object) -> None:
    """Raise a ValueError naming the first of these arguments that is not an integer >= 1."""
    _require(lambda value: isinstance(value, int) and value >= 1, "an integer >= 1", values)


def require_integers(**values: object) -> None:
    """Raise a ValueError naming the first of these arguments that is not an integer of 32 bits."""
    _require(lambda x: isinstance(x, Integral) and -(2**31) <= int(x) < 2**31, "an integer of 32 bits", values)


def require_numbers(**values: object) -> None:
    """Raise a ValueError naming the first of these arguments that is not a finite number; None is left out."""
    numbers = {name: value for name, value in values.items() if value is not None}
    _require(lambda x: isinstance(x, Real) and -_LARGEST < x < _LARGEST, "a finite number", numbers)  # type: ignore[operator]


def require_positive_numbers(**values: object) -> None:
    """Raise a ValueError naming the first of these arguments that is not a finite number above 0."""
    _require(lambda x: isinstance(x, Real) and 0 < x < _LARGEST, "a finite number above 0", values)  # type: ignore[operator]


def require_share(**values: object) -> None:
    """Raise a ValueError naming the first of these arguments that is not a number in 0..1."""
    _require(lambda x: isinstance(x, Real) and 0 <= x <= 1, "a number in 0..1", values)  # type: ignore[operator]


def require_tensors(where: device | None = None, **values: object) -> None:
    """Raise a ValueError naming the first of these arguments that is not a tensor on that device, or on any (None)."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {shown(value)}")
        if where is not None and value.device != where:
            raise ValueError(f"{name} must be on {where}, got one on {value.device}")


def require_hashable(**values: object) -> None:
    """Raise a ValueError naming the first of these arguments that is not hashable."""
    for name, value in values.items():
        try:
            hash(value)
        except TypeError:
            raise ValueError(f"{name} must be hashable, got {shown(value)}") from None


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise a ValueError if an argument is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def require_fit(name: str, tensor: Tensor, shape: Sequence[int | str], *dtypes: dtype) -> None:
    """Raise a ValueError if a tensor has another shape or dtype; sizes that are names may be any."""
    fits = tensor.dim() == len(shape) and all(
        isinstance(expected, str) or expected == size for expected, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or (dtypes and tensor.dtype not in dtypes):
        expected = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
        sizes = ", ".join(map(str, shape))
        raise ValueError(
            f"{name} must be {expected} [{sizes}], got {tensor.dtype} {list(tensor.shape)}".replace("  ", " ")
        )


def require_range(low: int, high: int, **values: int) -> None:
    """Raise a ValueError naming the first of these arguments that is not an integer in a range."""
    require_integers(**values)
    for name, value in values.items():
        if not low <= value <= high:
            raise ValueError(f"{name} must be in {low}..{high}, got {value}")
