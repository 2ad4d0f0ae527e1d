"""Routing of tokens to experts (Shazeer et al., 2017; Fedus et al., 2021, with several experts per token), and back.

A row's `slots` largest router logits choose its experts; their weights are the softmax over these (renormalized), or
over all experts. A pair is a row's slot, `row * slots + slot`. The pairs are also listed by expert, in order: an
expert's products read its weights once for all its rows. Dead rows have no experts. A row's result is `sum over slots
of weight * part`, plus the output of a shared expert, if any, times the sigmoid of its gate (Yang et al., Qwen 2,
2024).
"""

import torch
from torch import Tensor

from ..native.optional_triton import early_start_options, tl, triton, wait_and_trigger
from ..native.registration import Float32, Int32, Wide, Written, operator

LOWEST = -3e38  # NaN and smaller logits count as this, so that each slot still gets a different expert
_CHUNK_PAIRS = 1024


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
    RENORMALIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_and_trigger()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_S)
    offsets = row * SLOTS + slot
    chosen = tl.full([BLOCK_S], -1, tl.int32)
    if row >= tl.load(live):
        tl.store(ids + offsets, chosen, mask=slot < SLOTS)
        tl.store(weights + offsets, chosen.to(tl.float32) * 0.0, mask=slot < SLOTS)
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
    if RENORMALIZE:
        total = tl.sum(shares)
    tl.store(ids + offsets, chosen, mask=slot < SLOTS)
    tl.store(weights + offsets, shares / total, mask=slot < SLOTS)


# One program lists the pairs of one expert, after those of the previous experts: it reads all ids twice, 8 bytes per
# pair, from the L2 cache, and writes 4 bytes per pair of its expert.
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
        is_of_expert = (chosen == expert).to(tl.int32)
        tl.store(order + begin + tl.cumsum(is_of_expert, axis=0) - is_of_expert, first + index, mask=chosen == expert)
        begin += tl.sum(is_of_expert)
    tl.store(offsets + expert + 1, begin)


def moe_route_triton(ids, weights, order, offsets, logits, live, renormalize) -> None:
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
        RENORMALIZE=renormalize,
        BLOCK_S=triton.next_power_of_2(slots),
        BLOCK_E=triton.next_power_of_2(experts),
        num_warps=1,
        **early,
    )
    block = min(triton.next_power_of_2(rows * slots), _CHUNK_PAIRS)
    _list_kernel[(experts,)](order, offsets, ids, rows * slots, BLOCK=block, num_warps=4, **early)


@operator(triton_version=moe_route_triton, is_compiled=lambda logits: logits.stride(1) == 1)
def moe_route(
    ids: Written[Int32],
    weights: Written[Float32],
    order: Written[Int32],
    offsets: Written[Int32],
    logits: Tensor,
    live: Int32,
    renormalize: bool,
) -> None:
    """Write each row's experts and weights, and each expert's pairs.

    Args:
        ids: int32 [rows, slots], the distinct experts of a row, the largest logit first, ties by the lower number; -1
            in dead rows.
        weights: fp32 [rows, slots]; 0 in dead rows.
        order: int32 [rows * slots], the pairs of expert 0, those of expert 1, ...; the rest is not written.
        offsets: int32 [experts + 1], offsets of each expert's pairs in `order`.
        logits: [rows, experts], rows may be strided; slots <= experts.
        live: int32 [1]; rows from there on are dead.
        renormalize: whether a row's weights sum to 1.
    """
    rows, slots = ids.shape
    alive = torch.arange(rows, device=logits.device) < live
    wide = logits.float()
    wide = torch.where(wide > LOWEST, wide, LOWEST)
    chosen = wide.sort(dim=1, descending=True, stable=True).indices[:, :slots]
    shares = torch.softmax(wide, 1).gather(1, chosen)
    if renormalize:
        shares = torch.softmax(wide.gather(1, chosen), 1)
    ids.copy_(torch.where(alive[:, None], chosen, -1))
    weights.copy_(torch.where(alive[:, None], shares, 0.0))
    experts = torch.arange(logits.shape[1], device=logits.device)
    pairs = ids.flatten()
    offsets[:1].zero_()
    offsets[1:].copy_((pairs[:, None] == experts).sum(0).cumsum(0))
    listed = torch.where(pairs < 0, logits.shape[1], pairs).sort(stable=True).indices
    is_routed = torch.arange(pairs.shape[0], device=logits.device) < offsets[-1:]
    order.copy_(torch.where(is_routed, listed, order))


_MAX_BLOCK = 1024


# One program adds up one tile of one row, slot by slot: it reads slots * tile values, and writes one tile.
@triton.jit
def _combine_kernel(
    out,
    parts,
    ids,
    weights,
    gate,
    hidden,
    gate_stride,
    SLOTS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_and_trigger()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    out_ptrs = out + row * hidden + columns
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_GATE:
        share = 1.0 / (1.0 + tl.exp(-tl.load(gate + row * gate_stride).to(tl.float32)))
        total += share * tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = row * SLOTS + slot
        part = tl.load(parts + pair * hidden + columns, mask=inside, other=0.0).to(tl.float32)
        chosen = tl.load(ids + pair) >= 0  # the parts of a dead row are not written
        total += tl.where(chosen, tl.load(weights + pair) * part, 0.0)
    tl.store(out_ptrs, total.to(out.dtype.element_ty), mask=inside)


def moe_combine_triton(out, parts, ids, weights, gate) -> None:
    """Launch the kernel; see `moe_combine`."""
    rows, hidden = out.shape
    block = min(triton.next_power_of_2(hidden), _MAX_BLOCK)
    _combine_kernel[(rows, triton.cdiv(hidden, block))](
        out,
        parts,
        ids,
        weights,
        gate,
        hidden,
        0 if gate is None else gate.stride(0),
        SLOTS=ids.shape[1],
        HAS_GATE=gate is not None,
        BLOCK=block,
        num_warps=4,
        **early_start_options(out.device),
    )


@operator(triton_version=moe_combine_triton, is_compiled=True)
def moe_combine(out: Written[Wide], parts: Wide, ids: Int32, weights: Float32, gate: Wide | None = None) -> None:
    """Write each row's weighted sum of its parts, in slot order, into `out`.

    Args:
        out: [rows, hidden], contiguous; with a gate, what it holds is part of the sum.
        parts: [rows * slots, hidden], contiguous, of out's dtype, or one of the two fp32; those of dead rows are
            ignored.
        ids: int32 [rows, slots], from `moe_route`.
        weights: fp32 [rows, slots].
        gate: [rows, 1], logit of the factor of what `out` holds; rows may be strided. None: `out` is only written.
    """
    products = parts.view(*ids.shape, -1).float()
    products = torch.where(ids[:, :, None] >= 0, products * weights[:, :, None], 0.0)
    total = torch.zeros_like(out, dtype=torch.float32) if gate is None else out.float() * torch.sigmoid(gate.float())
    for slot in range(ids.shape[1]):
        total += products[:, slot]
    out.copy_(total)
