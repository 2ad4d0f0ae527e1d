"""What a cache says when it cannot do as it is asked; whatever raises one of these has changed nothing."""

from graphdecode.errors import GraphdecodeError


class CacheFullError(GraphdecodeError, ValueError):
    """There are not enough free pages."""


class UnknownSequenceError(GraphdecodeError, ValueError):
    """No sequence of that id is in the cache."""


def require_positive(**values: object) -> None:
    """Raise a ValueError naming the first of these arguments that is not an integer >= 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
