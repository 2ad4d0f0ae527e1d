"""The forms of a whole weight: as it stands, in panels, as oneDNN packs it, or rounded to a byte a weight.

As it stands torch's product reads it on a CPU, and on a GPU cuBLAS's, or a small product where that proved faster. With
one small product for any number of rows a row's bits do not depend on the others. On a CPU with compiled kernels panels
are read at the memory's bandwidth for any shape. Without these, what oneDNN packs is faster where it is large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphdecode.kernels.linear.linear import (
    can_pack,
    can_panel,
    int8_linear,
    linear,
    native_linear,
    pack,
    packed_linear,
    quantize_int8,
    to_panels,
)
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, fixed_config, small_linear
from graphdecode.kernels.native.optional_triton import has_early_start
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import FormOptions, FusedProduct, WeightForm


@dataclass(frozen=True)
class Plain(WeightForm):
    """A weight as it stands."""

    path = "plain"
    is_measured = True
    weight: Tensor  # [out_features, in_features]
    counters: Tensor | None = None  # int32, the workspace of small products with splits; all weights share it
    config: SmallLinearConfig | None = None  # of one product for any number of rows

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> Plain:
        """Return the weight itself, on a GPU with its one configuration or a measured one for each number of rows."""
        if not weight.is_cuda:
            return cls(weight.shape, bias, weight)
        counters = options.tuner.counters(weight.device)
        if options.batch_invariant:
            (rows, columns), early = weight.shape, has_early_start(weight.device)
            return cls(weight.shape, bias, weight, counters, fixed_config(rows, columns, weight.element_size(), early))
        choices = options.tuner.choose_small(weight, bias, options.batch_sizes, options.fused)
        return cls(weight.shape, bias, weight, counters, choices=choices)

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        small = self.fused(x.shape[0])
        if small is None:
            linear(out, x, self.weight, self.bias)
        else:
            small.write(out, x)

    def fused(self, rows: int) -> FusedProduct | None:
        """Return the small product, where so many rows have one."""
        config = self.choice(rows).config
        if config is None:
            return None
        return FusedProduct(
            lambda out, x, **fused: small_linear(out, x, self.weight, self.bias, self.counters, config, **fused)
        )

    def choice(self, rows: int) -> LinearChoice:
        """Return the one configuration, or what was measured for so many rows."""
        return super().choice(rows) if self.config is None else LinearChoice("fixed", self.config)

    @property
    def workspace(self) -> list[Tensor]:
        """The counters, where there are some."""
        return [] if self.counters is None else [self.counters]

    def rechosen(self, change: Callable[[LinearChoice], LinearChoice | None]) -> WeightForm:
        """Return the same weight with other products for the numbers of rows that have a choice."""
        changed = {rows: change(choice) for rows, choice in self.choices.items()}
        return replace(self, choices={rows: choice for rows, choice in changed.items() if choice is not None})


@dataclass(frozen=True)
class Panels(WeightForm):
    """A weight in panels; not measured, for oneDNN's threads beside the kernels' own cost more than they gain."""

    path = "native"
    panels: Tensor  # what `to_panels` made of the weight
    gives_floats = True  # sums are written as they are

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: there are no compiled kernels, or none for the dtype or the device."""
        probe = torch.empty(0, dtype=options.dtype, device=options.device)
        return "" if can_panel(probe) else "needs compiled kernels, and a CPU"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return the weight in panels."""
        return cls(weight.shape, bias, to_panels(weight))

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        native_linear(out, x, self.panels, None, self.bias)


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


@dataclass(frozen=True)
class Int8(WeightForm):
    """An int8 weight on a CPU, in panels where there are compiled kernels."""

    path = quantize = "int8"
    qweight: Tensor  # int8 [out_features, in_features], or in panels
    scales: Tensor  # [out_features]

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: there is no product for the device."""
        where = options.device.type
        return "" if where == "cpu" else f"needs a CPU or a CUDA device, the device is {where}"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return the weight rounded to int8."""
        qweight, scales = quantize_int8(weight, options.row_maxima)
        return cls(weight.shape, bias, to_panels(qweight) if can_panel(weight) else qweight, scales)

    @property
    def gives_floats(self) -> bool:
        """Compiled kernels write sums as they are."""
        return self.qweight.dim() == 4

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        product = native_linear if self.qweight.dim() == 4 else int8_linear
        product(out, x, self.qweight, self.scales, self.bias)
