"""RMSNorm, alone and after a residual add (Zhang and Sennrich, 2019, equation 4).

`y = x / sqrt(mean(x^2) + eps) * weight`, the mean over the last dimension, in fp32. With the residual: first `residual
+= scale * x`, or `scale` times the norm of `x`, then the norm of the sum. Weights are always fp32: weights stored minus
1 would lose bits in 16-bit floats.
"""

import torch
from torch import Tensor

from ..native.optional_triton import early_start_options, tl, triton, wait_and_trigger
from ..native.registration import Float32, Wide, Written, operator


# One program normalizes one row: it reads the row (twice with a residual) and the weights, and writes the row
# (twice with a residual): (2 or 4) * hidden * itemsize bytes, plus the weights, which stay in L2.
@triton.jit
def _rms_norm_kernel(
    out,
    residual,
    x,
    weight,
    post_weight,
    hidden,
    eps,
    post_eps,
    factor,
    x_stride,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_POST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    if PDL:
        wait_and_trigger()
    if HAS_POST:  # load the weights together with the rows, not after the factors
        post_gain = tl.load(post_weight + columns, mask=inside, other=0.0)
    if HAS_WEIGHT:
        gain = tl.load(weight + columns, mask=inside, other=0.0)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_POST:
        post_scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / hidden + post_eps)
        values = values * post_scale * post_gain
    if HAS_RESIDUAL:
        values = values * factor
        values += tl.load(residual + row * hidden + columns, mask=inside, other=0.0).to(tl.float32)
        values = values.to(residual.dtype.element_ty)
        tl.store(residual + row * hidden + columns, values, mask=inside)
        values = values.to(tl.float32)
    if HAS_WEIGHT:
        scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / hidden + eps)
        values = values * scale * gain
    tl.store(out + row * hidden + columns, values.to(out.dtype.element_ty), mask=inside)


def add_rms_norm_triton(out, residual, x, weight, eps, post_weight=None, post_eps=0.0, scale=1.0) -> None:
    """Launch the kernel; see `add_rms_norm`. None for `residual`: see `rms_norm`."""
    hidden = x.shape[-1]
    block = triton.next_power_of_2(hidden)
    x_stride = x.stride(-2) if x.dim() > 1 else hidden
    _rms_norm_kernel[(x.numel() // hidden,)](
        out, residual, x, weight, post_weight, hidden, eps, post_eps, scale, x_stride,
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, HAS_POST=post_weight is not None,
        BLOCK=block, num_warps=min(max(block // 512, 1), 16), **early_start_options(x.device),
    )  # fmt: skip


def rms_norm_triton(out, x, weight, eps) -> None:
    """Launch the kernel without a residual; see `rms_norm`."""
    add_rms_norm_triton(out, None, x, weight, eps)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of `x` in fp32, computed with torch operators."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps)) * weight.float()


@operator(triton_version=rms_norm_triton, is_compiled=lambda x: x.dim() == 2 and x.stride(1) == 1)
def rms_norm(out: Written[Tensor], x: Wide, weight: Float32, eps: float) -> None:
    """Write RMSNorm of `x` into `out`.

    Args:
        out: [rows, hidden], contiguous, any float dtype.
        x: [rows, hidden], rows may be strided; of out's dtype, or fp32.
        weight: fp32 [hidden].
        eps: added to the mean square.
    """
    out.copy_(normed(x, weight, eps))


@operator(triton_version=add_rms_norm_triton, is_compiled=lambda x: x.dim() == 2 and x.stride(1) == 1)
def add_rms_norm(
    out: Written[Tensor],
    residual: Written[Wide],
    x: Wide,
    weight: Float32 | None,
    eps: float,
    post_weight: Float32 | None = None,
    post_eps: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Add `scale * x`, or `scale * RMSNorm(x)`, to `residual` in place, and write RMSNorm of the sum into `out`.

    Args:
        out: [rows, hidden], contiguous.
        residual: [rows, hidden], contiguous, of out's dtype, or fp32; the sum is rounded to it before it is normalized.
        x: [rows, hidden], rows may be strided; of out's dtype, or fp32.
        weight: fp32 [hidden]; None: write the sum itself.
        eps: added to the mean square of the sum.
        post_weight: fp32 [hidden], of the norm of `x`; None: `x` is added as it is.
        post_eps: added to the mean square of `x`.
        scale: factor of the summand.
    """
    if post_weight is None and scale == 1.0:
        residual.add_(x)
    else:
        summand = x.float() if post_weight is None else normed(x, post_weight, post_eps)
        residual.copy_(residual.float().add_(summand, alpha=scale))
    out.copy_(residual if weight is None else normed(residual, weight, eps))
