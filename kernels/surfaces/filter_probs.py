"""The tokens that top-k, top-p and min-p keep of rows of given probabilities, or top-k of logits.

A token is kept if fewer than k are more likely than it, if those have together less than top_p, and if it is at least
min_p times as likely as the most likely one: so are tokens as likely as the last one that is kept. Where top-k comes
first, top_p is a share of what that keeps; at 1 it is off. Probabilities are summed as integers, of 2^-40 each, in any
order; a row's sums are compared in float64.
"""

import torch
from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import AnyElement, Float32, Int32, Written, operator
from ..sampling.token_filters import ordered_key

_UNIT = float(2**40)
_BLOCK = 1024  # ids at once


@triton.jit
def largest_value(line, vocab, BLOCK: tl.constexpr):
    """Return the largest value of a row, and whether it has NaN or inf."""
    tops = tl.full([BLOCK], -float("inf"), tl.float32)
    strange = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.cdiv(vocab, BLOCK)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        part = tl.load(line + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
        tops = tl.maximum(tops, part)
        strange += ((part != part) | (part == float("inf"))).to(tl.int32)
    return tl.max(tops, axis=0), tl.sum(strange, axis=0) > 0


@triton.jit
def _least_key(line, vocab, low, high, most, weight, IS_LOGITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the least key in [low, high] above which there are fewer values than `most`, and less than `weight`."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        counts = tl.zeros([BLOCK], tl.int64)
        weights = tl.zeros([BLOCK], tl.int64)
        below = tl.zeros([BLOCK], tl.int64) - 2147483648
        above = tl.zeros([BLOCK], tl.int64) + 2147483647
        for block in range(tl.cdiv(vocab, BLOCK)):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            inside = columns < vocab
            values = tl.load(line + columns, mask=inside, other=0.0).to(tl.float32)
            keys = ordered_key(values).to(tl.int64)
            greater = inside & (keys > middle)
            counts += greater.to(tl.int64)
            if not IS_LOGITS:
                weights += (tl.where(greater, values, 0.0) * 1099511627776.0).to(tl.int64)
            below = tl.maximum(below, tl.where(inside & (keys <= middle), keys, -2147483648))
            above = tl.minimum(above, tl.where(greater, keys, 2147483647))
        fits = (tl.sum(counts, axis=0) < most) & (tl.sum(weights, axis=0).to(tl.float64) < weight)
        high = tl.where(fits, tl.maximum(tl.max(below, axis=0), low), high)
        low = tl.where(fits, low, tl.min(above, axis=0))
    return low


# One program filters one row: it reads the row a few times, from L2 but for the first, and writes it once.
@triton.jit
def _filter_kernel(
    out,
    values,
    top_k,
    top_p,
    min_p,
    vocab,
    out_stride,
    stride,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_MIN: tl.constexpr,
    BY_COUNT_FIRST: tl.constexpr,
    IS_LOGITS: tl.constexpr,
    IS_NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = values + row * stride
    largest, is_strange = largest_value(line, vocab, BLOCK)
    largest = tl.where(is_strange, 1.0, largest)
    high = ordered_key(largest).to(tl.int64)
    lowest = tl.full([], 0, tl.int64)
    if IS_LOGITS:
        lowest -= 2147483647
    lowest = tl.where(is_strange, 2147483647, lowest)  # nothing to look for
    high = tl.maximum(high, lowest)
    most = tl.full([], 9223372036854775807, tl.int64)
    if HAS_K:
        k = tl.load(top_k + row).to(tl.int64)
        most = tl.where(k < 0, most, tl.maximum(k, 1))
    if HAS_K and (BY_COUNT_FIRST or not HAS_P):
        no_weight = tl.full([], float("inf"), tl.float64)
        lowest = _least_key(line, vocab, lowest, high, most, no_weight, IS_LOGITS, BLOCK)
    if HAS_P:
        share = tl.load(top_p + row).to(tl.float64)
        whole = tl.full([], 1099511627776.0, tl.float64)
        if HAS_K and BY_COUNT_FIRST:
            sums = tl.zeros([BLOCK], tl.int64)
            for block in range(tl.cdiv(vocab, BLOCK)):
                columns = block * BLOCK + tl.arange(0, BLOCK)
                part = tl.load(line + columns, mask=columns < vocab, other=0.0).to(tl.float32)
                passes = ordered_key(part).to(tl.int64) >= lowest
                sums += (tl.where(passes, part, 0.0) * 1099511627776.0).to(tl.int64)
            whole = tl.sum(sums, axis=0).to(tl.float64)
            most = tl.full([], 9223372036854775807, tl.int64)
        weight = tl.where(share < 1.0, share * whole, float("inf"))
        lowest = _least_key(line, vocab, lowest, high, most, weight, IS_LOGITS, BLOCK)
    if HAS_MIN:
        lowest = tl.maximum(lowest, ordered_key(largest * tl.load(min_p + row)).to(tl.int64))
    norm = 1.0
    if IS_NORMED:
        totals = tl.zeros([BLOCK], tl.float32)
        for block in range(tl.cdiv(vocab, BLOCK)):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            part = tl.load(line + columns, mask=columns < vocab, other=0.0).to(tl.float32)
            totals += tl.where(ordered_key(part).to(tl.int64) >= lowest, part, 0.0)
        norm = tl.sum(totals, axis=0)
        norm = tl.where(norm > 0.0, norm, 1.0)
    nothing = 0.0
    if IS_LOGITS:
        nothing = -float("inf")
    for block in range(tl.cdiv(vocab, BLOCK)):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        part = tl.load(line + columns, mask=columns < vocab, other=0.0).to(tl.float32)
        result = tl.where(ordered_key(part).to(tl.int64) >= lowest, part / norm, nothing)
        result = tl.where(is_strange, float("nan"), result)
        tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=columns < vocab)


def filter_probs_triton(out, values, top_k, top_p, min_p, by_count_first, is_logits, is_normed) -> None:
    """Launch the kernel; see `filter_probs`."""
    rows, vocab = values.shape
    _filter_kernel[(rows,)](
        out, values, top_k, top_p, min_p, vocab, out.stride(0), values.stride(0), HAS_K=top_k is not None,
        HAS_P=top_p is not None, HAS_MIN=min_p is not None, BY_COUNT_FIRST=by_count_first, IS_LOGITS=is_logits,
        IS_NORMED=is_normed, BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip


def _least_value(line: Tensor, weights: Tensor, most: Tensor, weight: Tensor) -> Tensor:
    """Return the least value [rows, 1] that is kept of sorted rows: above it are fewer than `most`, less than `weight`.

    Both are [rows, 1]; `weights` int64 are those of the sorted values.
    """
    above = weights.cumsum(1) - weights
    is_first = torch.ones_like(line, dtype=torch.bool)
    is_first[:, 1:] = line[:, 1:] != line[:, :-1]
    ranks = torch.arange(line.shape[1], device=line.device)
    fits = is_first & (ranks < most) & (above.double() < weight)
    fits[:, 0] = True
    return line.masked_fill(~fits, torch.inf).amin(1, keepdim=True)


@operator(triton_version=filter_probs_triton)
def filter_probs(
    out: Written[AnyElement],
    values: AnyElement,
    top_k: Int32 | None,
    top_p: Float32 | None,
    min_p: Float32 | None,
    by_count_first: bool,
    is_logits: bool,
    is_normed: bool,
) -> None:
    """Write the kept values of each row, and 0 for others, of logits -inf; NaN for rows with NaN or inf.

    Args:
        out: [rows, vocab], rows contiguous.
        values: [rows, vocab], rows contiguous: probabilities, of which negative ones count as 0, or logits.
        top_k: int32 [rows]; below 0 is off, 0 is as 1; None: off.
        top_p: float32 [rows]; 1 or None: off. The most likely token is always kept.
        min_p: float32 [rows]; None: off.
        by_count_first: whether top_p is a share of what top_k keeps, else of 1.
        is_logits: whether they are logits, of which only the `top_k` largest are kept.
        is_normed: whether to divide by the sum of what is kept.
    """
    wide = values.float()
    strange = (wide.isnan() | (wide == torch.inf)).any(1, keepdim=True)
    wide = wide.masked_fill(strange, 1.0)
    if not is_logits:
        wide = wide.clamp(min=0.0)
    line = wide.sort(1, descending=True).values
    weights = torch.zeros_like(line, dtype=torch.int64) if is_logits else (line * _UNIT).long()
    free = torch.full_like(line[:, :1], torch.inf, dtype=torch.float64)
    most, least = free, line[:, -1:]
    if top_k is not None:
        most = torch.where(top_k < 0, torch.inf, top_k.clamp(min=1).double()).unsqueeze(1)
    if top_k is not None and (by_count_first or top_p is None):
        least = _least_value(line, weights, most, free)
    if top_p is not None:
        whole = torch.full_like(free, _UNIT)
        if top_k is not None and by_count_first:
            weights = weights.masked_fill(line < least, 0)
            whole, most = weights.sum(1, keepdim=True).double(), free
        weight = torch.where(top_p.unsqueeze(1) < 1.0, top_p.double().unsqueeze(1) * whole, torch.inf)
        least = torch.maximum(_least_value(line, weights, most, weight), least)
    if min_p is not None:
        least = torch.maximum(least, line[:, :1] * min_p.unsqueeze(1))
    filtered = wide.masked_fill(wide < least, -torch.inf if is_logits else 0.0)
    if is_normed:
        total = filtered.sum(1, keepdim=True)
        filtered = filtered / torch.where(total > 0, total, 1.0)
    out.copy_(filtered.masked_fill_(strange, torch.nan))
