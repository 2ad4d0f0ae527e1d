"""RMSNorm with a gate, in groups of channels, for layers with recurrent state.

`norm(x * silu(gate))` (Mamba2), or with `norm_first` `norm(x) * silu(gate)` (gated delta nets); float32 in between.
Without a weight there is no norm, and the gate may be `sigmoid(gate)` (gated attention).
"""

import torch
from torch.nn.functional import silu

from ..native.optional_triton import tl, triton
from ..native.registration import Float32, Wide, Written, operator
from .rms_norm import normed


# One program takes one group of one row: it reads the group, its gate and its gain, and writes the group.
@triton.jit
def _gated_rms_norm_kernel(
    out, x, gate, weight, groups, weights, x_stride, gate_stride, eps,
    GROUP: tl.constexpr, NORM_FIRST: tl.constexpr, SIGMOID: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < GROUP
    columns = group * GROUP + lanes
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    z = (1.0 if SIGMOID else z) / (1.0 + tl.exp(-z))
    if not NORM_FIRST:
        values = values * z
    if HAS_WEIGHT:
        gain = tl.load(weight + columns % weights, mask=inside, other=0.0)
        values = values * (1.0 / tl.sqrt(tl.sum(values * values, axis=0) / GROUP + eps)) * gain
    if NORM_FIRST:
        values = values * z
    tl.store(out + row * groups * GROUP + columns, values.to(out.dtype.element_ty), mask=inside)


def gated_rms_norm_triton(out, x, gate, weight, eps, group, norm_first, sigmoid) -> None:
    """Launch the kernel; see `gated_rms_norm`."""
    rows, width = out.shape
    block = triton.next_power_of_2(group)
    _gated_rms_norm_kernel[(rows, width // group)](
        out, x, gate, weight, width // group, 1 if weight is None else weight.shape[0], x.stride(0), gate.stride(0),
        eps, GROUP=group, NORM_FIRST=norm_first, SIGMOID=sigmoid, HAS_WEIGHT=weight is not None, BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip


@operator(
    triton_version=gated_rms_norm_triton,
    is_compiled=lambda out, x, gate: x.stride(1) == 1 == gate.stride(1) and out.is_contiguous(),
)
def gated_rms_norm(
    out: Written[Wide],
    x: Wide,
    gate: Wide,
    weight: Float32 | None,
    eps: float,
    group: int,
    norm_first: bool,
    sigmoid: bool = False,
) -> None:
    """Write the gated norm of `x` into `out`.

    Args:
        out: [rows, width], contiguous.
        x: [rows, width]; rows may be strided.
        gate: [rows, width]; rows may be strided.
        weight: float32 [width], or [group], the same for all groups; None: there is no norm.
        eps: added to the mean square of a group.
        group: channels of a group; divides the width.
        norm_first: whether the norm comes before the gate.
        sigmoid: whether the gate is `sigmoid(gate)` instead of `silu(gate)`.
    """
    shape = (out.shape[0], -1, group)
    values, active = x.float(), (torch.sigmoid if sigmoid else silu)(gate.float())
    values = values if norm_first else values * active
    if weight is not None:
        values = normed(values.reshape(shape), weight.view(-1, group), eps).flatten(1)
    out.copy_(values * active if norm_first else values)
