"""The columns that the ranks of one machine have, side by side, through a board of memory that they share."""

from itertools import pairwise

from torch import Tensor

from ..native.registration import operator
from ..native.signature import Int64, Written
from .board import WORDS, place_bytes_of, place_of
from .meeting import meet


@operator(is_compiled=True, constants=WORDS)
def shared_all_gather(out: Written[Tensor], part: Tensor, board: Written[Int64], rank: int, ranks: int) -> None:
    """Write the columns of all ranks into `out`; rank r has those from `columns * r // ranks` on.

    Where a rank is gone or late, `out` is left as it is, and the board says so; see `board.py`.

    Args:
        out: [rows, columns], contiguous, on a CPU.
        part: [rows, the caller's columns], contiguous.
        board: int64, the shared memory; a place of it holds the widest row of a rank at least.
        rank: of the caller.
        ranks: how many there are.
    """
    columns = out.shape[1]
    bounds = [columns * each // ranks for each in range(ranks + 1)]
    most = place_bytes_of(board, ranks) // (-(-columns // ranks) * out.element_size())
    for whole, own in zip(out.split(most), part.split(most), strict=True):
        meeting = meet(board, rank, ranks, 2 * len(own) * columns + 1, own)
        if meeting is None:
            return
        for each, (begin, end) in enumerate(pairwise(bounds)):
            place = place_of(board, ranks, each, meeting, out.dtype)[: len(own) * (end - begin)]
            whole[:, begin:end].copy_(place.view(len(own), end - begin))
