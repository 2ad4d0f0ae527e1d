"""RMSNorm, alone and behind a residual add (Zhang and Sennrich, 2019, equation 4).

`y = x / sqrt(mean(x^2) + eps) * weight`, the mean over the last dimension, in fp32. With the residual:
`residual += x` first, and the norm of the sum.
"""

import torch
from torch import Tensor

from ..native.early_start import has_early_start
from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import Written


# One program normalises one row: it reads the row (twice with a residual) and the weight, and writes the row
# (twice with a residual): (2 or 4) * hidden * itemsize bytes, plus the weight, which stays in L2.
@triton.jit
def _rms_norm_kernel(
    out,
    residual,
    x,
    weight,
    hidden,
    eps,
    x_stride,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:  # the product behind it may begin to load its weights
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * hidden + columns, mask=inside, other=0.0).to(tl.float32)
        values = values.to(residual.dtype.element_ty)
        tl.store(residual + row * hidden + columns, values, mask=inside)
        values = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / hidden + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + columns, (values * scale * gain).to(out.dtype.element_ty), mask=inside)


def _launch(out: Tensor, residual: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> None:
    hidden = x.shape[-1]
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(x.numel() // hidden,)](
        out,
        residual,
        x,
        weight,
        hidden,
        eps,
        x.stride(-2) if x.dim() > 1 else hidden,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        PDL=has_early_start(x.device),
        num_warps=min(max(block // 512, 1), 16),
    )


def rms_norm_triton(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Launch the kernel without a residual; see `rms_norm`."""
    _launch(out, None, x, weight, eps)


def add_rms_norm_triton(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Launch the kernel with a residual; see `add_rms_norm`."""
    _launch(out, residual, x, weight, eps)


def _is_served(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> bool:
    return x.dim() == 2 and x.stride(1) == 1


def _is_sum_served(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> bool:
    return x.dim() == 2 and x.stride(1) == 1


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of `x` in fp32, computed with torch operators."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps)) * weight.float()


@operator(triton_version=rms_norm_triton, is_compiled=_is_served)
def rms_norm(out: Written[Tensor], x: Tensor, weight: Tensor, eps: float) -> None:
    """Write RMSNorm of `x` into `out`.

    Args:
        out: [rows, hidden], contiguous, any float dtype.
        x: [rows, hidden], rows may be strided.
        weight: [hidden].
        eps: added to the mean square.
    """
    out.copy_(normed(x, weight, eps))


@operator(triton_version=add_rms_norm_triton, is_compiled=_is_sum_served)
def add_rms_norm(out: Written[Tensor], residual: Written[Tensor], x: Tensor, weight: Tensor, eps: float) -> None:
    """Add `x` to `residual` in place, and write RMSNorm of the sum into `out`.

    Args:
        out: [rows, hidden], contiguous.
        residual: [rows, hidden], contiguous; the sum is rounded to its dtype before it is normalised.
        x: [rows, hidden], rows may be strided.
        weight: [hidden].
        eps: added to the mean square.
    """
    residual.add_(x)
    out.copy_(normed(residual, weight, eps))
