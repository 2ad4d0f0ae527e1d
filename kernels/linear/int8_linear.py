"""Linear layers with int8 weights, which halve or quarter the bytes that a step reads."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..native.registration import operator
from ..native.signature import AnyElement, Wide, Written
from .linear import plain_product

# torch's int8 product is a matrix-vector loop: from this many rows on, a product with the dequantised
# weight is faster. It is vectorised for bf16 alone.
_INT8_DEQUANTISE_ROWS = {torch.bfloat16: 17, torch.float16: 17, torch.float32: 3}
_INT8_PRODUCT = getattr(torch, "_weight_int8pack_mm", None)


@operator()
def int8_linear(out: Written[Wide], x: Tensor, qweight: AnyElement, scales: Tensor, bias: Tensor | None = None) -> None:
    """Write `x @ (qweight * scales[:, None]).T + bias` into `out`: int8 weights, activations untouched.

    Made for bf16 on a CPU: torch's int8 product is vectorised for bf16 alone, and fp32 activations take a product
    with the dequantised weight from three rows on, which saves memory but no time.

    Args:
        out: [rows, out_features], contiguous, of x's dtype, or fp32.
        x: [rows, in_features], fp32, bf16 or fp16.
        qweight: int8 [out_features, in_features].
        scales: [out_features], of x's dtype.
        bias: [out_features] or None.
    """
    if out.dtype != x.dtype:
        plain_product(out, x, qweight, None)
        out.mul_(scales)
    elif _INT8_PRODUCT is not None and x.is_cpu and x.shape[0] < _INT8_DEQUANTISE_ROWS[x.dtype]:
        out.copy_(_INT8_PRODUCT(x.contiguous(), qweight, scales))
    else:
        torch.mm(x, qweight.to(x.dtype).t(), out=out)
        out.mul_(scales)
    if bias is not None:
        out.add_(bias)


def quantise_int8(weight: Tensor, maxima: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return (int8 [n, k], scales [n] of the weight's dtype): symmetric, one scale per output feature.

    Args:
        weight: [n, k], any float dtype.
        maxima: takes the largest magnitudes [n] and returns those of rows of which these are a part; None: the same.
    """
    largest = torch.maximum(weight.amax(dim=1), -weight.amin(dim=1)).float()
    if maxima is not None:
        largest = maxima(largest)
    scales = (largest / 127).clamp_(min=1e-12).to(weight.dtype)
    qweight = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for start in range(0, weight.shape[0], 4096):  # no second copy of a large weight in fp32
        rows = slice(start, start + 4096)
        qweight[rows] = (weight[rows].float() / scales[rows, None].float()).round_().clamp_(-127, 127)
    return qweight, scales
