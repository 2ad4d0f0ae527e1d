"""Which of a row's logits a threshold can lie among: what lets top-k and top-p look at a few of them closely.

Each block of a row leaves a sketch: how many of its logits lie how far below the block's largest, in bins of an eighth,
a quarter and a half. From the sketches, and how far the blocks' largest are below the row's, follow bounds of what lies
above any logit: in tokens, or in weight. What is surely above the threshold need only be added up, what is surely below
it is forgotten, and the threshold is among the rest, the candidates: a bin or two. What a bound says is checked by sums
of integers before anybody relies on it, so no rounding of the bounds can change a token.
"""

from ..native.optional_triton import tl, triton
from .token_filters import weights_of

SKETCH_BINS = 128
BLOCK_SUMS = 4  # int64 [4, BLOCKS] of a row, see `take_blocks`


@triton.jit
def sketch_bin(distance):
    """The bin of float32 distances >= 0: 64 bins of 1/8, 32 of 1/4, 31 of 1/2, and one for all beyond, and for NaN."""
    near = tl.where(distance < 32.0, distance, 32.0)
    place = tl.where(near < 8.0, 8.0 * near, tl.where(near < 16.0, 4.0 * near + 32.0, 2.0 * near + 64.0))
    return tl.minimum(place.to(tl.int32), 127)


@triton.jit
def bin_begin(bins):
    """Where bins begin; the last one has no end."""
    place = bins.to(tl.float32)
    begin = tl.where(bins < 64, place * 0.125, tl.where(bins < 96, (place - 32.0) * 0.25, (place - 64.0) * 0.5))
    return tl.where(bins < 128, begin, float("inf"))


@triton.jit
def candidate_window(sketch, block_max, block_sum, temperature, largest, k, share, by_count, FORM: tl.constexpr):
    """The least and the largest logit that the threshold of a row lies among; what is larger is kept.

    A token 25 below the largest logit has weight 0, and is no candidate whatever k is.

    Args:
        sketch: to int32 [BLOCKS, BINS], of logits over the temperature.
        block_max: to float32 [BLOCKS], before the temperature.
        block_sum: to float32 [BLOCKS], sums of exponentials relative to the block's largest, behind the temperature.
        temperature: of the row.
        largest: logit over the temperature, finite.
        k: tokens that are needed.
        share: of all weight that is needed, in [0, 1).
        by_count: whether tokens are needed, and not weight.
    """
    places = tl.arange(0, FORM.BLOCKS_PADDED * FORM.BINS)
    bins, blocks = places % FORM.BINS, places // FORM.BINS
    counts = tl.load(sketch + places, mask=blocks < FORM.BLOCKS, other=0).to(tl.float32)
    maxima = tl.load(block_max + blocks, mask=blocks < FORM.BLOCKS, other=float("-inf"))
    apart = largest - tl.div_rn(maxima, temperature)
    nearest, farthest = apart + bin_begin(bins), apart + bin_begin(bins + 1)
    at_most = counts * tl.where(by_count, 1.0, tl.exp(-nearest))
    at_least = counts * tl.where(by_count, 1.0, tl.exp(-farthest))
    each = tl.arange(0, FORM.BLOCKS_PADDED)
    block_largest = tl.load(block_max + each, mask=each < FORM.BLOCKS, other=float("-inf"))
    sums = tl.load(block_sum + each, mask=each < FORM.BLOCKS, other=0.0)
    total = tl.sum(tl.exp(tl.div_rn(block_largest, temperature) - largest) * sums, axis=0)
    light = (1.0 - share) * total  # what may be left out; a weight is a whole number of 2^-36
    few = FORM.BLOCKS * FORM.BLOCK - k + 0.5  # what is behind the vocabulary lies in the last bin
    rest = tl.where(by_count, few, light * 0.9999 - total * 4e-6)
    rest_above = tl.where(by_count, few, light * 1.0001 + total * 4e-6)
    far, too_near = 200, -1  # in eighths: what is farther is surely little enough; it may be too much
    near, too_far = 0, 201  # what is at least as far is surely too much; it may be little enough
    for _ in range(8):
        middle = (far + too_near) // 2
        is_far = tl.sum(tl.where(farthest > middle * 0.125, at_most, 0.0), axis=0) <= rest
        far, too_near = tl.where(is_far, middle, far), tl.where(is_far, too_near, middle)
        middle = (near + too_far) // 2
        is_near = tl.sum(tl.where(nearest >= middle * 0.125, at_least, 0.0), axis=0) >= rest_above
        near, too_far = tl.where(is_near, middle, near), tl.where(is_near, too_far, middle)
    slack = tl.abs(largest) * 5e-7  # of the subtractions
    least = tl.maximum(largest - far * 0.125 - slack, largest - 25.0)
    return least, tl.minimum(largest - near * 0.125 + slack, largest)


@triton.jit
def take_blocks(
    sums,
    candidates,
    candidate_ids,
    candidate_count,
    line,
    vocab,
    largest,
    least,
    most,
    lowest_weight,
    is_filtered,
    by_count,
    FORM: tl.constexpr,
):
    """Add up a program's blocks of a row by the window [least, most], and append its candidates to the row's list.

    For each block it writes to `sums`, int64 [4, BLOCKS]: the weight of what is above the window and at least
    `lowest_weight`; and of filtered rows how many are above (or what they weigh), and the weights of the candidates and
    of all.
    """
    for block in range(tl.program_id(1), FORM.BLOCKS, tl.num_programs(1)):
        columns = block * FORM.BLOCK + tl.arange(0, FORM.BLOCK)
        values = tl.load(line + columns, mask=columns < vocab, other=float("-inf"))
        weights = weights_of(values, largest)
        above = values > most
        tl.store(sums + block, tl.sum(tl.where(above & (weights >= lowest_weight), weights, 0), axis=0))
        if is_filtered:
            measures = tl.where(by_count, 1, weights)
            between = (values >= least) & (values <= most)
            tl.store(sums + FORM.BLOCKS + block, tl.sum(tl.where(above, measures, 0), axis=0))
            tl.store(sums + 2 * FORM.BLOCKS + block, tl.sum(tl.where(between, weights, 0), axis=0))
            tl.store(sums + 3 * FORM.BLOCKS + block, tl.sum(weights, axis=0))
            picked = between.to(tl.int32)
            count = tl.sum(picked, axis=0)
            if count > 0:
                places = tl.atomic_add(candidate_count, count, sem="relaxed") + tl.cumsum(picked, axis=0) - 1
                kept = between & (places < FORM.CAPACITY)
                tl.store(candidates + places, values, mask=kept)
                tl.store(candidate_ids + places, columns, mask=kept)
