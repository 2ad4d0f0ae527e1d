"""Processing of a row's logits before sampling: bias, penalties, then masks, in fp32.

Bias adds to the logits of some ids. The repetition penalty (Keskar et al., 2019, "CTRL", section 4.1) divides a
positive logit and multiplies a negative one, for each token in the prompt or the output. The presence penalty subtracts
once for each token in the output, the frequency penalty once per occurrence. Stop ids are masked while the row is
shorter than its minimum. The token mask forbids tokens whose bit is not set. A bad word forbids its last token after
its other tokens; bad words of one token are always forbidden.
"""

import numpy as np
from torch import Tensor

from ..native.optional_triton import tl, triton
from .sampling_slots import (
    BAD_WORD_LENGTH,
    COUNT_MASK,
    FLAG_BAD_WORDS,
    FLAG_BIAS,
    FLAG_PENALTIES,
    FLAG_STOP_MASK,
    FLAG_TOKEN_MASK,
    MASK_BITS,
    SamplingSlots,
    masked_only,
)


@triton.jit
def processed_logits(
    values, columns, inside, row, flags, position, slots, state, counts_stride, META: tl.constexpr, K: tl.constexpr
):
    """Return the processed logits `values` of the vocabulary ids `columns` of a row.

    `position` is that of the token to be sampled. Rows without flags cost nothing; of lists only used entries are read.
    """
    wide_row = row.to(tl.int64)
    if (flags & K.FLAG_BIAS) != 0:
        index = 0
        biased_id = tl.load(slots.bias_ids + wide_row * META.BIASES)
        bias = tl.load(slots.bias_values + wide_row * META.BIASES)
        while biased_id >= 0:
            values = tl.where(columns == biased_id, values + bias, values)
            index += 1
            offset = wide_row * META.BIASES + tl.minimum(index, META.BIASES - 1)
            biased_id = tl.where(index < META.BIASES, tl.load(slots.bias_ids + offset), -1)
            bias = tl.load(slots.bias_values + offset)
    if META.PENALTIES:  # noqa: SIM102 - decided at compile time; the other at run time
        if (flags & K.FLAG_PENALTIES) != 0:
            counts = tl.load(state.token_counts + wide_row * counts_stride + columns, mask=inside, other=0)
            generated = (counts & K.COUNT_MASK).to(tl.float32)
            repetition = tl.load(slots.repetition_penalty + row)
            presence = tl.load(slots.presence_penalty + row)
            frequency = tl.load(slots.frequency_penalty + row)
            repeated = tl.where(values > 0, values / repetition, values * repetition)
            values = tl.where(counts != 0, repeated, values)
            values = tl.where(generated > 0, values - (presence + frequency * generated), values)
    if (flags & K.FLAG_STOP_MASK) != 0:
        index = 0
        stop_id = tl.load(slots.stop_ids + wide_row * META.STOPS)
        stop_id = tl.where(position < tl.load(slots.min_position + row), stop_id, -1)
        while stop_id != -1:  # below -1: see `masked_only`
            masked = tl.where(stop_id >= 0, stop_id, -2 - stop_id)
            values = tl.where(columns == masked, float("-inf"), values)
            index += 1
            stop_id = tl.load(slots.stop_ids + wide_row * META.STOPS + tl.minimum(index, META.STOPS - 1))
            stop_id = tl.where(index < META.STOPS, stop_id, -1)
    if (flags & K.FLAG_TOKEN_MASK) != 0:
        allowed = tl.load(slots.token_mask + wide_row * META.MASK_WORDS + columns // K.MASK_BITS, mask=inside, other=0)
        values = tl.where(((allowed >> (columns % K.MASK_BITS)) & 1) != 0, values, float("-inf"))
    if META.BAD_WORDS:  # noqa: SIM102 - decided at compile time
        if (flags & K.FLAG_BAD_WORDS) != 0:
            offsets = tl.arange(0, K.BAD_WORD_LENGTH)
            # the recent tokens at a word's positions, if its last one is at `position`; see `advance`
            past = tl.load(
                state.recent_tokens + wide_row * K.BAD_WORD_LENGTH + (position + 1 + offsets) % K.BAD_WORD_LENGTH
            )
            words = slots.bad_words + wide_row * (META.WORDS * K.BAD_WORD_LENGTH) + offsets
            index = 0
            word = tl.load(words)
            last = tl.max(tl.where(offsets == K.BAD_WORD_LENGTH - 1, word, -1), axis=0)
            while last >= 0:
                differs = (word >= 0) & (word != past) & (offsets < K.BAD_WORD_LENGTH - 1)
                matches = tl.sum(differs.to(tl.int32), axis=0) == 0
                values = tl.where(matches & (columns == last), float("-inf"), values)
                index += 1
                word = tl.where(
                    index < META.WORDS, tl.load(words + tl.minimum(index, META.WORDS - 1) * K.BAD_WORD_LENGTH), -1
                )
                last = tl.max(tl.where(offsets == K.BAD_WORD_LENGTH - 1, word, -1), axis=0)
    return values


def process_row(
    line: np.ndarray,
    row: int,
    flags: int,
    position: int,
    slots: SamplingSlots,
    token_counts: Tensor | None,
    recent_tokens: Tensor | None,
) -> None:
    """Process a row's logits in place.

    Args:
        line: float32 [vocab].
        row: index of the row in the slots.
        flags: the row's sampling flags.
        position: position of the token to be sampled.
        slots: the rows' sampling parameters.
        token_counts: int32 [b, vocab]; None: no row has penalties.
        recent_tokens: int32 [b, BAD_WORD_LENGTH], each at its position modulo BAD_WORD_LENGTH; None: no row has bad
            words.
    """
    if flags & FLAG_BIAS:
        ids = slots.bias_ids.numpy()[row]
        line[ids[ids >= 0]] += slots.bias_values.numpy()[row][ids >= 0]
    if flags & FLAG_PENALTIES and token_counts is not None:
        penalties = (slots.repetition_penalty, slots.presence_penalty, slots.frequency_penalty)
        repetition, presence, frequency = (penalty.numpy()[row] for penalty in penalties)
        counts = token_counts.numpy()[row]
        counted = np.flatnonzero(counts)
        values, generated = line[counted], (counts[counted] & COUNT_MASK).astype(np.float32)
        values = np.where(values > 0, values / repetition, values * repetition)
        line[counted] = values - (presence * (generated > 0) + frequency * generated)
    if flags & FLAG_STOP_MASK and position < slots.min_position.numpy()[row]:
        stop_ids = slots.stop_ids.numpy()[row]
        stop_ids = stop_ids[stop_ids != -1]
        line[np.where(stop_ids >= 0, stop_ids, masked_only(stop_ids))] = -np.inf
    if flags & FLAG_TOKEN_MASK:
        bits = (slots.token_mask.numpy()[row][:, None] >> np.arange(MASK_BITS, dtype=np.int32)) & 1
        line[bits.reshape(-1)[: len(line)] == 0] = -np.inf
    if flags & FLAG_BAD_WORDS and recent_tokens is not None:
        past = recent_tokens.numpy()[row][(position + 1 + np.arange(BAD_WORD_LENGTH - 1)) % BAD_WORD_LENGTH]
        for word in slots.bad_words.numpy()[row]:
            if word[-1] < 0:
                break
            if ((word[:-1] < 0) | (word[:-1] == past)).all():
                line[word[-1]] = -np.inf
