"""The sum over the ranks of one machine, through a board of memory that they share."""

from torch import Tensor

from ..native.registration import operator
from ..native.signature import Int64, Written
from .board import WORDS, place_bytes_of, place_of
from .meeting import meet


@operator(is_compiled=True, constants=WORDS)
def shared_all_reduce(x: Written[Tensor], board: Written[Int64], rank: int, ranks: int) -> None:
    """Replace `x` by its sum over all ranks, with the same bits on each: they are added in the order of the ranks.

    Each rank writes its numbers once and reads those of all. Where a rank is gone or late, `x` is left as it is, and
    the board says so; see `board.py`.

    Args:
        x: [rows, columns], contiguous, on a CPU.
        board: int64, the shared memory.
        rank: of the caller.
        ranks: how many there are.
    """
    flat, most = x.view(-1), place_bytes_of(board, ranks) // x.element_size()
    for piece in flat.split(most):
        count = piece.numel()
        meeting = meet(board, rank, ranks, 2 * count, piece)
        if meeting is None:
            return
        places = [place_of(board, ranks, each, meeting, x.dtype)[:count].float() for each in range(ranks)]
        total = places[0]
        for place in places[1:]:
            total = total + place
        piece.copy_(total)
