"""On a CPU with compiled kernels: the weight in panels, read at the memory's bandwidth for any shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from graphdecode.kernels.linear.native_linear import can_panel, native_linear, to_panels
from graphdecode.linear.weight_form import FormOptions, WeightForm


@dataclass(frozen=True, kw_only=True)
class Panels(WeightForm):
    """A weight in panels. Nothing is measured: oneDNN's threads beside the kernels' own would cost more than they gain.

    Attributes:
        panels: what `to_panels` made of the weight.
    """

    path = "native"
    panels: Tensor

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: there are no compiled kernels, or none for the dtype or the device."""
        probe = torch.empty(0, dtype=options.dtype, device=options.device)
        return "" if can_panel(probe) else "needs compiled kernels, float32 or bfloat16, and a CPU"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> Self:
        """Return the weight in panels."""
        out_features, in_features = weight.shape
        return cls(out_features=out_features, in_features=in_features, panels=to_panels(weight), bias=bias)

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        native_linear(out, x, self.panels, None, self.bias)
