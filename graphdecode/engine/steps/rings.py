"""Where the tokens and log-probabilities of finished steps wait for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.kernels.sampling.sampling_slots import MAX_LOGPROBS

# 32-bit words of one row's step: a token, its log-probability and rank, the most likely ones
_WORDS = 2 + 1 + 1 + 2 * MAX_LOGPROBS


STEP_BYTES = 4 * _WORDS


class Rings(NamedTuple):
    """Views of one block of memory, so that a step brings all of it to the host in one copy.

    Attributes:
        memory: int32, the whole block.
        tokens: int64 [length, rows]; -1 where a row had finished before.
        logprob: float32 [length, rows], of the sampled tokens.
        rank: int32 [length, rows], theirs among all tokens.
        top_logprobs: float32 [length, rows, MAX_LOGPROBS], of the most likely ones.
        top_ids: int32 [length, rows, MAX_LOGPROBS].
    """

    memory: Tensor
    tokens: Tensor
    logprob: Tensor
    rank: Tensor
    top_logprobs: Tensor
    top_ids: Tensor

    @classmethod
    def allocate(cls, length: int, rows: int, device: torch.device | str, *, pin_memory: bool = False) -> Rings:
        """Return rings of `length` steps.

        Args:
            length: steps that the rings hold.
            rows: of the largest batch.
            device: where.
            pin_memory: for a host's copy that a GPU writes.
        """
        entries = length * rows
        memory = torch.zeros(entries * _WORDS, dtype=torch.int32, device=device, pin_memory=pin_memory)
        tops = entries * MAX_LOGPROBS
        tokens, logprob, rank, top_logprobs, top_ids = memory.split([2 * entries, entries, entries, tops, tops])
        tokens.fill_(-1)
        return cls(
            memory,
            tokens.view(torch.int64).view(length, rows),
            logprob.view(torch.float32).view(length, rows),
            rank.view(length, rows),
            top_logprobs.view(torch.float32).view(length, rows, MAX_LOGPROBS),
            top_ids.view(length, rows, MAX_LOGPROBS),
        )
