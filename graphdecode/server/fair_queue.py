"""Turns among callers: who asks for much waits behind who asks for little, and nobody for ever.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a request's turn is the virtual time at which its caller's
earlier requests would all have been served, were callers served side by side; virtual time is the turn of what began
last.
"""

from __future__ import annotations

from collections import OrderedDict

CALLERS_KEPT = 10_000


class FairQueue:
    """Gives requests their turns."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: OrderedDict[str, float] = OrderedDict()  # caller -> when all that it asked for is served

    def turn(self, caller: str, tokens: int) -> float:
        """Return the turn of a request; the lowest comes first.

        Args:
            caller: whose it is; of the many that there may be, who has not asked for longest is forgotten.
            tokens: that it takes at most.
        """
        turn = max(self._now, self._ends.pop(caller, 0.0))
        self._ends[caller] = turn + tokens
        if len(self._ends) > CALLERS_KEPT:
            self._ends.popitem(last=False)
        return turn

    def began(self, turn: float) -> None:
        """Take note that a request got its row."""
        self._now = max(self._now, turn)
