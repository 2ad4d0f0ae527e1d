"""The first of the sampler's two launches: what each block of a row has to say of its logits."""

from torch import Tensor

from ..native.early_start import early_start_options, wait_and_trigger
from ..native.optional_triton import tl, triton
from .candidates import sketch_bin
from .logit_processing import COUNT_MASK, processed_logits
from .logprobs import store_block_sums
from .sampler_memory import SamplerMemory
from .sampling_slots import (
    BAD_WORD_LENGTH,
    FLAG_BAD_WORDS,
    FLAG_BIAS,
    FLAG_LOGPROBS,
    FLAG_PENALTIES,
    FLAG_SAMPLE,
    FLAG_STOP_MASK,
    FLAG_TOKEN_MASK,
    MASK_BITS,
    SamplingSlots,
)


# One program reads one block of one row and finds its largest logit, after bias, penalties and what is forbidden: that
# is all a greedy row needs. For rows that draw it also writes the logits over the temperature, in fp32, their sketch
# (see `candidates`) and the sum of their exponentials; for rows with log-probabilities the sum of exponentials of the
# model's own logits. A NaN counts as +inf, so that the maximum tells of it. It leaves the counters of the next launch
# at 0, which nobody else uses while it runs.
@triton.jit
def _block_max_kernel(
    block_max,
    block_id,
    block_sum,
    own_max,
    own_sum,
    sketch,
    scaled,
    counters,
    logits,
    positions,
    live_rows,
    sampling_flags,
    temperature,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    bias_ids,
    bias_values,
    stop_ids,
    min_position,
    token_mask,
    bad_words,
    token_counts,
    recent_tokens,
    vocab,
    logits_stride,
    counts_stride,
    scaled_stride,
    LOGPROBS_FLAG: tl.constexpr,
    PENALTIES: tl.constexpr,
    SAMPLE_FLAG: tl.constexpr,
    PENALTIES_FLAG: tl.constexpr,
    BIAS_FLAG: tl.constexpr,
    STOP_MASK_FLAG: tl.constexpr,
    TOKEN_MASK_FLAG: tl.constexpr,
    BAD_WORDS: tl.constexpr,
    BAD_WORDS_FLAG: tl.constexpr,
    COUNT_BITS: tl.constexpr,
    BIASES: tl.constexpr,
    STOPS: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_and_trigger()
    row = tl.program_id(0)
    block = tl.program_id(1)
    if block == 0:
        tl.store(counters + 2 * row, 0)
        tl.store(counters + 2 * row + 1, 0)
        if row == 0:
            tl.store(counters + 2 * tl.num_programs(0), 0)
            tl.store(counters + 2 * tl.num_programs(0) + 1, 0)
    live = tl.load(live_rows)
    flags = tl.load(sampling_flags + row)
    position = tl.load(positions + row) + 1
    warmth = tl.load(temperature + row)
    if row < live:
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocab
        wide_row = row.to(tl.int64)
        place = row * tl.num_programs(1) + block
        values = tl.load(logits + wide_row * logits_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
        if (flags & LOGPROBS_FLAG) != 0:
            store_block_sums(own_max, own_sum, place, values)
        values = processed_logits(
            values,
            columns,
            inside,
            row,
            flags,
            position,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            bias_ids,
            bias_values,
            stop_ids,
            min_position,
            token_mask,
            bad_words,
            token_counts,
            counts_stride,
            recent_tokens,
            PENALTIES,
            PENALTIES_FLAG,
            BIAS_FLAG,
            STOP_MASK_FLAG,
            TOKEN_MASK_FLAG,
            BAD_WORDS,
            BAD_WORDS_FLAG,
            COUNT_BITS,
            BIASES,
            STOPS,
            MASK_WORDS,
            BITS,
            WORDS,
            LENGTH,
        )
        values = tl.where(values != values, float("inf"), values)
        largest = tl.max(values, axis=0)
        tl.store(block_max + place, largest)
        tl.store(block_id + place, tl.min(tl.where(values == largest, columns, 2147483647), axis=0))
        if (flags & SAMPLE_FLAG) != 0:
            values = tl.div_rn(values, warmth)
            tl.store(scaled + wide_row * scaled_stride + columns, values, mask=inside)
            distances = tl.where(values > float("-inf"), tl.div_rn(largest, warmth) - values, 32.0)
            tl.store(block_sum + place, tl.sum(tl.where(values > float("-inf"), tl.exp(-distances), 0.0), axis=0))
            counts = tl.histogram(sketch_bin(distances), BINS)
            tl.store(sketch + place.to(tl.int64) * BINS + tl.arange(0, BINS), counts)


def launch_block_max(
    memory: SamplerMemory,
    logits: Tensor,
    positions: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    token_counts: Tensor | None,
    recent_tokens: Tensor | None,
) -> None:
    """Launch the kernel; see `sample` for what rows ask.

    Args:
        memory: what is written.
        logits: [b, vocab].
        positions: int32 [b].
        live_rows: int32 [1].
        slots: of the rows.
        token_counts: int32 [b, vocab] or None.
        recent_tokens: int32 [b, BAD_WORD_LENGTH] or None.
    """
    _block_max_kernel[(logits.shape[0], memory.blocks)](
        memory.block_max,
        memory.block_id,
        memory.block_sum,
        memory.own_max,
        memory.own_sum,
        memory.sketch,
        memory.scaled,
        memory.counters,
        logits,
        positions,
        live_rows,
        slots.sampling_flags,
        slots.temperature,
        slots.repetition_penalty,
        slots.presence_penalty,
        slots.frequency_penalty,
        slots.bias_ids,
        slots.bias_values,
        slots.stop_ids,
        slots.min_position,
        slots.token_mask,
        slots.bad_words,
        token_counts,
        recent_tokens,
        logits.shape[1],
        logits.stride(0),
        0 if token_counts is None else token_counts.stride(0),
        memory.scaled.stride(0),
        LOGPROBS_FLAG=FLAG_LOGPROBS,
        PENALTIES=token_counts is not None,
        SAMPLE_FLAG=FLAG_SAMPLE,
        PENALTIES_FLAG=FLAG_PENALTIES,
        BIAS_FLAG=FLAG_BIAS,
        STOP_MASK_FLAG=FLAG_STOP_MASK,
        TOKEN_MASK_FLAG=FLAG_TOKEN_MASK,
        BAD_WORDS=recent_tokens is not None,
        BAD_WORDS_FLAG=FLAG_BAD_WORDS,
        COUNT_BITS=COUNT_MASK,
        BIASES=slots.bias_ids.shape[1],
        STOPS=slots.stop_ids.shape[1],
        MASK_WORDS=slots.token_mask.shape[1],
        BITS=MASK_BITS,
        WORDS=slots.bad_words.shape[1],
        LENGTH=BAD_WORD_LENGTH,
        BINS=memory.sketch.shape[-1],
        BLOCK=memory.block,
        num_warps=16,
        **early_start_options(logits.device),
    )
