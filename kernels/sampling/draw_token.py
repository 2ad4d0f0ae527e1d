"""The token of a row that draws one, from the weights of its candidates, whose sums by blocks are known."""

from ..native.optional_triton import tl, triton
from .token_filters import fraction_of_total, kept_total, kept_weights, ordered_key, threshold_key


@triton.jit
def draw_token(
    sums,
    scaled,
    candidate_ids,
    count,
    vocab,
    largest,
    least,
    most,
    k,
    share,
    lowest_weight,
    bits,
    FORM: tl.constexpr,
):
    """The token of one row, whose blocks are all added up and whose `count` candidates are listed.

    The thresholds are searched among the candidates. Should these be more than the list holds, or a bound have been
    wrong, all logits are the list.
    """
    PADDED: tl.constexpr = FORM.BLOCKS_PADDED
    blocks = tl.arange(0, PADDED)
    is_block = blocks < FORM.BLOCKS
    by_count = (k > 0) & (k < vocab)
    by_weight = share < 1.0
    lowest_key = ordered_key(tl.full([], float("-inf"), dtype=tl.float32))
    any_weight = tl.full([], 1, dtype=tl.int64)
    list_begin = FORM.BLOCKS * FORM.BLOCK
    listed = count
    is_listed = True
    if by_count | by_weight:
        above = tl.sum(tl.load(sums + FORM.BLOCKS + blocks, mask=is_block, other=0, cache_modifier=".cg"), axis=0)
        between = tl.sum(tl.load(sums + 2 * FORM.BLOCKS + blocks, mask=is_block, other=0, cache_modifier=".cg"), axis=0)
        total = tl.sum(tl.load(sums + 3 * FORM.BLOCKS + blocks, mask=is_block, other=0, cache_modifier=".cg"), axis=0)
        needed = tl.maximum(fraction_of_total(total, (share * 16777216.0).to(tl.int64)), 1)
        needed = tl.where(by_count, k.to(tl.int64), needed)
        between = tl.where(by_count, count.to(tl.int64), between)
        has_all = least <= largest - 25.0  # what is not listed has no weight
        is_listed = (count <= FORM.CAPACITY) & (above < needed) & (has_all | (above + between >= needed))
        if is_listed:
            needed -= above
        else:
            tl.store(sums + blocks, tl.zeros([PADDED], dtype=tl.int64), mask=is_block)
            list_begin = 0
            listed = vocab
            between = needed
            least = tl.full([], float("-inf"), dtype=tl.float32)
            most = largest
        line = scaled + list_begin
        if needed <= between:
            lowest_key = threshold_key(
                line, listed, largest, ordered_key(least), ordered_key(most), needed, by_count, FORM.LIST_BLOCK
            )
        if by_count & by_weight:
            total = kept_total(line, listed, largest, lowest_key, any_weight, FORM.LIST_BLOCK)
            needed = tl.maximum(fraction_of_total(total, (share * 16777216.0).to(tl.int64)), 1)
            lowest_key = threshold_key(
                line, listed, largest, lowest_key, ordered_key(largest), needed, False, FORM.LIST_BLOCK
            )
        for block in range(tl.cdiv(listed, FORM.LIST_BLOCK)):
            places = block * FORM.LIST_BLOCK + tl.arange(0, FORM.LIST_BLOCK)
            weights = kept_weights(line, places, listed, largest, lowest_key, lowest_weight)
            is_candidate = places < tl.where(is_listed, listed, 0)
            ids = tl.load(candidate_ids + places, mask=is_candidate, other=0, cache_modifier=".cg")
            ids = tl.where(is_listed, ids, places)
            tl.atomic_add(sums + ids // FORM.BLOCK, weights, mask=weights > 0, sem="relaxed")
        tl.debug_barrier()  # all have added before one of them reads
    kept = tl.load(sums + blocks, mask=is_block, other=0, cache_modifier=".cg")
    reached = tl.cumsum(kept, axis=0)
    target = fraction_of_total(tl.sum(kept, axis=0), bits)
    block = tl.minimum(tl.min(tl.where(reached > target, blocks, FORM.BLOCKS), axis=0), FORM.BLOCKS - 1)
    before = tl.sum(tl.where(blocks < block, kept, 0), axis=0)
    first = block * FORM.BLOCK
    parts = tl.arange(0, FORM.PARTS)
    columns = first + parts[:, None] * (FORM.BLOCK // FORM.PARTS) + tl.arange(0, FORM.BLOCK // FORM.PARTS)[None, :]
    kept = tl.sum(kept_weights(scaled, columns, vocab, largest, lowest_key, lowest_weight), axis=1)
    part = tl.min(tl.where(before + tl.cumsum(kept, axis=0) > target, parts, FORM.PARTS - 1), axis=0)
    before += tl.sum(tl.where(parts < part, kept, 0), axis=0)
    ids = first + part * (FORM.BLOCK // FORM.PARTS) + tl.arange(0, FORM.BLOCK // FORM.PARTS)
    weights = kept_weights(scaled, ids, vocab, largest, lowest_key, lowest_weight)
    return tl.min(tl.where(before + tl.cumsum(weights, axis=0) > target, ids, 2147483647), axis=0)
