"""On a CPU with compiled kernels: the weight in panels, read at the memory's bandwidth for any shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphdecode.kernels.linear.native_linear import can_panel, native_linear, to_panels
from graphdecode.linear.weight_form import FormOptions, WeightForm


@dataclass(frozen=True)
class Panels(WeightForm):
    """A weight in panels; not measured, for oneDNN's threads beside the kernels' own cost more than they gain."""

    path = "native"
    panels: Tensor  # what `to_panels` made of the weight
    scales: Tensor | None = None  # [out_features], of weights that are rounded

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: there are no compiled kernels, or none for the dtype or the device."""
        probe = torch.empty(0, dtype=options.dtype, device=options.device)
        return "" if can_panel(probe) else "needs compiled kernels, and a CPU"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return the weight in panels."""
        return cls(weight.shape, bias, to_panels(weight))

    @property
    def gives_floats(self) -> bool:
        """Sums are written as they are."""
        return True

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        native_linear(out, x, self.panels, self.scales, self.bias)
