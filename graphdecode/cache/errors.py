"""What a cache says when it cannot do as it is asked; whatever raises one of these has changed nothing."""

from numbers import Integral, Real

from torch import Tensor, device

from graphdecode.errors import GraphdecodeError, shown

_LARGEST = 3.4e38  # of float32


class CacheFullError(GraphdecodeError, ValueError):
    """There are not enough free pages."""


class UnknownSequenceError(GraphdecodeError, ValueError):
    """No sequence of that id is in the cache."""


def require_positive(**values: object) -> None:
    """Raise a ValueError naming the first of these arguments that is not an integer >= 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {shown(value)}")


def require_integers(**values: object) -> None:
    """Raise a ValueError naming the first of these arguments that is no integer of 32 bits."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or not -(2**31) <= int(value) < 2**31:
            raise ValueError(f"{name} must be an integer of 32 bits, got {shown(value)}")


def require_numbers(**values: object) -> None:
    """Raise a ValueError naming the first of these arguments that is no finite number; None is left out."""
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, Real) or isinstance(value, bool) or not -_LARGEST < value < _LARGEST:  # type: ignore[operator]
            raise ValueError(f"{name} must be a finite number, got {shown(value)}")


def require_tensors(where: device | None = None, **values: object) -> None:
    """Raise a ValueError naming the first of these arguments that is no tensor, or is none on that device."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {shown(value)}")
        if where is not None and value.device != where:
            raise ValueError(f"{name} must be on {where}, got one on {value.device}")


def require_hashable(**values: object) -> None:
    """Raise a ValueError naming the first of these arguments that can be no key of a dict."""
    for name, value in values.items():
        try:
            hash(value)
        except TypeError:
            raise ValueError(f"{name} must be hashable, got {shown(value)}") from None
