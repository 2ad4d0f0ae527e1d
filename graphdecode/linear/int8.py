"""One byte a weight, and a scale for each output feature: in panels where kernels are compiled, or as torch has it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from graphdecode.kernels.linear.int8_linear import int8_linear, quantise_int8
from graphdecode.kernels.linear.native_linear import to_panels
from graphdecode.linear.panels import Panels
from graphdecode.linear.weight_form import FormOptions, WeightForm


@dataclass(frozen=True)
class Int8(WeightForm):
    """An int8 weight."""

    path = quantize = "int8"
    qweight: Tensor  # int8 [out_features, in_features]
    scales: Tensor  # [out_features]

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: there is no product for the device."""
        where = options.device.type
        return "" if where == "cpu" else f"needs a CPU or a CUDA device, the device is {where}"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return the weight rounded to int8."""
        return cls(weight.shape, bias, *quantise_int8(weight, options.row_maxima))

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        int8_linear(out, x, self.qweight, self.scales, self.bias)


@dataclass(frozen=True)
class Int8Panels(Panels):
    """An int8 weight in panels."""

    path = quantize = "int8"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return the weight rounded to int8, in panels."""
        qweight, scales = quantise_int8(weight, options.row_maxima)
        return cls(weight.shape, bias, to_panels(qweight), scales)
