"""The gate of a gated MLP: `out = activation(gate) * up` (Shazeer, 2020, "GLU Variants Improve Transformer").

Activations: `silu` (x * sigmoid(x)), `gelu_tanh` (Hendrycks and Gimpel, 2016, the tanh form) and `gelu`
(the exact one, by erf).
"""

from typing import Annotated

import torch
from torch import Tensor

from ..native.optional_triton import early_start_options, tl, triton, wait_and_trigger
from ..native.registration import OneOf, Wide, Written, operator

ACTIVATIONS = OneOf(("silu", "gelu_tanh", "gelu"))
_MAX_BLOCK = 2048


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """Return the activation of fp32 values."""
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate))
    if ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z), z = sqrt(2 / pi) * (x + 0.044715 x^3)
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))


# One program computes one tile of one row in fp32: it reads 2 * tile and writes tile values.
@triton.jit
def _act_mul_kernel(out, gate_up, width, stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        wait_and_trigger()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    active = activated(gate, ACTIVATION)
    tl.store(out + row * width + columns, (active * up).to(out.dtype.element_ty), mask=inside)


def act_mul_triton(out, gate_up, activation) -> None:
    """Launch the kernel; see `act_mul`."""
    rows, width = out.shape
    block = min(triton.next_power_of_2(width), _MAX_BLOCK)
    grid = (rows, triton.cdiv(width, block))
    _act_mul_kernel[grid](
        out, gate_up, width, gate_up.stride(0), ACTIVATION=activation, BLOCK=block, num_warps=4,
        **early_start_options(out.device),
    )  # fmt: skip


def gated(out: Tensor, gate_up: Tensor, activation: str) -> None:
    """Compute with torch operators; see `act_mul`."""
    gate, up = gate_up.chunk(2, dim=1)
    active = out if out.dtype == gate.dtype else torch.empty_like(gate)
    if activation == "silu":
        torch.ops.aten.silu.out(gate, out=active)
    else:
        torch.ops.aten.gelu.out(gate, approximate="tanh" if activation == "gelu_tanh" else "none", out=active)
    active.mul_(up)
    if active is not out:
        out.copy_(active)


@operator(triton_version=act_mul_triton, is_compiled=lambda gate_up: gate_up.stride(1) == 1)
def act_mul(out: Written[Tensor], gate_up: Wide, activation: Annotated[str, ACTIVATIONS]) -> None:
    """Write `activation(gate) * up` into `out`.

    Args:
        out: [rows, width], contiguous.
        gate_up: [rows, 2 * width], the gate first, of out's dtype, or fp32; rows may be strided.
        activation: one of `ACTIVATIONS`.

    Raises:
        ValueError: unknown activation.
    """
    gated(out, gate_up, activation)
