"""A piece of memory that several processes on one machine share, where they meet: one writes, all others read.

It begins with lines of the processor's cache: the first for all ranks, then one for each rank, which that rank alone
writes. Behind them each rank has two places for data, which it uses by turns: whoever writes the one again has seen
that all others came to the meeting in between, and so have read it.
"""

import torch
from torch import Tensor

LINE = 8  # words of 8 bytes
MOST_RANKS = 64
LATE = 0  # word of the first line: 1 + the rank that did not come, or is gone; MOST_RANKS more: came for something else
LIMIT_MS = 1  # word of the first line: how long the ranks wait for one another
ARRIVED = 0  # word of a rank's line: meetings that it came to
BROUGHT = 1  # words of a rank's line: what it came with by turns, so that ranks which do different things find out
CORE = 3  # word of a rank's line: 1 + the core that it was on when it last came; 0: it does not say
HEADER = LINE * (1 + MOST_RANKS)  # words before the data

WORDS = {"BOARD_LINE": LINE, "BOARD_LATE": LATE, "BOARD_LIMIT_MS": LIMIT_MS, "BOARD_HEADER": HEADER}
WORDS |= {"BOARD_ARRIVED": ARRIVED, "BOARD_BROUGHT": BROUGHT, "BOARD_MOST_RANKS": MOST_RANKS, "BOARD_CORE": CORE}


def board_words(ranks: int, place_bytes: int) -> int:
    """Return the size of a board whose places hold so many bytes each, in words of 8 bytes."""
    return HEADER + 2 * ranks * -(-place_bytes // (8 * LINE)) * LINE


def place_bytes_of(board: Tensor, ranks: int) -> int:
    """Return how many bytes a place of a board holds."""
    return (board.numel() - HEADER) // (2 * ranks) // LINE * LINE * 8


def place_of(board: Tensor, ranks: int, rank: int, meeting: int, dtype: torch.dtype) -> Tensor:
    """Return where a rank puts its data for a meeting, as numbers of a dtype."""
    words = place_bytes_of(board, ranks) // 8
    begin = HEADER + (meeting % 2 * ranks + rank) * words
    return board[begin : begin + words].view(dtype)
