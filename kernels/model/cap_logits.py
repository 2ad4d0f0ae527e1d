"""Soft cap of logits: `cap * tanh(logits / cap)` in place (Gemma 2, 2024, section 2; first Bello et al., 2016)."""

from torch import Tensor

from ..native.optional_triton import early_start_options, tl, triton, wait_and_trigger
from ..native.registration import Written, operator

_BLOCK = 2048


@triton.jit
def tanh(x):
    """Return x P(x^2) / Q(x^2), which is within 4e-7 of tanh: 1 - 2 / (e^2x + 1) loses the digits of small x."""
    x = tl.minimum(tl.maximum(x, -9.0, propagate_nan=tl.PropagateNan.ALL), 9.0, propagate_nan=tl.PropagateNan.ALL)
    square = x * x
    over = 2.0609308e-5 + square * 1.3354916e-8
    over = 1.0 + square * (0.1338104 + square * (0.0034956038 + square * over))
    over = x * over  # before the divisor's polynomial: fewer values are live at a time
    under = 0.00032856589 + square * 7.7766748e-7
    under = 1.0 + square * (0.46714354 + square * (0.025877044 + square * under))
    return over / under


# One program caps one tile of one row: it reads and writes tile * itemsize bytes.
@triton.jit
def _cap_logits_kernel(logits, width, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        wait_and_trigger()
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + tl.program_id(0).to(tl.int64) * width + columns
    values = tl.load(at, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(at, (cap * tanh(values / cap)).to(logits.dtype.element_ty), mask=columns < width)


def cap_logits_triton(logits, cap) -> None:
    """Launch the kernel; see `cap_logits`."""
    rows, width = logits.shape
    grid = (rows, triton.cdiv(width, _BLOCK))
    _cap_logits_kernel[grid](logits, width, cap, BLOCK=_BLOCK, num_warps=4, **early_start_options(logits.device))


@operator(triton_version=cap_logits_triton, is_compiled=True)
def cap_logits(logits: Written[Tensor], cap: float) -> None:
    """Cap logits in place.

    Args:
        logits: [rows, vocab], contiguous.
        cap: > 0, the bound of the results.
    """
    logits.copy_(logits.float().div_(cap).tanh_().mul_(cap))
