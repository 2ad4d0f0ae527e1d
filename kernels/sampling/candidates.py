"""The candidates of a row's threshold, so that top-k and top-p search only a few logits.

Each block of a row has a sketch: a histogram of its logits' distances from the block's maximum, with bins of an eighth,
a quarter and a half. The sketches and the blocks' maxima bound the tokens, or the weight, above any logit. Logits that
are surely above the threshold are summed and raced at once, those surely below it are dropped; the rest, a bin or two,
are the candidates. The bounds are verified by sums of integers, so their rounding cannot change a token.
"""

from ..native.optional_triton import tl, triton
from .philox import noise_of_block
from .race import best_of, race_keys
from .token_filters import weights_of

SKETCH_BINS = 128
BLOCK_SUMS = 3  # int64 [3, BLOCKS] of a row, see `take_blocks`


@triton.jit
def sketch_bin(distance):
    """Return the bin of float32 distances >= 0: 64 bins of 1/8, 32 of 1/4, 31 of 1/2, one for larger ones and NaN."""
    near = tl.where(distance < 32.0, distance, 32.0)
    position = tl.where(near < 8.0, 8.0 * near, tl.where(near < 16.0, 4.0 * near + 32.0, 2.0 * near + 64.0))
    return tl.minimum(position.to(tl.int32), 127)


@triton.jit
def bin_begin(bins):
    """Return the lower bound of bins; the last one has no upper bound."""
    position = bins.to(tl.float32)
    begin = tl.where(
        bins < 64, position * 0.125, tl.where(bins < 96, (position - 32.0) * 0.25, (position - 64.0) * 0.5)
    )
    return tl.where(bins < 128, begin, float("inf"))


@triton.jit
def candidate_window(sketch, block_max, block_sum, temperature, largest, k, top_p, by_count, META: tl.constexpr):
    """Return the range of logits that contains a row's threshold; larger ones are kept.

    A token 25 below the largest logit has weight 0, and is never a candidate.

    Args:
        sketch: pointer to int32 [BLOCKS, BINS], of logits over the temperature.
        block_max: pointer to float32 [BLOCKS], before the temperature.
        block_sum: pointer to float32 [BLOCKS], sums of exponentials relative to the block's maximum, after the
            temperature.
        temperature: the row's temperature.
        largest: largest logit over the temperature, finite.
        k: required tokens.
        top_p: required share of the weight, in [0, 1).
        by_count: whether `k` applies, not `top_p`.
    """
    offsets = tl.arange(0, META.BLOCKS_PADDED * META.BINS)
    bins, blocks = offsets % META.BINS, offsets // META.BINS
    counts = tl.load(sketch + offsets, mask=blocks < META.BLOCKS, other=0).to(tl.float32)
    maxima = tl.load(block_max + blocks, mask=blocks < META.BLOCKS, other=float("-inf"))
    distances = largest - tl.div_rn(maxima, temperature)
    nearest, farthest = distances + bin_begin(bins), distances + bin_begin(bins + 1)
    at_most = counts * tl.where(by_count, 1.0, tl.exp(-nearest))
    at_least = counts * tl.where(by_count, 1.0, tl.exp(-farthest))
    each = tl.arange(0, META.BLOCKS_PADDED)
    block_largest = tl.load(block_max + each, mask=each < META.BLOCKS, other=float("-inf"))
    sums = tl.load(block_sum + each, mask=each < META.BLOCKS, other=0.0)
    total = tl.sum(tl.exp(tl.div_rn(block_largest, temperature) - largest) * sums, axis=0)
    light = (1.0 - top_p) * total  # weight that may be left out; weights are multiples of 2^-36
    few = META.BLOCKS * META.BLOCK - k + 0.5  # ids past the vocabulary are in the last bin
    surely_small = tl.where(by_count, few, light * 0.9999 - total * 4e-6)
    maybe_small = tl.where(by_count, few, light * 1.0001 + total * 4e-6)
    far, too_near = 200, -1  # in eighths: beyond `far` there is surely little enough, at `too_near` maybe too much
    near, too_far = 0, 201  # from `near` on there is surely too much, at `too_far` maybe little enough
    for _ in range(8):
        middle = (far + too_near) // 2
        is_far = tl.sum(tl.where(farthest > middle * 0.125, at_most, 0.0), axis=0) <= surely_small
        far, too_near = tl.where(is_far, middle, far), tl.where(is_far, too_near, middle)
        middle = (near + too_far) // 2
        is_near = tl.sum(tl.where(nearest >= middle * 0.125, at_least, 0.0), axis=0) >= maybe_small
        near, too_far = tl.where(is_near, middle, near), tl.where(is_near, too_far, middle)
    slack = tl.abs(largest) * 5e-7  # rounding of the subtractions
    least = tl.maximum(largest - far * 0.125 - slack, largest - 25.0)
    return least, tl.minimum(largest - near * 0.125 + slack, largest)


@triton.jit
def take_blocks(row_memory, vocab, largest, least, most, params, lowest_weight, is_thresholded, META: tl.constexpr):
    """Draw from a program's blocks of a row above the window [least, most], and list the candidates inside it.

    For each block it writes the best key of tokens above the window, of at least `lowest_weight`, and its id; and for
    rows with a threshold, to `sums`, int64 [3, BLOCKS], the number (or weight) above the window, and the weights of the
    candidates and of all.
    """
    for block in range(tl.program_id(1), META.BLOCKS, tl.num_programs(1)):
        columns = block * META.BLOCK + tl.arange(0, META.BLOCK)
        values = tl.load(row_memory.scaled + columns, mask=columns < vocab, other=float("-inf"))
        weights = weights_of(values, largest)
        above = values > most
        racing = above & (weights >= lowest_weight)
        key = tl.full([], float("-inf"), dtype=tl.float32)
        token = tl.full([], 2147483647, dtype=tl.int32)
        if tl.max(racing.to(tl.int32), axis=0) > 0:
            keys = race_keys(
                values - largest, noise_of_block(params.seed, params.position, block * META.BLOCK, META.BLOCK)
            )
            key, token = best_of(tl.where(racing, keys, float("-inf")), columns)
        tl.store(row_memory.keys + block, key)
        tl.store(row_memory.ids + block, token)
        if is_thresholded:
            measures = tl.where(params.by_count, 1, weights)
            between = (values >= least) & (values <= most)
            tl.store(row_memory.sums + block, tl.sum(tl.where(above, measures, 0), axis=0))
            tl.store(row_memory.sums + META.BLOCKS + block, tl.sum(tl.where(between, weights, 0), axis=0))
            tl.store(row_memory.sums + 2 * META.BLOCKS + block, tl.sum(weights, axis=0))
            picked = between.to(tl.int32)
            count = tl.sum(picked, axis=0)
            if count > 0:
                offsets = (
                    tl.atomic_add(row_memory.candidate_count, count, sem="relaxed") + tl.cumsum(picked, axis=0) - 1
                )
                fits = between & (offsets < META.CAPACITY)
                tl.store(row_memory.candidates + offsets, values, mask=fits)
                tl.store(row_memory.candidate_ids + offsets, columns, mask=fits)
