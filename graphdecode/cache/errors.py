"""What a cache says when it cannot do as it is asked; whatever raises one of these has changed nothing."""

from graphdecode.errors import GraphdecodeError


class CacheFullError(GraphdecodeError, ValueError):
    """There are not enough free pages."""


class UnknownSequenceError(GraphdecodeError, ValueError):
    """No sequence of that id is in the cache."""
