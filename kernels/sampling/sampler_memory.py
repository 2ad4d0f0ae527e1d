"""Memory between the sampler's two launches, and their constants."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..model.advance import AdvanceState
from ..native.optional_triton import triton
from .candidates import BLOCK_SUMS, SKETCH_BINS
from .follow_automata import Guides
from .sampling_slots import LogprobOutputs, SamplingSlots

_LIST_BLOCK = 1024  # candidates processed together
_MASK_BLOCK = 8192  # mask words copied at a time, for 262,144 tokens


class SamplerMeta(NamedTuple):
    """Constants of the sampler's kernels; padded sizes are powers of two."""

    BLOCK: int  # vocabulary ids per program
    BLOCKS: int  # per row
    BLOCKS_PADDED: int
    CAPACITY: int  # listed candidates per row
    LIST_BLOCK: int  # candidates processed together
    BINS: int  # of a sketch
    PENALTIES: bool  # whether rows may have them
    BAD_WORDS: bool  # whether rows may have them
    LOGPROBS: bool  # whether the rings keep log-probabilities
    FOLLOW: bool  # whether rows may follow an automaton
    BIASES: int  # entries of a row's bias
    STOPS: int  # stop ids of a row
    STOPS_PADDED: int
    WORDS: int  # bad words of a row
    MASK_WORDS: int  # words of a row's token mask
    MASK_BLOCK: int  # words copied at a time
    TOPS: int  # top tokens of a row
    TOPS_PADDED: int
    RING_ROWS: int  # rows of the rings, padded
    CLASSES: int  # token classes of an automaton

    @classmethod
    def of(
        cls,
        vocab: int,
        state: AdvanceState,
        outputs: LogprobOutputs,
        slots: SamplingSlots,
        guides: Guides | None,
        block: int,
        capacity: int,
    ) -> Self:
        """Return the constants for these tensors."""
        blocks = -(-vocab // block)
        stops, words, tops = slots.stop_ids.shape[1], slots.token_mask.shape[1], outputs.top_ids.shape[1]
        return cls(
            BLOCK=block,
            BLOCKS=blocks,
            BLOCKS_PADDED=triton.next_power_of_2(blocks),
            CAPACITY=capacity,
            LIST_BLOCK=min(_LIST_BLOCK, block),
            BINS=SKETCH_BINS,
            PENALTIES=state.token_counts is not None,
            BAD_WORDS=state.recent_tokens is not None,
            LOGPROBS=state.ring_logprob is not None,
            FOLLOW=guides is not None,
            BIASES=slots.bias_ids.shape[1],
            STOPS=stops,
            STOPS_PADDED=triton.next_power_of_2(stops),
            WORDS=slots.bad_words.shape[1],
            MASK_WORDS=words,
            MASK_BLOCK=min(_MASK_BLOCK, triton.next_power_of_2(words)),
            TOPS=tops,
            TOPS_PADDED=triton.next_power_of_2(tops),
            RING_ROWS=triton.next_power_of_2(state.ring_tokens.shape[1]),
            CLASSES=0 if guides is None else guides.automaton_next.shape[1],
        )


class SamplerSizes(NamedTuple):
    """Sizes and strides for the sampler's kernels."""

    vocab: int  # ids
    logits_stride: int  # of rows, in elements
    scaled_stride: int  # of `SamplerMemory.scaled`
    counts_stride: int  # of `token_counts`
    ring_length: int  # steps in the rings
    ring_rows: int  # of the rings

    @classmethod
    def of(cls, logits: Tensor, scaled: Tensor, state: AdvanceState) -> Self:
        """Return the sizes and strides of these tensors."""
        counts_stride = 0 if state.token_counts is None else state.token_counts.stride(0)
        return cls(logits.shape[1], logits.stride(0), scaled.stride(0), counts_stride, *state.ring_tokens.shape)


class SamplerMemory(NamedTuple):
    """Scratch memory of one step's sampling."""

    block_max: Tensor  # float32 [b, blocks], the largest logits after all processing
    block_key: Tensor  # float32 [b, blocks], the largest keys of `race_keys`
    block_id: Tensor  # int32 [b, blocks], the ids of the largest keys, in greedy rows of the largest logits
    block_sum: Tensor  # float32 [b, blocks], see `candidate_window`
    raw_max: Tensor  # float32 [b, blocks], the largest unprocessed logits
    raw_sum: Tensor  # float32 [b, blocks], see `store_block_sums`
    sketch: Tensor  # int32 [b, blocks, bins], see `candidates`
    # float32 [b, blocks * block + capacity], a row's scaled logits, then its candidates
    scaled: Tensor
    candidate_ids: Tensor  # int32 [b, capacity]
    sums: Tensor  # int64 [b, 3, blocks], see `take_blocks`
    # int32 [2 b + 2]: finished programs and candidates of each row; finished rows, and how many continue
    counters: Tensor

    @classmethod
    def allocate(cls, rows: int, meta: SamplerMeta, device: torch.device) -> Self:
        """Allocate memory for a number of rows."""
        blocks = meta.BLOCKS

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        return cls(
            empty(rows, blocks),
            empty(rows, blocks),
            empty(rows, blocks, dtype=torch.int32),
            empty(rows, blocks),
            empty(rows, blocks),
            empty(rows, blocks),
            empty(rows, blocks, meta.BINS, dtype=torch.int32),
            empty(rows, blocks * meta.BLOCK + meta.CAPACITY),
            empty(rows, meta.CAPACITY, dtype=torch.int32),
            empty(rows, BLOCK_SUMS, blocks, dtype=torch.int64),
            empty(2 * rows + 2, dtype=torch.int32),
        )
