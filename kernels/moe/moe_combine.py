"""The sum of what a row's experts gave, each times its weight: `out = sum over slots of weight * part`.

Where there is a shared expert (Yang et al., Qwen 2, 2024), its output stands in `out` before, and is kept in the sum
times the sigmoid of its gate.
"""

import torch
from torch import Tensor

from ..native.early_start import early_start_options, wait_and_trigger
from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Float32, Int32, Wide, Written

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
    place = out + row * hidden + columns
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_GATE:
        share = 1.0 / (1.0 + tl.exp(-tl.load(gate + row * gate_stride).to(tl.float32)))
        total += share * tl.load(place, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = row * SLOTS + slot
        part = tl.load(parts + pair * hidden + columns, mask=inside, other=0.0).to(tl.float32)
        chosen = tl.load(ids + pair) >= 0  # nobody has written the parts of a dead row
        total += tl.where(chosen, tl.load(weights + pair) * part, 0.0)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def moe_combine_triton(out: Tensor, parts: Tensor, ids: Tensor, weights: Tensor, gate: Tensor | None) -> None:
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
    """Write each row's sum of its parts, in the order of its slots, into `out`.

    Args:
        out: [rows, hidden], contiguous; with a gate, what it holds is part of the sum.
        parts: [rows * slots, hidden], contiguous, of out's dtype, or one of the two fp32; those of dead rows may hold
            anything.
        ids: int32 [rows, slots], as `moe_route` wrote them: -1 is nobody.
        weights: fp32 [rows, slots].
        gate: [rows, 1], the logit of the share of what `out` holds; rows may be strided. None: `out` holds
            nothing.
    """
    held = parts.view(*ids.shape, -1).float()
    held = torch.where(ids[:, :, None] >= 0, held * weights[:, :, None], 0.0)
    total = torch.zeros_like(out, dtype=torch.float32) if gate is None else out.float() * torch.sigmoid(gate.float())
    for slot in range(ids.shape[1]):
        total += held[:, slot]
    out.copy_(total)
