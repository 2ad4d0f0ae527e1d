"""What a cache says when it cannot do as it is asked; whatever raises one of these has changed nothing."""


class CacheFullError(ValueError):
    """There are not enough free pages."""


class UnknownSequenceError(ValueError):
    """No sequence of that id is in the cache."""
