"""All-reduce and all-gather over the ranks of one machine, through a shared-memory segment (the board).

The board begins with cache lines: the first for all ranks, then one for each rank, which only that rank writes. After
them each rank has two data areas, which it uses alternately: before a rank writes one again, all others have arrived at
the barrier in between, so they have read it.
"""

import functools
import time
from itertools import pairwise

import torch
from torch import Tensor

from ..native.registration import Int64, Written, operator

LINE = 8  # words of 8 bytes
MOST_RANKS = 64
LATE = 0  # word of the first line: 1 + the rank that is missing; MOST_RANKS more: the rank joined with other work
LIMIT_MS = 1  # word of the first line: how long ranks wait for each other
ARRIVED = 0  # word of a rank's line: barriers that it has joined
OPERATION = 1  # two words of a rank's line: what it computes, so that ranks detect a mismatch
CORE = 3  # word of a rank's line: 1 + the core that it last ran on; 0: unknown
HEADER = LINE * (1 + MOST_RANKS)  # words before the data

WORDS = {"BOARD_LINE": LINE, "BOARD_LATE": LATE, "BOARD_LIMIT_MS": LIMIT_MS, "BOARD_HEADER": HEADER}
WORDS |= {"BOARD_ARRIVED": ARRIVED, "BOARD_OPERATION": OPERATION, "BOARD_MOST_RANKS": MOST_RANKS, "BOARD_CORE": CORE}


def board_words(ranks: int, area_bytes: int) -> int:
    """Return the size of a board with data areas of `area_bytes`, in words of 8 bytes."""
    return HEADER + 2 * ranks * -(-area_bytes // (8 * LINE)) * LINE


def area_bytes_of(board: Tensor, ranks: int) -> int:
    """Return the bytes of a data area of a board."""
    return (board.numel() - HEADER) // (2 * ranks) // LINE * LINE * 8


def area_of(board: Tensor, ranks: int, rank: int, barrier: int, dtype: torch.dtype) -> Tensor:
    """Return a rank's data area for a barrier, as a tensor of a dtype."""
    words = area_bytes_of(board, ranks) // 8
    begin = HEADER + (barrier % 2 * ranks + rank) * words
    return board[begin : begin + words].view(dtype)


_LOOK_SECONDS = 5e-5


def rendezvous(board: Tensor, rank: int, ranks: int, operation: int, data: Tensor) -> int | None:
    """Write data to the board, and wait for all ranks; return the barrier's number, None if a rank is missing.

    It is the reference of `shared_collectives.c`, and serves dtypes without a C kernel.

    Args:
        board: the shared memory.
        rank: the caller's rank.
        ranks: number of ranks.
        operation: operation and size; the same on all ranks.
        data: contiguous.
    """
    words = board[:HEADER].numpy()
    lines = words.reshape(-1, LINE)
    barrier = int(lines[1 + rank, ARRIVED]) + 1
    if words[LATE]:
        return None
    area_of(board, ranks, rank, barrier, data.dtype)[: data.numel()].copy_(data.reshape(-1))
    lines[1 + rank, OPERATION + barrier % 2] = operation
    lines[1 + rank, ARRIVED] = barrier
    waited = 0.0
    for other in range(ranks):
        while lines[1 + other, ARRIVED] < barrier:
            time.sleep(_LOOK_SECONDS)
            waited += _LOOK_SECONDS
            if not words[LATE] and waited * 1000 > words[LIMIT_MS]:
                words[LATE] = other + 1
            if words[LATE]:
                return None
        if lines[1 + other, OPERATION + barrier % 2] != operation:
            words[LATE] = MOST_RANKS + other + 1
            return None
    return barrier


@operator(is_compiled=True, constants=WORDS)
def shared_all_reduce(x: Written[Tensor], board: Written[Int64], rank: int, ranks: int) -> None:
    """Replace `x` by its sum over all ranks, added in the order of the ranks: all ranks get the same bits.

    Each rank writes its numbers once and reads those of all. If a rank has exited or is late, `x` is left unchanged,
    and the board says so.

    Args:
        x: [rows, columns], contiguous, on a CPU.
        board: int64, the shared memory.
        rank: the caller's rank.
        ranks: number of ranks.
    """
    flat, most = x.view(-1), area_bytes_of(board, ranks) // x.element_size()
    for piece in flat.split(most):
        count = piece.numel()
        barrier = rendezvous(board, rank, ranks, 2 * count, piece)
        if barrier is None:
            return
        areas = (area_of(board, ranks, each, barrier, x.dtype)[:count].float() for each in range(ranks))
        piece.copy_(functools.reduce(torch.add, areas))


@operator(is_compiled=True, constants=WORDS)
def shared_all_gather(out: Written[Tensor], part: Tensor, board: Written[Int64], rank: int, ranks: int) -> None:
    """Write the columns of all ranks into `out`; rank r has those from `columns * r // ranks` on.

    If a rank has exited or is late, `out` is left unchanged, and the board says so.

    Args:
        out: [rows, columns], contiguous, on a CPU.
        part: [rows, the caller's columns], contiguous.
        board: int64, the shared memory; its data areas hold at least the widest row of a rank.
        rank: the caller's rank.
        ranks: number of ranks.
    """
    columns = out.shape[1]
    bounds = [columns * each // ranks for each in range(ranks + 1)]
    most = area_bytes_of(board, ranks) // (-(-columns // ranks) * out.element_size())
    for whole, part_rows in zip(out.split(most), part.split(most), strict=True):
        barrier = rendezvous(board, rank, ranks, 2 * len(part_rows) * columns + 1, part_rows)
        if barrier is None:
            return
        for each, (begin, end) in enumerate(pairwise(bounds)):
            area = area_of(board, ranks, each, barrier, out.dtype)[: len(part_rows) * (end - begin)]
            whole[:, begin:end].copy_(area.view(len(part_rows), end - begin))
