"""On a CPU without compiled kernels: the weight as oneDNN packs it, faster than the plain one where it is large."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphdecode.kernels.linear.packed_linear import can_pack, pack, packed_linear
from graphdecode.linear.weight_form import FormOptions, WeightForm


@dataclass(frozen=True)
class Packed(WeightForm):
    """A weight packed by oneDNN."""

    path = "packed"
    is_measured = True
    packed: Tensor  # opaque

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: oneDNN does not pack the dtype, or not on the device, or rounds what is asked for whole."""
        if options.in_floats and options.dtype != torch.float32:
            return "writes no float32"
        probe = torch.empty(0, dtype=options.dtype, device=options.device)
        return "" if can_pack(probe) else "needs oneDNN, float32 or bfloat16, and a CPU"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return the weight packed."""
        return cls(weight.shape, bias, pack(weight))

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        packed_linear(out, x, self.packed, self.bias)
