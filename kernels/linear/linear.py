"""Linear layers, `out = x @ weight.T + bias`, with the plain weight: cuBLAS on a GPU, torch's own product on a CPU."""

import torch
from torch import Tensor

from ..native.registration import operator
from ..native.signature import Written


def plain_product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Multiply with torch's own product; see `linear`."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


@operator()
def linear(out: Written[Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Write `x @ weight.T + bias` into `out`.

    Args:
        out: [rows, out_features], contiguous.
        x: [rows, in_features], of the same dtype.
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """
    plain_product(out, x, weight, bias)
