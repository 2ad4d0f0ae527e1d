"""One byte a weight, with a scale for each output feature: in panels where there are compiled kernels, else as torch
reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from graphdecode.kernels.linear.int8_linear import int8_linear, quantise_int8
from graphdecode.kernels.linear.native_linear import native_linear, to_panels
from graphdecode.linear.panels import Panels
from graphdecode.linear.weight_form import FormOptions, WeightForm


@dataclass(frozen=True, kw_only=True)
class Int8(WeightForm):
    """An int8 weight.

    Attributes:
        qweight: int8 [out_features, in_features].
        scales: [out_features].
    """

    path = "int8"
    quantize = "int8"
    qweight: Tensor
    scales: Tensor

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: the device is none that there is a fast product for."""
        where = options.device.type
        return "" if where == "cpu" else f"works on a CPU alone, the device is {where}"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> Self:
        """Return the weight rounded to int8."""
        out_features, in_features = weight.shape
        qweight, scales = quantise_int8(weight)
        return cls(out_features=out_features, in_features=in_features, qweight=qweight, scales=scales, bias=bias)

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        int8_linear(out, x, self.qweight, self.scales, self.bias)


@dataclass(frozen=True, kw_only=True)
class Int8Panels(WeightForm):
    """An int8 weight in panels.

    Attributes:
        panels: what `to_panels` made of the int8 weight.
        scales: [out_features].
    """

    path = "int8"
    quantize = "int8"
    panels: Tensor
    scales: Tensor

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not, as for panels of full weights."""
        return Panels.why_not(options)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> Self:
        """Return the weight rounded to int8, in panels."""
        out_features, in_features = weight.shape
        qweight, scales = quantise_int8(weight)
        panels = to_panels(qweight)
        return cls(out_features=out_features, in_features=in_features, panels=panels, scales=scales, bias=bias)

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        native_linear(out, x, self.panels, self.scales, self.bias)
