"""What the sampler's first launch leaves for its second one, and what both are compiled for."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..model.advance import AdvanceState
from ..native.optional_triton import triton
from .candidates import BLOCK_SUMS, SKETCH_BINS
from .follow_automata import Guides
from .sampling_slots import LogprobOutputs, SamplingSlots

_LIST_BLOCK = 1024  # candidates that are looked at together
_PARTS = 8  # of a block, of which one is looked at for the token
_MASK_BLOCK = 8192  # words of a mask that are copied at once: those of 262,144 tokens


class SamplerForm(NamedTuple):
    """What the sampler's kernels are compiled for; sizes that are loaded at once are padded to powers of two."""

    BLOCK: int  # ids of the vocabulary that a program takes at once
    BLOCKS: int  # of a row
    BLOCKS_PADDED: int  # the same, padded
    CAPACITY: int  # candidates of a row that are listed
    LIST_BLOCK: int  # of these, how many are looked at together
    PARTS: int  # of a block
    BINS: int  # of a sketch
    PENALTIES: bool  # whether rows may have them
    BAD_WORDS: bool  # whether rows may have them
    LOGPROBS: bool  # whether the rings keep log-probabilities
    FOLLOW: bool  # whether rows may follow an automaton
    BIASES: int  # entries of a row's bias
    STOPS: int  # stop ids of a row
    STOPS_PADDED: int  # the same, padded
    WORDS: int  # bad words of a row
    MASK_WORDS: int  # words of a row's token mask
    MASK_BLOCK: int  # of these, how many are copied at once
    TOPS: int  # likeliest tokens of a row
    TOPS_PADDED: int  # the same, padded
    RING_ROWS: int  # rows of the rings, padded
    CLASSES: int  # of tokens in an automaton

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
        """Return the form for the end of a step over these."""
        blocks = -(-vocab // block)
        stops, words, tops = slots.stop_ids.shape[1], slots.token_mask.shape[1], outputs.top_ids.shape[1]
        return cls(
            BLOCK=block,
            BLOCKS=blocks,
            BLOCKS_PADDED=triton.next_power_of_2(blocks),
            CAPACITY=capacity,
            LIST_BLOCK=min(_LIST_BLOCK, block),
            PARTS=_PARTS,
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
    """Numbers of a step that the sampler's kernels are given."""

    vocab: int  # ids
    logits_stride: int  # elements from one row's logits to those of the next
    scaled_stride: int  # of `SamplerMemory.scaled`
    counts_stride: int  # of the counts of tokens
    ring_length: int  # steps that the rings keep
    ring_rows: int  # of the rings

    @classmethod
    def of(cls, logits: Tensor, scaled: Tensor, state: AdvanceState) -> Self:
        """Return the numbers of these."""
        counts_stride = 0 if state.token_counts is None else state.token_counts.stride(0)
        return cls(logits.shape[1], logits.stride(0), scaled.stride(0), counts_stride, *state.ring_tokens.shape)


class SamplerMemory(NamedTuple):
    """Memory of one step's sampling; nothing in it outlives the step, and nothing need be in it before."""

    block_max: Tensor  # float32 [b, blocks], the largest logits after all processing
    block_id: Tensor  # int32 [b, blocks], their ids
    block_sum: Tensor  # float32 [b, blocks], see `candidate_window`
    own_max: Tensor  # float32 [b, blocks], the largest of the model's own logits
    own_sum: Tensor  # float32 [b, blocks], see `store_block_sums`
    sketch: Tensor  # int32 [b, blocks, bins], see `candidates`
    # float32 [b, blocks * block + capacity], a row's logits over the temperature, and then its candidates
    scaled: Tensor
    candidate_ids: Tensor  # int32 [b, capacity]
    sums: Tensor  # int64 [b, 4, blocks], see `take_blocks`
    # int32 [2 b + 2]: programs of each row that are done, and its candidates; rows that are done, and those of them
    # that go on
    counters: Tensor

    @classmethod
    def allocate(cls, rows: int, form: SamplerForm, device: torch.device) -> Self:
        """Return memory for some rows."""
        blocks = form.BLOCKS

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        return cls(
            empty(rows, blocks),
            empty(rows, blocks, dtype=torch.int32),
            empty(rows, blocks),
            empty(rows, blocks),
            empty(rows, blocks),
            empty(rows, blocks, form.BINS, dtype=torch.int32),
            empty(rows, blocks * form.BLOCK + form.CAPACITY),
            empty(rows, form.CAPACITY, dtype=torch.int32),
            empty(rows, BLOCK_SUMS, blocks, dtype=torch.int64),
            empty(2 * rows + 2, dtype=torch.int32),
        )
