"""Linear layers, `out = x @ weight.T + bias`, with the plain weight: cuBLAS on a GPU, torch's own product on a CPU."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..native.registration import operator


def bind_linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[], Tensor]:
    """Return the product of fixed tensors with the plain weight; see `linear`."""
    if bias is None:
        return functools.partial(torch.mm, x, weight.t(), out=out)
    return functools.partial(torch.addmm, bias, x, weight.t(), out=out)


def linear_torch(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Multiply with the plain weight; see `linear`."""
    bind_linear(out, x, weight, bias)()


_linear = operator(
    "linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()",
    torch_version=linear_torch,
    bound_version=bind_linear,
)


def linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Write `x @ weight.T + bias` into `out`.

    Args:
        out: [rows, out_features], contiguous.
        x: [rows, in_features], of the same dtype.
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """
    _linear(out, x, weight, bias)
