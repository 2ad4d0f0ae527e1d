"""What goes wrong between ranks."""

from graphdecode.errors import GraphdecodeError


class RankError(GraphdecodeError, RuntimeError):
    """A rank died, stalled, failed, or wanted something else than the others; the message names it."""
