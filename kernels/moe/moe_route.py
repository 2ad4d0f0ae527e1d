"""Routing of tokens to experts (Shazeer et al., 2017; Fedus et al., 2021, with several experts a token).

A row's `slots` largest router logits choose its experts; their weights are the softmax over these (renormalised), or
their share of the softmax over all experts. A pair is a row's slot, `row * slots + slot`. The pairs are also listed by
expert, in their own order: the products of an expert read its weights once for all its rows. Dead rows choose nobody.
"""

import torch
from torch import Tensor

from ..native.early_start import early_start_options, wait_and_trigger
from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Float32, Int32, Written

LOWEST = -3e38  # what counts for less than that, and no number, too: each slot still gets an expert of its own
_PAIRS_AT_ONCE = 1024


# One program routes one row: it reads experts * itemsize bytes and writes slots * 8.
@triton.jit
def _route_kernel(
    ids,
    weights,
    logits,
    live,
    experts,
    stride,
    LOWEST: tl.constexpr,
    SLOTS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_and_trigger()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_S)
    place = row * SLOTS + slot
    chosen = tl.full([BLOCK_S], -1, tl.int32)
    if row >= tl.load(live):
        tl.store(ids + place, chosen, mask=slot < SLOTS)
        tl.store(weights + place, chosen.to(tl.float32) * 0.0, mask=slot < SLOTS)
        return
    expert = tl.arange(0, BLOCK_E)
    inside = expert < experts
    left = tl.load(logits + row * stride + expert, mask=inside, other=LOWEST).to(tl.float32)
    left = tl.where(inside, tl.where(left > LOWEST, left, LOWEST), -float("inf"))
    largest = tl.max(left)
    total = tl.sum(tl.exp(left - largest))
    top = tl.full([BLOCK_S], -float("inf"), tl.float32)
    for s in tl.static_range(SLOTS):
        best = tl.max(left)
        at = tl.min(tl.where(left == best, expert, BLOCK_E))
        chosen = tl.where(slot == s, at, chosen)
        top = tl.where(slot == s, best, top)
        left = tl.where(expert == at, -float("inf"), left)
    shares = tl.exp(top - largest)
    if RENORMALISE:
        total = tl.sum(shares)
    tl.store(ids + place, chosen, mask=slot < SLOTS)
    tl.store(weights + place, shares / total, mask=slot < SLOTS)


# One program lists the pairs of one expert, behind those of the experts before it: it reads all ids twice, 8 bytes a
# pair, which the L2 cache holds, and writes 4 bytes for each pair of its own.
@triton.jit(do_not_specialize=["pairs"])
def _list_kernel(order, offsets, ids, pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        wait_and_trigger()
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    begin = 0
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(ids + first + index, mask=first + index < pairs, other=-1)
        begin += tl.sum(((chosen >= 0) & (chosen < expert)).to(tl.int32))
    if expert == 0:
        tl.store(offsets, 0)
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(ids + first + index, mask=first + index < pairs, other=-1)
        own = (chosen == expert).to(tl.int32)
        tl.store(order + begin + tl.cumsum(own, axis=0) - own, first + index, mask=chosen == expert)
        begin += tl.sum(own)
    tl.store(offsets + expert + 1, begin)


def moe_route_triton(
    ids: Tensor, weights: Tensor, order: Tensor, offsets: Tensor, logits: Tensor, live: Tensor, renormalise: bool
) -> None:
    """Launch the two kernels; see `moe_route`."""
    (rows, slots), experts = ids.shape, logits.shape[1]
    early = early_start_options(ids.device)
    _route_kernel[(rows,)](
        ids,
        weights,
        logits,
        live,
        experts,
        logits.stride(0),
        LOWEST=LOWEST,
        SLOTS=slots,
        RENORMALISE=renormalise,
        BLOCK_S=triton.next_power_of_2(slots),
        BLOCK_E=triton.next_power_of_2(experts),
        num_warps=1,
        **early,
    )
    block = min(triton.next_power_of_2(rows * slots), _PAIRS_AT_ONCE)
    _list_kernel[(experts,)](order, offsets, ids, rows * slots, BLOCK=block, num_warps=4, **early)


def _is_served(
    ids: Tensor, weights: Tensor, order: Tensor, offsets: Tensor, logits: Tensor, live: Tensor, renormalise: bool
) -> bool:
    return logits.stride(1) == 1


@operator(triton_version=moe_route_triton, is_compiled=_is_served)
def moe_route(
    ids: Written[Int32],
    weights: Written[Float32],
    order: Written[Int32],
    offsets: Written[Int32],
    logits: Tensor,
    live: Int32,
    renormalise: bool,
) -> None:
    """Write which experts each row goes to, with what weights, and which pairs each expert has.

    Args:
        ids: int32 [rows, slots], the experts of a row, the largest logit first, the lower number where two are equal;
            -1 in dead rows. No expert stands twice in a row.
        weights: fp32 [rows, slots]; 0 in dead rows.
        order: int32 [rows * slots], the pairs of expert 0, those of expert 1, ...; what is left over is left alone.
        offsets: int32 [experts + 1], where each expert's pairs begin in `order`, and where the last one's end.
        logits: [rows, experts], rows may be strided; slots <= experts.
        live: int32 [1]; rows from there on are dead.
        renormalise: whether a row's weights add up to 1.
    """
    rows, slots = ids.shape
    alive = torch.arange(rows, device=logits.device) < live
    wide = logits.float()
    wide = torch.where(wide > LOWEST, wide, LOWEST)
    chosen = wide.sort(dim=1, descending=True, stable=True).indices[:, :slots]
    shares = torch.softmax(wide, 1).gather(1, chosen)
    if renormalise:
        shares = torch.softmax(wide.gather(1, chosen), 1)
    ids.copy_(torch.where(alive[:, None], chosen, -1))
    weights.copy_(torch.where(alive[:, None], shares, 0.0))
    experts = torch.arange(logits.shape[1], device=logits.device)
    pairs = ids.flatten()
    offsets[:1].zero_()
    offsets[1:].copy_((pairs[:, None] == experts).sum(0).cumsum(0))
    listed = torch.where(pairs < 0, logits.shape[1], pairs).sort(stable=True).indices
    known = torch.arange(pairs.shape[0], device=logits.device) < offsets[-1:]
    order.copy_(torch.where(known, listed, order))
