"""Forms of unquantized weights: row-major, in panels, or packed by oneDNN.

Row-major weights are multiplied by torch on a CPU; on a GPU by cuBLAS, or by `small_linear` if measured faster. One
configuration of `small_linear` for any number of rows is batch-invariant. Panels are for compiled CPU kernels, oneDNN's
packing for CPUs without them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphdecode.kernels.linear.linear import (
    can_gate,
    can_pack,
    can_panel,
    gated_linear,
    linear,
    native_linear,
    pack,
    packed_linear,
    to_panels,
)
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, fixed_config, small_linear
from graphdecode.kernels.native.optional_triton import has_early_start
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import FormOptions, FusedProduct, GatedProduct, WeightForm


@dataclass(frozen=True)
class UnquantizedLinear(WeightForm):
    """A row-major weight."""

    path = "plain"
    weight: Tensor  # [out_features, in_features]
    counters: Tensor | None = None  # int32, workspace of small products with splits, shared by all weights
    config: SmallLinearConfig | None = None  # batch-invariant: for any number of rows

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> UnquantizedLinear:
        """Return the weight, on a GPU with its batch-invariant or measured configurations."""
        if not weight.is_cuda:
            return cls(weight.shape, bias, weight)
        counters = options.tuner.counters(weight.device)
        if options.batch_invariant:
            (rows, columns), early = weight.shape, has_early_start(weight.device) and options.fused.starts_early(1)
            return cls(weight.shape, bias, weight, counters, fixed_config(rows, columns, weight.element_size(), early))
        choices = options.tuner.choose_small(weight, bias, options.batch_sizes, options.fused)
        return cls(weight.shape, bias, weight, counters, choices=choices)

    def apply(self, out: Tensor, x: Tensor) -> None:
        small = self.fused(x.shape[0])
        if small is None:
            linear(out, x, self.weight, self.bias)
        else:
            small.write(out, x)

    def fused(self, rows: int) -> FusedProduct | None:
        config = self.choice(rows).config
        if config is None:
            return None
        return FusedProduct(
            lambda out, x, **fused: small_linear(out, x, self.weight, self.bias, self.counters, config, **fused)
        )

    def choice(self, rows: int) -> LinearChoice:
        """Return the batch-invariant configuration, or the measured one."""
        return super().choice(rows) if self.config is None else LinearChoice("fixed", self.config)

    @property
    def workspace(self) -> list[Tensor]:
        return [] if self.counters is None else [self.counters]


@dataclass(frozen=True)
class Panels(WeightForm):
    """A weight in panels; not measured, since oneDNN's threads beside the kernels' own cost more than they gain."""

    path = "native"
    panels: Tensor  # from `to_panels`
    gives_floats = True

    @classmethod
    def unavailable_reason(cls, options: FormOptions) -> str:
        probe = torch.empty(0, dtype=options.dtype, device=options.device)
        return "" if can_panel(probe) else "needs compiled kernels, and a CPU"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        return cls(weight.shape, bias, to_panels(weight))

    def apply(self, out: Tensor, x: Tensor) -> None:
        native_linear(out, x, self.panels, self.bias)

    @property
    def gated(self) -> GatedProduct | None:
        if not can_gate(self.panels, self.out_features):
            return None
        return lambda out, x, activation: gated_linear(out, x, self.panels, activation, self.bias)


@dataclass(frozen=True)
class Packed(WeightForm):
    """A weight packed by oneDNN."""

    path = "packed"
    packed: Tensor  # opaque

    @classmethod
    def unavailable_reason(cls, options: FormOptions) -> str:
        """Return why oneDNN does not support dtype, device or float32 results."""
        if options.in_floats and options.dtype != torch.float32:
            return "writes no float32"
        probe = torch.empty(0, dtype=options.dtype, device=options.device)
        return "" if can_pack(probe) else "needs oneDNN, float32 or bfloat16, and a CPU"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        return cls(weight.shape, bias, pack(weight))

    def apply(self, out: Tensor, x: Tensor) -> None:
        packed_linear(out, x, self.packed, self.bias)
