"""The forms of a whole weight: as it stands, in panels, as oneDNN packs it, or rounded to a byte a weight.

As it stands it is for torch's product on a CPU, and on a GPU for cuBLAS's, or a small product where that proved faster;
with one small product for any number of rows a row's bits do not depend on the others. On a CPU with compiled kernels
panels are read at the memory's bandwidth for any shape. Without these, what oneDNN packs is faster where it is large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from graphdecode.linear.weight_form import FormOptions, WeightForm

ROWS_AT_ONCE = 512  # that a small product takes at a time: more would need more workspace


class SmallProduct(NamedTuple):
    """The products that `small_linear` makes of one weight."""

    weight: Tensor
    bias: Tensor | None
    counters: Tensor | None
    config: SmallLinearConfig

    def write(self, out: Tensor, x: Tensor, **fused: Any) -> None:
        """Write the product for `x` into `out`; see `small_linear` for what can be fused with it."""
        for begin in range(0, x.shape[0], ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            small_linear(out[rows], x[rows], self.weight, self.bias, self.counters, self.config, **fused)

    def normed(self, out: Tensor, x: Tensor, gain: Tensor, eps: float) -> None:
        """Write the product for the norm of `x`; see `FusedProduct`."""
        self.write(out, x, gain=gain, eps=eps)

    def gated(self, out: Tensor, x: Tensor, gain: Tensor | None, eps: float, activation: str) -> None:
        """Write the gated product for `x`, or for its norm; see `FusedProduct`."""
        self.write(out, x, gain=gain, eps=eps, epilogue=activation)

    def added(self, residual: Tensor, x: Tensor, scale: float) -> None:
        """Add the product for `x` to the residual; see `FusedProduct`."""
        self.write(residual, x, epilogue="add", scale=scale)


@dataclass(frozen=True)
class Plain(WeightForm):
    """A plain weight."""

    path = "plain"
    is_measured = True
    weight: Tensor  # [out_features, in_features]
    counters: Tensor | None = None  # int32, the workspace of small products with splits; all weights share it

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return the weight itself, on a GPU with a measured choice for each number of rows."""
        if not weight.is_cuda:
            return cls(weight.shape, bias, weight)
        choices = options.tuner.choose_small(weight, bias, options.batch_sizes)
        return cls(weight.shape, bias, weight, options.tuner.counters(weight.device), choices=choices)

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        small = self.fused(x.shape[0])
        if small is None:
            linear(out, x, self.weight, self.bias)
        else:
            small.write(out, x)

    def fused(self, rows: int) -> SmallProduct | None:
        """Return the small product, where so many rows have one."""
        config = self.choice(rows).config
        return None if config is None else SmallProduct(self.weight, self.bias, self.counters, config)

    @property
    def workspace(self) -> list[Tensor]:
        """The counters, where there are some."""
        return [] if self.counters is None else [self.counters]

    def rechosen(self, change: Callable[[LinearChoice], LinearChoice | None]) -> WeightForm:
        """Return the same weight with other products for the numbers of rows that have a choice."""
        changed = {rows: change(choice) for rows, choice in self.choices.items()}
        return replace(self, choices={rows: choice for rows, choice in changed.items() if choice is not None})


@dataclass(frozen=True)
class Fixed(Plain):
    """A plain weight with a product that follows from its shape alone."""

    path = "fixed"
    is_measured = False
    config: SmallLinearConfig | None = None

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: it is for those who ask for it, on a GPU; a CPU's compiled product is invariant anyway."""
        return "" if options.batch_invariant and options.device.type == "cuda" else "is for batch_invariant on a GPU"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return the weight itself, with its one configuration."""
        early = has_early_start(weight.device)
        config = fixed_config(weight.shape[0], weight.shape[1], weight.element_size(), early)
        return cls(weight.shape, bias, weight, options.tuner.counters(weight.device), config)

    def choice(self, rows: int) -> LinearChoice:
        """Return the one path, whatever the number of rows."""
        return LinearChoice(self.path, self.config)


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
        return cls(weight.shape, bias, *quantize_int8(weight, options.row_maxima))

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
        qweight, scales = quantize_int8(weight, options.row_maxima)
        return cls(weight.shape, bias, to_panels(qweight), scales)
