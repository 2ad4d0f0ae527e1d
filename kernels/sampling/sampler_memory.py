"""What the sampler's first launch leaves for its second one."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from .candidates import BLOCK_SUMS, SKETCH_BINS


class SamplerMemory(NamedTuple):
    """Memory of one step's sampling; nothing in it outlives the step, and nothing need be in it before.

    Attributes:
        block: ids of the vocabulary that a program takes at once.
        blocks: of a row.
        capacity: candidates of a row that are listed.
        block_max: float32 [b, blocks], the largest logits after all processing.
        block_id: int32 [b, blocks], their ids.
        block_sum: float32 [b, blocks], see `candidate_window`.
        own_max: float32 [b, blocks], the largest of the model's own logits.
        own_sum: float32 [b, blocks], see `store_block_sums`.
        sketch: int32 [b, blocks, bins], see `candidates`.
        scaled: float32 [b, blocks * block + capacity], a row's logits over the temperature, and then its candidates.
        candidate_ids: int32 [b, capacity].
        sums: int64 [b, 4, blocks], see `take_blocks`.
        counters: int32 [2 b + 2]: programs of each row that are done, and its candidates; rows that are done, and those
            of them that go on.
    """

    block: int
    blocks: int
    capacity: int
    block_max: Tensor
    block_id: Tensor
    block_sum: Tensor
    own_max: Tensor
    own_sum: Tensor
    sketch: Tensor
    scaled: Tensor
    candidate_ids: Tensor
    sums: Tensor
    counters: Tensor

    @classmethod
    def allocate(cls, logits: Tensor, block: int, capacity: int) -> Self:
        """Return memory for the rows of some logits."""
        rows, vocab = logits.shape
        blocks = -(-vocab // block)

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=logits.device)

        return cls(
            block,
            blocks,
            capacity,
            empty(rows, blocks),
            empty(rows, blocks, dtype=torch.int32),
            empty(rows, blocks),
            empty(rows, blocks),
            empty(rows, blocks),
            empty(rows, blocks, SKETCH_BINS, dtype=torch.int32),
            empty(rows, blocks * block + capacity),
            empty(rows, capacity, dtype=torch.int32),
            empty(rows, BLOCK_SUMS, blocks, dtype=torch.int64),
            empty(2 * rows + 2, dtype=torch.int32),
        )
