"""How ranks meet on a board, in Python: what `meeting.h` does, for dtypes that no kernel in C takes, and its oracle."""

import time

from torch import Tensor

from .board import ARRIVED, BROUGHT, HEADER, LATE, LIMIT_MS, LINE, MOST_RANKS, place_of

_LOOK_SECONDS = 5e-5


def meet(board: Tensor, rank: int, ranks: int, brought: int, data: Tensor) -> int | None:
    """Put data on the board, and wait until all ranks have; return the meeting's number, None where one is missing.

    Args:
        board: the shared memory.
        rank: of the caller.
        ranks: how many there are.
        brought: what is computed, and how much; the same on all ranks.
        data: contiguous.
    """
    words = board[:HEADER].numpy()
    lines = words.reshape(-1, LINE)
    meeting = int(lines[1 + rank, ARRIVED]) + 1
    if words[LATE]:
        return None
    place_of(board, ranks, rank, meeting, data.dtype)[: data.numel()].copy_(data.reshape(-1))
    lines[1 + rank, BROUGHT + meeting % 2] = brought
    lines[1 + rank, ARRIVED] = meeting
    waited = 0.0
    for other in range(ranks):
        while lines[1 + other, ARRIVED] < meeting:
            time.sleep(_LOOK_SECONDS)
            waited += _LOOK_SECONDS
            if not words[LATE] and waited * 1000 > words[LIMIT_MS]:
                words[LATE] = other + 1
            if words[LATE]:
                return None
        if lines[1 + other, BROUGHT + meeting % 2] != brought:
            words[LATE] = MOST_RANKS + other + 1
            return None
    return meeting
