"""Linear layers with a weight that oneDNN packed: on a CPU it is read at most of the bandwidth at any batch.

torch's plain product reaches a third of it at batch 8. Small matrices are the other way round: there the packed
product's overhead shows.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..native.registration import operator

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


def bind_packed_linear(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None) -> Callable[[], Tensor]:
    """Return the product of fixed tensors with a weight packed by oneDNN; see `packed_linear`."""
    product = functools.partial(_PACKED_PRODUCT.default._op, x, packed, bias, "none", [], "")
    return lambda: out.copy_(product())


def packed_linear_torch(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None) -> None:
    """Multiply with a weight packed by oneDNN; see `packed_linear`."""
    bind_packed_linear(out, x, packed, bias)()


_packed_linear = operator(
    "packed_linear(Tensor(a!) out, Tensor x, Tensor packed, Tensor? bias) -> ()",
    torch_version=packed_linear_torch,
    bound_version=bind_packed_linear,
    keys=("MkldnnCPU",),
)


def packed_linear(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> None:
    """Write `x @ weight.T + bias` into `out`, the weight as oneDNN packed it. CPU alone.

    Args:
        out: [rows, out_features], contiguous.
        x: [rows, in_features], fp32 or bf16; any number of rows.
        packed: what `pack(weight)` returned: an opaque tensor.
        bias: [out_features] or None.
    """
    _packed_linear(out, x, packed, bias)
