"""Where the tokens and log-probabilities of finished steps wait for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_TOKEN_WORDS = 2 + 1 + 1  # 32-bit words of one row's step: a token, its log-probability and rank


def step_bytes(logprobs: int) -> int:
    """Return the bytes of one row's step, with so many of the most likely tokens."""
    return 4 * (_TOKEN_WORDS + 2 * logprobs)


class Rings(NamedTuple):
    """Views of one block of the host's memory.

    A GPU writes what a step has to tell straight into it: the kernel that has a row's token stores it here, and no copy
    follows. Only steps with drafts read their tokens back.
    """

    memory: Tensor  # int32, the whole block
    tokens: Tensor  # int64 [length, rows]; -1 where a row had finished before
    logprob: Tensor  # float32 [length, rows], of the sampled tokens
    rank: Tensor  # int32 [length, rows], theirs among all tokens
    top_logprobs: Tensor  # float32 [length, rows, logprobs], of the most likely ones
    top_ids: Tensor  # int32 [length, rows, logprobs]

    @classmethod
    def allocate(cls, length: int, rows: int, logprobs: int, *, pin_memory: bool) -> Rings:
        """Return rings of `length` steps of `rows` rows, with so many most likely tokens; pinned for a GPU."""
        entries = length * rows
        tops = entries * logprobs
        size = entries * _TOKEN_WORDS + 2 * tops
        memory = torch.zeros(size, dtype=torch.int32, pin_memory=pin_memory)
        tokens, logprob, rank, top_logprobs, top_ids = memory.split([2 * entries, entries, entries, tops, tops])
        tokens.fill_(-1)
        return cls(
            memory,
            tokens.view(torch.int64).view(length, rows),
            logprob.view(torch.float32).view(length, rows),
            rank.view(length, rows),
            top_logprobs.view(torch.float32).view(length, rows, logprobs),
            top_ids.view(length, rows, logprobs),
        )
