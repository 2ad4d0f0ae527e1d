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
    """What the sampler's kernels are compiled for; sizes that are loaded at once are padded to powers of two.

    Attributes:
        BLOCK: ids of the vocabulary that a program takes at once.
        BLOCKS: of a row.
        BLOCKS_PADDED: the same, padded.
        CAPACITY: candidates of a row that are listed.
        LIST_BLOCK: of these, how many are looked at together.
        PARTS: of a block.
        BINS: of a sketch.
        PENALTIES: whether rows may have them.
        BAD_WORDS: whether rows may have them.
        LOGPROBS: whether the rings keep log-probabilities.
        FOLLOW: whether rows may follow an automaton.
        BIASES: entries of a row's bias.
        STOPS: stop ids of a row.
        STOPS_PADDED: the same, padded.
        WORDS: bad words of a row.
        MASK_WORDS: words of a row's token mask.
        MASK_BLOCK: of these, how many are copied at once.
        TOPS: likeliest tokens of a row.
        TOPS_PADDED: the same, padded.
        RING_ROWS: rows of the rings, padded.
        CLASSES: of tokens in an automaton.
    """

    BLOCK: int
    BLOCKS: int
    BLOCKS_PADDED: int
    CAPACITY: int
    LIST_BLOCK: int
    PARTS: int
    BINS: int
    PENALTIES: bool
    BAD_WORDS: bool
    LOGPROBS: bool
    FOLLOW: bool
    BIASES: int
    STOPS: int
    STOPS_PADDED: int
    WORDS: int
    MASK_WORDS: int
    MASK_BLOCK: int
    TOPS: int
    TOPS_PADDED: int
    RING_ROWS: int
    CLASSES: int

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
    """Numbers of a step that the sampler's kernels are given.

    Attributes:
        vocab: ids.
        logits_stride: elements from one row's logits to those of the next.
        scaled_stride: of `SamplerMemory.scaled`.
        counts_stride: of the counts of tokens.
        ring_length: steps that the rings keep.
        ring_rows: of the rings.
    """

    vocab: int
    logits_stride: int
    scaled_stride: int
    counts_stride: int
    ring_length: int
    ring_rows: int

    @classmethod
    def of(cls, logits: Tensor, scaled: Tensor, state: AdvanceState) -> Self:
        """Return the numbers of these."""
        counts_stride = 0 if state.token_counts is None else state.token_counts.stride(0)
        return cls(logits.shape[1], logits.stride(0), scaled.stride(0), counts_stride, *state.ring_tokens.shape)


class SamplerMemory(NamedTuple):
    """Memory of one step's sampling; nothing in it outlives the step, and nothing need be in it before.

    Attributes:
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
