"""On a CPU without compiled kernels: the weight as oneDNN packs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from graphdecode.kernels.linear.packed_linear import can_pack, pack, packed_linear
from graphdecode.linear.weight_form import FormOptions, WeightForm


@dataclass(frozen=True, kw_only=True)
class Packed(WeightForm):
    """A weight packed by oneDNN: faster than the plain one where it is large.

    Attributes:
        packed: oneDNN's opaque form.
    """

    path = "packed"
    is_measured = True
    packed: Tensor

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: oneDNN does not pack the dtype, or not on the device."""
        probe = torch.empty(0, dtype=options.dtype, device=options.device)
        return "" if can_pack(probe) else "needs oneDNN, float32 or bfloat16, and a CPU"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> Self:
        """Return the weight packed."""
        out_features, in_features = weight.shape
        return cls(out_features=out_features, in_features=in_features, packed=pack(weight), bias=bias)

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        packed_linear(out, x, self.packed, self.bias)
