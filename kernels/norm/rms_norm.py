"""RMSNorm, alone and behind a residual add (Zhang and Sennrich, 2019, equation 4).

`y = x / sqrt(mean(x^2) + eps) * weight`, the mean over the last dimension, in fp32. With the residual:
`residual += x` first, and the norm of the sum.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..native.early_start import has_early_start
from ..native.library import NativeCall, fits
from ..native.optional_triton import tl, triton
from ..native.registration import operator


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


def bind_rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> Callable[[], None]:
    """Return the norm of fixed tensors, in as few torch operators as can be; see `rms_norm`."""
    width = x.shape[-1]
    # x / sqrt(mean(x^2) + eps) * weight = x / sqrt(sum(x^2) + width * eps) * (weight * sqrt(width))
    root_eps = torch.full((), (width * eps) ** 0.5, device=x.device)
    gain = weight.float() * width**0.5
    is_wide = x.dtype == out.dtype == torch.float32 and x.data_ptr() != out.data_ptr()

    def norm() -> None:
        if is_wide:
            length = torch.linalg.vector_norm(x, 2, -1, True).hypot_(root_eps)
            torch.mul(x, gain, out=out).div_(length)
        else:
            wide = x.float()
            length = torch.linalg.vector_norm(wide, 2, -1, True).hypot_(root_eps)
            torch.mul(wide / length, gain, out=out)

    return norm


def bind_add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Callable[[], None]:
    """Return the sum and norm of fixed tensors; see `add_rms_norm`."""
    norm = bind_rms_norm(out, residual, weight, eps)

    def add_and_norm() -> None:
        residual.add_(x)
        norm()

    return add_and_norm


def rms_norm_torch(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Normalise with torch operators; see `rms_norm`."""
    bind_rms_norm(out, x, weight, eps)()


def add_rms_norm_torch(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Add and normalise with torch operators; see `add_rms_norm`."""
    bind_add_rms_norm(out, residual, x, weight, eps)()


def native_rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> NativeCall | None:
    """Return the compiled norm of fixed tensors, if it serves them; see `rms_norm`."""
    return _native(out, None, x, weight, eps)


def native_add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> NativeCall | None:
    """Return the compiled sum and norm of fixed tensors, if it serves them; see `add_rms_norm`."""
    return _native(out, residual, x, weight, eps)


def _native(out: Tensor, residual: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> NativeCall | None:
    if x.dim() != 2 or x.stride(1) != 1 or not fits(out, residual, x, weight):
        return None
    return NativeCall("rms_norm", x.dtype, out, residual, x, weight, *x.shape, x.stride(0), float(eps))


_rms_norm = operator(
    "rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()",
    torch_version=rms_norm_torch,
    bound_version=bind_rms_norm,
    native_version=native_rms_norm,
    triton_version=rms_norm_triton,
)
_add_rms_norm = operator(
    "add_rms_norm(Tensor(a!) out, Tensor(b!) residual, Tensor x, Tensor weight, float eps) -> ()",
    torch_version=add_rms_norm_torch,
    bound_version=bind_add_rms_norm,
    native_version=native_add_rms_norm,
    triton_version=add_rms_norm_triton,
)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Write RMSNorm of `x` into `out`.

    Args:
        out: [rows, hidden], contiguous, any float dtype.
        x: [rows, hidden], rows may be strided.
        weight: [hidden].
        eps: added to the mean square.
    """
    _rms_norm(out, x, weight, eps)


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Add `x` to `residual` in place, and write RMSNorm of the sum into `out`.

    Args:
        out: [rows, hidden], contiguous.
        residual: [rows, hidden], contiguous; the sum is rounded to its dtype before it is normalised.
        x: [rows, hidden], rows may be strided.
        weight: [hidden].
        eps: added to the mean square.
    """
    _add_rms_norm(out, residual, x, weight, eps)
