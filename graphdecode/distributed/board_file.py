"""The memory that ranks of one machine share: a file without a name, mapped by all."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from graphdecode.kernels.collective.board import LIMIT_MS, board_words

_PLACE_BYTES = 4 << 20  # of one rank's data in a meeting; memory that is never written is never taken
_MEMORY = Path("/dev/shm")


def new_board(ranks: int, limit_seconds: float) -> tuple[int, Tensor]:
    """Return the descriptor of a new board, and the board; memory goes when the last process has closed it.

    Args:
        ranks: that share it.
        limit_seconds: how long they wait for one another.
    """
    with tempfile.TemporaryFile(dir=_MEMORY if _MEMORY.is_dir() else None) as file:
        file.truncate(8 * board_words(ranks, _PLACE_BYTES))
        descriptor = os.dup(file.fileno())
    board = mapped_board(descriptor)
    board[LIMIT_MS] = round(1000 * limit_seconds)
    return descriptor, board


def mapped_board(descriptor: int) -> Tensor:
    """Return the board of a descriptor, int64 [words]."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.int64)
