"""Choose the next token of each row from its logits, by what the row's slots ask for.

Greedy rows take the largest logit, the lowest id on ties. Other rows divide by the temperature and keep
- top-k: the k largest logits, and those equal to the k-th;
- top-p (Holtzman et al., 2020): of these, the likeliest whose mass reaches top_p, and those equal to the last;
- min-p (Nguyen et al., 2024): of these, those at least min_p times as likely as the likeliest;
and then invert the cumulative distribution of what is kept, in the order of ids, at one uniform number that is a
function of (seed, position).

A row has no choice where a logit is NaN or +inf, where all are masked (-inf), or where the temperature drives the
largest out of float32's range: it gets the code that says so (`sampling_slots`), and no token.

Probabilities are integers here (`token_filters`). Sums of integers do not depend on their order, so the token is the
same whatever the tiling, the row, the bucket or the company.
"""

import numpy as np
import torch
from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Int32, Int64, Written
from .logit_processing import (
    COUNT_MASK,
    add_bias,
    apply_penalties,
    mask_bad_words,
    mask_stops,
    mask_tokens,
    processed_logits,
)
from .logprobs import token_logprobs
from .philox import uniform_bits, uniform_bits_of
from .sampling_slots import (
    BAD_WORD_LENGTH,
    DEAD_TOKEN,
    FLAG_BAD_WORDS,
    FLAG_BIAS,
    FLAG_LOGPROBS,
    FLAG_PENALTIES,
    FLAG_SAMPLE,
    FLAG_STOP_MASK,
    FLAG_TOKEN_MASK,
    MASK_BITS,
    TOO_COLD,
    WITHOUT_FINITE,
    WITHOUT_NUMBERS,
    LogprobOutputs,
    SamplingSlots,
)
from .token_filters import fraction_of_total, kept_total, kept_weights, ordered_key, sample_row, threshold_key

_BLOCK = 4096
_CONSTANTS = {
    "DEAD_TOKEN": DEAD_TOKEN,
    "COUNT_MASK": COUNT_MASK,
    "FLAG_SAMPLE": FLAG_SAMPLE,
    "FLAG_LOGPROBS": FLAG_LOGPROBS,
    "FLAG_PENALTIES": FLAG_PENALTIES,
    "FLAG_BIAS": FLAG_BIAS,
    "FLAG_STOP_MASK": FLAG_STOP_MASK,
    "FLAG_TOKEN_MASK": FLAG_TOKEN_MASK,
    "FLAG_BAD_WORDS": FLAG_BAD_WORDS,
    "MASK_BITS": MASK_BITS,
    "BAD_WORD_LENGTH": BAD_WORD_LENGTH,
    "WITHOUT_NUMBERS": WITHOUT_NUMBERS,
    "WITHOUT_FINITE": WITHOUT_FINITE,
    "TOO_COLD": TOO_COLD,
}


# One program reads one block of one row and finds its largest logit, after bias, penalties and what is forbidden: that
# is all a greedy row needs. For other rows it also writes the logits over the temperature, in fp32. A NaN counts as
# +inf, so that the maximum tells of it.
@triton.jit
def _block_max_kernel(
    block_max,
    block_id,
    scaled,
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
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    if row < tl.load(live_rows):
        flags = tl.load(sampling_flags + row)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocab
        wide_row = row.to(tl.int64)
        values = tl.load(logits + wide_row * logits_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
        values = processed_logits(
            values,
            columns,
            inside,
            row,
            flags,
            tl.load(positions + row) + 1,
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
        place = row * tl.num_programs(1) + block
        tl.store(block_max + place, largest)
        tl.store(block_id + place, tl.min(tl.where(values == largest, columns, 2147483647), axis=0))
        if (flags & SAMPLE_FLAG) != 0:
            tl.store(scaled + wide_row * vocab + columns, tl.div_rn(values, tl.load(temperature + row)), mask=inside)


# One program per row. A greedy row reduces the blocks' maxima and is done. For others it reads the row's scaled
# logits, which are in L2: once for the total, once at most to find the token, and a few times per threshold.
@triton.jit
def _choose_kernel(
    sampled,
    block_max,
    block_id,
    scaled,
    positions,
    live_rows,
    sampling_flags,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    vocab,
    SAMPLE_FLAG: tl.constexpr,
    DEAD: tl.constexpr,
    NUMBERS_MISS: tl.constexpr,
    FINITE_MISS: tl.constexpr,
    COLD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.full([], DEAD, dtype=tl.int32)
    if row < tl.load(live_rows):
        blocks = tl.arange(0, BLOCKS_PADDED)
        maxima = tl.load(block_max + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=float("-inf"))
        ids = tl.load(block_id + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=2147483647)
        largest = tl.max(maxima, axis=0)
        token = tl.min(tl.where(maxima == largest, ids, 2147483647), axis=0)
        draws = (tl.load(sampling_flags + row) & SAMPLE_FLAG) != 0
        code = tl.where(largest == float("inf"), NUMBERS_MISS, 0)
        code = tl.where(largest == float("-inf"), FINITE_MISS, code)
        if draws & (code == 0):
            largest = tl.div_rn(largest, tl.load(temperature + row))
            code = tl.where(tl.abs(largest) < float("inf"), 0, COLD)
        if draws & (code == 0):
            line = scaled + row.to(tl.int64) * vocab
            lowest_key = ordered_key(tl.full([], float("-inf"), dtype=tl.float32))
            lowest_weight = tl.full([], 1, dtype=tl.int64)
            k = tl.load(top_k + row)
            if (k > 0) & (k < vocab):
                lowest_key = threshold_key(line, vocab, largest, lowest_key, k.to(tl.int64), False, BLOCK, BLOCKS)
            share = tl.load(top_p + row)
            if share < 1.0:
                total = kept_total(line, vocab, largest, lowest_key, lowest_weight, BLOCK, BLOCKS)
                needed = tl.maximum(fraction_of_total(total, (share * 16777216.0).to(tl.int64)), 1)
                lowest_key = threshold_key(line, vocab, largest, lowest_key, needed, True, BLOCK, BLOCKS)
            least = tl.load(min_p + row)
            if least > 0.0:
                lowest_weight = tl.maximum((least * 68719476736.0).to(tl.int64), 1)
            total = kept_total(line, vocab, largest, lowest_key, lowest_weight, BLOCK, BLOCKS)
            bits = uniform_bits_of(tl.load(seed + row), tl.load(positions + row) + 1)
            target = fraction_of_total(total, bits)
            before = total * 0
            block = 0
            inside = tl.sum(kept_weights(line, 0, vocab, largest, lowest_key, lowest_weight, BLOCK), axis=0)
            while (before + inside <= target) & (block < BLOCKS - 1):
                before += inside
                block += 1
                inside = tl.sum(kept_weights(line, block, vocab, largest, lowest_key, lowest_weight, BLOCK), axis=0)
            weights = kept_weights(line, block, vocab, largest, lowest_key, lowest_weight, BLOCK)
            columns = block * BLOCK + tl.arange(0, BLOCK)
            reached = before + tl.cumsum(weights, axis=0) > target
            token = tl.min(tl.where(reached, columns, 2147483647), axis=0)
        token = tl.where(code == 0, tl.minimum(token, vocab - 1), code)
    tl.store(sampled + row, token.to(tl.int64))


def sample_triton(
    sampled: Tensor,
    logits: Tensor,
    positions: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    token_counts: Tensor | None,
    recent_tokens: Tensor | None,
    block: int = _BLOCK,
) -> None:
    """Launch the kernels, `block` ids of the vocabulary per program or pass; see `sample`."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, block)
    block_max = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    block_id = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    scaled = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    _block_max_kernel[(rows, blocks)](
        block_max,
        block_id,
        scaled,
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
        vocab,
        logits.stride(0),
        0 if token_counts is None else token_counts.stride(0),
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
        BLOCK=block,
        num_warps=8,
    )
    _choose_kernel[(rows,)](
        sampled,
        block_max,
        block_id,
        scaled,
        positions,
        live_rows,
        slots.sampling_flags,
        slots.temperature,
        slots.top_k,
        slots.top_p,
        slots.min_p,
        slots.seed,
        vocab,
        SAMPLE_FLAG=FLAG_SAMPLE,
        DEAD=DEAD_TOKEN,
        NUMBERS_MISS=WITHOUT_NUMBERS,
        FINITE_MISS=WITHOUT_FINITE,
        COLD=TOO_COLD,
        BLOCK=block,
        BLOCKS=blocks,
        BLOCKS_PADDED=triton.next_power_of_2(blocks),
        num_warps=16,
    )


def most_likely(logits: np.ndarray) -> int:
    """Return the largest logit's id, or why there is no choice; float32 [vocab]."""
    token = int(logits.argmax())  # a NaN counts as the largest
    largest = logits[token]
    return token if np.isfinite(largest) else WITHOUT_FINITE if largest < 0 else WITHOUT_NUMBERS


def _is_served(
    sampled: Tensor,
    logits: Tensor,
    positions: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    token_counts: Tensor | None,
    recent_tokens: Tensor | None,
) -> bool:
    return logits.stride(1) == 1


@operator(triton_version=sample_triton, is_compiled=_is_served, constants=_CONSTANTS)
def _sample(
    sampled: Written[Int64],
    logits: Tensor,
    positions: Int32,
    live_rows: Int32,
    slots: SamplingSlots,
    token_counts: Int32 | None,
    recent_tokens: Int32 | None,
) -> None:
    """Write the next token of each live row; see `sample`."""
    live = int(live_rows.item())
    tokens = sampled.numpy()
    tokens[live:] = DEAD_TOKEN
    for row, flags in enumerate(slots.sampling_flags.numpy()[:live].tolist()):
        line = logits[row].float().numpy()  # numpy's argmax is several times faster than torch's
        if not flags & ~FLAG_LOGPROBS:
            tokens[row] = most_likely(line)
            continue
        if logits.dtype == torch.float32:
            line = line.copy()
        position = int(positions[row]) + 1
        if flags & FLAG_BIAS:
            add_bias(line, slots.bias_ids.numpy()[row], slots.bias_values.numpy()[row])
        if flags & FLAG_PENALTIES and token_counts is not None:
            apply_penalties(
                line,
                token_counts.numpy()[row],
                slots.repetition_penalty.numpy()[row],
                slots.presence_penalty.numpy()[row],
                slots.frequency_penalty.numpy()[row],
            )
        if flags & FLAG_STOP_MASK and position < slots.min_position.numpy()[row]:
            mask_stops(line, slots.stop_ids.numpy()[row])
        if flags & FLAG_TOKEN_MASK:
            mask_tokens(line, slots.token_mask.numpy()[row])
        if flags & FLAG_BAD_WORDS and recent_tokens is not None:
            mask_bad_words(line, slots.bad_words.numpy()[row], recent_tokens.numpy()[row], position)
        tokens[row] = most_likely(line)
        if not flags & FLAG_SAMPLE or tokens[row] < 0:
            continue
        tokens[row] = sample_row(
            line,
            uniform_bits(int(slots.seed.numpy()[row]), position),
            slots.temperature.numpy()[row],
            int(slots.top_k.numpy()[row]),
            slots.top_p.numpy()[row],
            slots.min_p.numpy()[row],
        )


def sample(
    sampled: Tensor,
    logits: Tensor,
    positions: Tensor,
    live_rows: Tensor,
    slots: SamplingSlots,
    token_counts: Tensor | None = None,
    recent_tokens: Tensor | None = None,
    logprobs: LogprobOutputs | None = None,
) -> None:
    """Write the next token of each live row into `sampled`, and log-probabilities where a row wants them.

    Args:
        sampled: int64 [b]; dead rows get token 1, rows without a choice a code below -1.
        logits: [b, vocab], any float dtype, rows contiguous.
        positions: int32 [b], where the token stands that was fed; the new one's position is one more.
        live_rows: int32 [1]; nothing of the rows from there on is read.
        slots: what each row asks for.
        token_counts: int32 [b, vocab] of the penalties; None: no row has penalties, whatever the flags say.
        recent_tokens: int32 [b, BAD_WORD_LENGTH], see `advance`; None: no row has bad words, whatever the flags say.
        logprobs: written for live rows with FLAG_LOGPROBS, see `token_logprobs`; None: for no row.
    """
    _sample(sampled, logits, positions, live_rows, slots, token_counts, recent_tokens)
    if logprobs is not None:
        token_logprobs(logprobs, logits, sampled, live_rows, slots.sampling_flags, slots.num_logprobs)
