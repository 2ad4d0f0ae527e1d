"""Thresholds of top-k and top-p, and the integer weights of tokens.

`weight = trunc(exp(logit - max) * 2^36)`, logits already divided by the temperature. Sums of integers do not depend on
their order. A token 2^36 times less likely than the most likely one has weight 0, which a uniform number of 24 bits
could not select anyway. The largest weight is 2^36, and the sum over 2^18 tokens stays below 2^54.

A threshold is the largest logit t such that {logits >= t} is large enough: in tokens for top-k, in weight for top-p.
Logits equal to the threshold are kept. The torch versions sort; the kernels search, reading the row a few times.
"""

import numpy as np
import torch

from ..native.optional_triton import tl, triton
from .philox import UNIFORM_BITS
from .sampling_slots import TOO_COLD

_WEIGHT_SCALE = float(2**36)
_FEW = 1024  # candidates to try before sorting the whole vocabulary


@triton.jit
def fraction_of_total(total, bits):
    """Return floor(total * bits / 2^24) for int64 total < 2^62 and int64 bits <= 2^24, without overflow."""
    return (total >> 24) * bits + (((total & 0xFFFFFF) * bits) >> 24)


@triton.jit
def ordered_key(values):
    """Return int32 keys with the order of the float32 values; zeros are equal. Its own inverse on the bits."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def weights_of(values, largest):
    """Return the int64 weights of float32 logits; `largest` is finite."""
    return (tl.exp(values - largest) * 68719476736.0).to(tl.int64)


@triton.jit
def kept_weights(line, columns, count, largest, lowest_key, lowest_weight):
    """Return weights of some of `count` logits, 0 for keys or weights below the lowest."""
    values = tl.load(line + columns, mask=columns < count, other=float("-inf"))
    weights = weights_of(values, largest)
    return tl.where((ordered_key(values) >= lowest_key) & (weights >= lowest_weight), weights, 0)


@triton.jit
def kept_total(line, count, largest, lowest_key, lowest_weight, BLOCK: tl.constexpr):
    """Return the sum of `kept_weights` over `count` logits, int64."""
    sums = tl.zeros([BLOCK], dtype=tl.int64)
    for block in range(tl.cdiv(count, BLOCK)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        sums += kept_weights(line, columns, count, largest, lowest_key, lowest_weight)
    return tl.sum(sums, axis=0)


@triton.jit
def threshold_key(line, count, largest, low, high, needed, by_count, BLOCK: tl.constexpr):
    """Return the threshold's key: the largest whose set of logits measures at least `needed` (int64, >= 1).

    `line` points to float32 logits, `largest` is the row's. The threshold lies in [low, high]: the set of `low` is
    large enough. Each pass over the logits cuts the interval to a quarter, or to the keys that occur in it.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        width = high - low
        first = low + (width + 3) // 4
        second = low + (width + 1) // 2
        third = low + (3 * width + 3) // 4
        first_sums = tl.zeros([BLOCK], dtype=tl.int64)
        second_sums = tl.zeros([BLOCK], dtype=tl.int64)
        third_sums = tl.zeros([BLOCK], dtype=tl.int64)
        smallest_keys = tl.zeros([BLOCK], dtype=tl.int32) + 2147483647
        largest_keys = tl.zeros([BLOCK], dtype=tl.int32) - 2147483647
        for block in range(tl.cdiv(count, BLOCK)):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            inside = columns < count
            values = tl.load(line + columns, mask=inside, other=float("-inf"))
            keys = ordered_key(values)
            measures = tl.where(by_count, inside.to(tl.int64), weights_of(values, largest))
            first_sums += tl.where(keys >= first, measures, 0)
            second_sums += tl.where(keys >= second, measures, 0)
            third_sums += tl.where(keys >= third, measures, 0)
            smallest_keys = tl.minimum(smallest_keys, tl.where(keys >= low, keys, 2147483647))
            largest_keys = tl.maximum(largest_keys, tl.where(keys <= high, keys, -2147483647))
        reached_first = tl.sum(first_sums, axis=0) >= needed
        reached_second = tl.sum(second_sums, axis=0) >= needed
        reached_third = tl.sum(third_sums, axis=0) >= needed
        next_low = tl.where(reached_third, third, tl.where(reached_second, second, tl.where(reached_first, first, low)))
        next_high = tl.where(
            reached_third, high, tl.where(reached_second, third, tl.where(reached_first, second, first)) - 1
        )
        low = tl.maximum(next_low, tl.min(smallest_keys, axis=0).to(tl.int64))
        high = tl.minimum(next_high, tl.max(largest_keys, axis=0).to(tl.int64))
    return low.to(tl.int32)


def _top_p_threshold(logits: np.ndarray, weights: np.ndarray, top_p: float) -> float:
    """Return the largest logit such that logits >= it have `top_p` of the int64 weights."""
    share = int(np.float32(top_p) * np.float32(1 << UNIFORM_BITS))
    needed = max((int(weights.sum()) * share) >> UNIFORM_BITS, 1)
    for count in (min(_FEW, len(logits)), len(logits)):
        order = torch.topk(torch.from_numpy(logits), count, sorted=True).indices.numpy()
        mass = np.cumsum(weights[order])
        if mass[-1] >= needed:
            break
    return logits[order[np.searchsorted(mass, needed)]].item()


def sample_row(logits: np.ndarray, uniform: int, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """Return a token drawn from one row, or TOO_COLD.

    Args:
        logits: float32 [vocab], processed, the largest finite; overwritten.
        uniform: 24 uniform bits.
        temperature: > 0.
        top_k: <= 0 is off.
        top_p: >= 1 is off.
        min_p: <= 0 is off.
    """
    with np.errstate(over="ignore"):
        logits /= np.float32(temperature)
        if not np.isfinite(logits.max()):
            return TOO_COLD
        scaled = np.exp(logits - logits.max())
        scaled *= np.float32(_WEIGHT_SCALE)
        weights = scaled.astype(np.int64)
    if 0 < top_k < len(logits):
        weights[logits < np.partition(logits, -top_k)[-top_k]] = 0
    if top_p < 1.0:
        weights[logits < _top_p_threshold(logits, weights, top_p)] = 0
    if min_p > 0.0:
        weights[weights < int(np.float32(min_p) * np.float32(_WEIGHT_SCALE))] = 0  # least weight: min_p of the largest
    cumulative = np.cumsum(weights)
    target = (int(cumulative[-1]) * uniform) >> UNIFORM_BITS
    return int(np.searchsorted(cumulative, target, side="right"))
