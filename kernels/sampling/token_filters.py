"""The tokens that top-k, top-p and min-p keep: thresholds, and the integer weights of tokens.

`weight = trunc(exp(logit - max) * 2^36)`, logits already divided by the temperature. Sums of integers do not depend on
their order. A token 2^36 times less likely than the most likely one has weight 0, and no filter keeps it. The largest
weight is 2^36, and the sum over 2^18 tokens stays below 2^54.

A threshold is the largest logit t such that {logits >= t} is large enough: in tokens for top-k, in weight for top-p.
Logits equal to the threshold are kept. The torch versions sort; the kernels search, reading the row a few times.
"""

import numpy as np
import torch

from ..native.optional_triton import tl, triton

_WEIGHT_SCALE = float(2**36)
_SHARE_BITS = 24  # of top_p, as an integer
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
def kept_weight(line, count, largest, lowest_key, BLOCK: tl.constexpr):
    """Return the weight, int64, of those of `count` logits whose keys are not below the lowest."""
    sums = tl.zeros([BLOCK], dtype=tl.int64)
    for block in range(tl.cdiv(count, BLOCK)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(line + columns, mask=columns < count, other=float("-inf"))
        sums += tl.where(ordered_key(values) >= lowest_key, weights_of(values, largest), 0)
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
    share = int(np.float32(top_p) * np.float32(1 << _SHARE_BITS))
    needed = max((int(weights.sum()) * share) >> _SHARE_BITS, 1)
    for count in (min(_FEW, len(logits)), len(logits)):
        order = torch.topk(torch.from_numpy(logits), count, sorted=True).indices.numpy()
        mass = np.cumsum(weights[order])
        if mass[-1] >= needed:
            break
    return logits[order[np.searchsorted(mass, needed)]].item()


def kept_tokens(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return which tokens of one row are kept, bool [vocab].

    Args:
        logits: float32 [vocab], over the temperature; the largest is finite.
        top_k: <= 0 is off.
        top_p: >= 1 is off.
        min_p: <= 0 is off.
    """
    by_count = 0 < top_k < len(logits)
    if not by_count and top_p >= 1.0 and min_p <= 0.0:
        return logits > -np.inf
    scaled = np.exp(logits - logits.max())
    scaled *= np.float32(_WEIGHT_SCALE)
    weights = scaled.astype(np.int64)
    if by_count:
        weights[logits < np.partition(logits, -top_k)[-top_k]] = 0
    if top_p < 1.0:
        weights[logits < _top_p_threshold(logits, weights, top_p)] = 0
    least = int(np.float32(min_p) * np.float32(_WEIGHT_SCALE)) if min_p > 0.0 else 0  # min_p of the largest weight
    return weights >= max(least, 1)
