"""Linear layers with a weight that oneDNN packed: on a CPU it is read at most of the bandwidth at any batch.

torch's plain product reaches a third of it at batch 8. Small matrices are the other way round: there the packed
product's overhead shows.
"""

from typing import Any

import torch
from torch import Tensor

from ..native.registration import operator
from ..native.signature import Written

_PACKED_ROWS = 8  # oneDNN's layout for so many rows is as good for one, and a third better than that for one at eight
_PACK: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_PACKED_PRODUCT: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN packs this weight: fp32 or bf16, on a CPU that it supports, in a torch that says how."""
    is_there = _PACK is not None and _PACKED_PRODUCT is not None and torch.backends.mkldnn.is_available()
    return is_there and weight.is_cpu and weight.dtype in (torch.float32, torch.bfloat16)


def pack(weight: Tensor) -> Tensor:
    """Return [out_features, in_features] as oneDNN reads it fastest: an opaque tensor."""
    return _PACK(weight, _PACKED_ROWS)


@operator(keys=("MkldnnCPU",))
def packed_linear(out: Written[Tensor], x: Tensor, packed: Tensor, bias: Tensor | None = None) -> None:
    """Write `x @ weight.T + bias` into `out`, the weight as oneDNN packed it. CPU alone.

    Args:
        out: [rows, out_features], contiguous.
        x: [rows, in_features], fp32 or bf16; any number of rows.
        packed: what `pack(weight)` returned: an opaque tensor.
        bias: [out_features] or None.
    """
    out.copy_(_PACKED_PRODUCT.default._op(x, packed, bias, "none", [], ""))
