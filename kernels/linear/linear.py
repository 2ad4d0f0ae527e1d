"""Linear layers, `out = x @ weight.T + bias`, with the plain weight: cuBLAS on a GPU, torch's own product on a CPU.

The result may be float32 where activations and weights have 16 bits: sums as they are. cuBLAS writes them so; on a CPU
torch has no such product, and the weight is widened a few rows at a time.
"""

import torch
from torch import Tensor

from ..native.registration import operator
from ..native.signature import Wide, Written

_WIDENED = 1 << 20  # values of a weight that are widened at a time, and stay in a cache until they are multiplied


def plain_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Multiply with torch's own product; see `linear`."""
    if out.dtype != x.dtype:
        _write_sums(out, x, weight)
        if bias is not None:
            out.add_(bias)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _write_sums(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Write the product's sums in float32."""
    if x.is_cuda:
        torch.mm(x, weight.to(x.dtype).t(), out_dtype=out.dtype, out=out)
        return
    wide, rows = x.to(out.dtype), max(1, _WIDENED // weight.shape[1])
    for columns, part in zip(out.split(rows, dim=1), weight.split(rows), strict=True):
        torch.mm(wide, part.to(out.dtype).t(), out=columns)


@operator()
def linear(out: Written[Wide], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Write `x @ weight.T + bias` into `out`.

    Args:
        out: [rows, out_features], contiguous, of x's dtype, or float32.
        x: [rows, in_features].
        weight: [out_features, in_features], of x's dtype.
        bias: [out_features] or None.
    """
    plain_product(out, x, weight, bias)
