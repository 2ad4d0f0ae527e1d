"""What happens to a row's logits before a token is chosen: bias, penalties, stop mask; in this order, in fp32.

Bias adds to the logits of up to 64 ids. The repetition penalty (Keskar et al., 2019, "CTRL", section 4.1)
divides a positive logit and multiplies a negative one, for each token that the prompt or the output has. The
presence penalty subtracts once for each token that the output has, the frequency penalty once for each time.
The stop mask forbids the stop ids as long as the row is shorter than its minimum.
"""

import numpy as np

from ..native.optional_triton import tl, triton
from .sampling_slots import PROMPT_BIT

COUNT_MASK = PROMPT_BIT - 1


@triton.jit
def processed_logits(
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
    token_counts,
    counts_stride,
    PENALTIES: tl.constexpr,
    PENALTIES_FLAG: tl.constexpr,
    BIAS_FLAG: tl.constexpr,
    STOP_MASK_FLAG: tl.constexpr,
    COUNT_BITS: tl.constexpr,
    BIASES: tl.constexpr,
    STOPS: tl.constexpr,
):
    """The logits `values` of the vocabulary ids `columns` of a row, after what its flags ask for.

    `position` is that of the token to be sampled. A row with no flag costs nothing.
    """
    if (flags & BIAS_FLAG) != 0:
        for index in range(BIASES):
            biased_id = tl.load(bias_ids + row * BIASES + index)
            bias = tl.load(bias_values + row * BIASES + index)
            values = tl.where((columns == biased_id) & (biased_id >= 0), values + bias, values)
    if PENALTIES:  # noqa: SIM102 - decided at compile time; the other at run time
        if (flags & PENALTIES_FLAG) != 0:
            counts = tl.load(token_counts + row.to(tl.int64) * counts_stride + columns, mask=inside, other=0)
            generated = (counts & COUNT_BITS).to(tl.float32)
            repetition = tl.load(repetition_penalty + row)
            presence = tl.load(presence_penalty + row)
            frequency = tl.load(frequency_penalty + row)
            repeated = tl.where(values > 0, values / repetition, values * repetition)
            values = tl.where(counts != 0, repeated, values)
            values = tl.where(generated > 0, values - presence - frequency * generated, values)
    if (flags & STOP_MASK_FLAG) != 0:  # noqa: SIM102 - only rows with the flag load
        if position < tl.load(min_position + row):
            for index in range(STOPS):
                stop_id = tl.load(stop_ids + row * STOPS + index)
                values = tl.where(columns == stop_id, float("-inf"), values)
    return values


def add_bias(logits: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
    """Add `values` to the logits of `ids` in place; ids < 0 are unused.

    Args:
        logits: float32 [vocab].
        ids: int32 [n], distinct where >= 0.
        values: float32 [n].
    """
    used = ids >= 0
    logits[ids[used]] += values[used]


def apply_penalties(
    logits: np.ndarray, counts: np.ndarray, repetition: float, presence: float, frequency: float
) -> None:
    """Apply the three penalties in place.

    Args:
        logits: float32 [vocab].
        counts: int32 [vocab], see `sampling_slots.PROMPT_BIT`.
        repetition: 1 is off.
        presence: 0 is off.
        frequency: 0 is off.
    """
    seen = np.flatnonzero(counts)
    values = logits[seen]
    generated = (counts[seen] & COUNT_MASK).astype(np.float32)
    values = np.where(values > 0, values / np.float32(repetition), values * np.float32(repetition))
    values -= np.float32(presence) * (generated > 0) + np.float32(frequency) * generated
    logits[seen] = values


def mask_stops(logits: np.ndarray, stop_ids: np.ndarray) -> None:
    """Forbid the stop ids in place; ids < 0 are unused.

    Args:
        logits: float32 [vocab].
        stop_ids: int32 [n].
    """
    logits[stop_ids[stop_ids >= 0]] = -np.inf
