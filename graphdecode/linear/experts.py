"""The weights of a layer's experts: one product of all experts, read expert by expert.

Plain weights are in panels on a CPU with compiled kernels; quantized weights are in panels on a CPU, in tiles on a GPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.kernels.linear.linear import can_panel
from graphdecode.kernels.linear.quantized_linear import QuantizedPanels, joined_panels
from graphdecode.kernels.linear.small_linear import tiled_config
from graphdecode.kernels.linear.weight_tiles import WeightTiles, columns_of, joined_tiles, moved_tiles
from graphdecode.kernels.moe.expert_linear import (
    Routed,
    expert_linear,
    expert_panels,
    quantized_expert_linear,
    stacked_panels,
    tiled_expert_linear,
)
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.quantization.quantized_weight import QuantizedSource, QuantizedWeight, read_parts
from graphdecode.linear.quantized_linear import PanelLinear, QuantizedLinear
from graphdecode.linear.tiled_linear import TiledLinear
from graphdecode.linear.weight_form import FormOptions, LinearNames, Shard, StoredForm, TensorSource, read_fused


class Gate(NamedTuple):
    """The activation of a gated product; see `Routed`. "none": the product is not gated."""

    gate: str = "none"
    alpha: float = 1.0
    limit: float = 0.0


class StackLayout(NamedTuple):
    """How a stack holds the weights of experts; by default [experts, out_features, in_features], gate first."""

    interleaved: bool = False  # gate and input alternate (gpt-oss)
    transposed: bool = False  # [experts, in_features, out_features]


class ExpertNames(NamedTuple):
    """The tensors of one product of all experts in a source."""

    weights: tuple[str, ...]  # of each expert in turn, to be fused along their rows; or one stack [experts, ...]
    experts: int  # number of experts
    is_gated: bool  # the first half of the outputs gates the second
    layout: StackLayout = StackLayout()  # of a stack

    @property
    def is_stack(self) -> bool:
        """Whether one tensor holds all experts."""
        return len(self.weights) == 1

    @property
    def interleaves(self) -> bool:
        """Whether gate and input alternate in this product."""
        return self.layout.interleaved and self.is_gated

    def of(self, expert: int) -> tuple[str, ...]:
        """Return the tensors of one expert, or the stack."""
        each = len(self.weights) // self.experts
        return self.weights if self.is_stack else self.weights[expert * each : (expert + 1) * each]


@dataclass(frozen=True)
class ExpertForm(StoredForm):
    """The weights of one product of all experts."""

    @classmethod
    def load(
        cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions
    ) -> ExpertForm | None:
        """Read all experts' weights; None if this form does not support them."""
        return None

    @abstractmethod
    def apply(self, out: Tensor, x: Tensor, pairs: Routed) -> None:
        """Write the product of each listed pair into `out`; see `expert_linear`."""


def shape_of(source: TensorSource, names: ExpertNames) -> tuple[int, int, int]:
    """Return [experts, out_features, in_features]."""
    shapes = [source.tensors[name].shape for name in names.of(0)]
    rows, columns = sum(shape[-2] for shape in shapes), shapes[0][-1]
    is_transposed = names.is_stack and names.layout.transposed
    return (names.experts, columns, rows) if is_transposed else (names.experts, rows, columns)


def dequantized_weights(source: TensorSource, names: ExpertNames, options: FormOptions) -> Iterator[Tensor]:
    """Yield each expert's weight [out_features, in_features], gate first, in new memory."""
    for expert in range(names.experts):
        if not names.is_stack:
            yield read_fused(source, names.of(expert), options.dtype, options.device)
            continue
        (name,) = names.weights
        shape = source.tensors[name].shape[1:]
        stored = torch.empty((1, *shape), dtype=options.dtype, device=options.device)
        source.read(name, stored, Shard(expert, names.experts, 0))
        weight = stored[0].T if names.layout.transposed else stored[0]
        yield torch.cat((weight[::2], weight[1::2])) if names.interleaves else weight


@dataclass(frozen=True)
class UnquantizedExperts(ExpertForm):
    """Weights [experts, out_features, in_features], or in panels; see `expert_linear`."""

    path = "plain"
    weight: Tensor
    batch_invariant: bool

    @classmethod
    def load(
        cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions
    ) -> UnquantizedExperts:
        """Read all experts' weights, dequantized."""
        weights, shape = dequantized_weights(source, names, options), shape_of(source, names)
        return cls.of(weights, shape, options.batch_invariant, bias, is_gated=names.is_gated)

    @classmethod
    def of(
        cls,
        weights: Iterable[Tensor],
        shape: tuple[int, int, int],
        batch_invariant: bool,
        bias: Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> UnquantizedExperts:
        """Return the form of weights [out_features, in_features], one of each expert; `shape` is that of all."""
        stack: Tensor | None = None
        for expert, weight in enumerate(weights):
            stacked = expert_panels(weight, is_gated) if can_panel(weight) else weight.unsqueeze(0)
            if stack is None:
                stack = stacked.new_empty((shape[0], *stacked.shape))
            stack[expert] = stacked
            del weight, stacked
        assert stack is not None
        return cls(shape, bias, stack.flatten(0, 1), batch_invariant)

    @property
    def gives_floats(self) -> bool:
        return self.weight.is_cpu

    def apply(self, out: Tensor, x: Tensor, pairs: Routed) -> None:
        expert_linear(out, x, self.weight, self.bias, pairs, batch_invariant=self.batch_invariant)


@dataclass(frozen=True)
class ExpertPanels(ExpertForm):
    """Quantized weights in panels."""

    path = "panels"
    weight: QuantizedPanels
    columns: Tensor | None  # int32 [experts, in_features], the input feature of each column; None: in order
    layout: str  # `QuantizedWeight.path`
    batch_invariant: bool
    gives_floats = True

    @classmethod
    def load(
        cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions
    ) -> ExpertForm | None:
        """Read all experts' weights; None unless all are quantized alike."""
        if PanelLinear.unavailable_reason(options):
            return None
        firsts: list[QuantizedWeight] = []  # per expert

        def panels_of_experts() -> Iterator[QuantizedPanels | None]:
            for parts in _experts(source, names, PanelLinear):
                panels = [each for part in parts if (each := part.panels(by_values=False)) is not None]
                if not parts or len(panels) < len(parts):
                    yield None
                    return
                firsts.append(parts[0])
                yield joined_panels(panels, interleaved=True)

        weight = stacked_panels(panels_of_experts(), names.experts)
        columns = [first.order.int() for first in firsts if first.order is not None]
        if weight is None or 0 < len(columns) < names.experts:
            return None
        order = torch.stack(columns) if columns else None
        return cls(shape_of(source, names), bias, weight, order, firsts[0].path, options.batch_invariant)

    def choice(self, rows: int) -> LinearChoice:
        """Return the layout of the source."""
        return LinearChoice(self.layout)

    def apply(self, out: Tensor, x: Tensor, pairs: Routed) -> None:
        weights = (self.weight, self.columns, self.bias)
        quantized_expert_linear(out, x, *weights, pairs, batch_invariant=self.batch_invariant)


@dataclass(frozen=True)
class ExpertTiles(ExpertForm):
    """Quantized weights in tiles, expert by expert, dequantized in the product."""

    path = "tiles"
    tiles: WeightTiles
    major: int  # major compute capability of the GPU
    is_invariant: bool  # a pair's bits do not depend on the number of pairs

    @classmethod
    def load(
        cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions
    ) -> ExpertForm | None:
        """Read all experts' weights; None unless all are quantized alike, and tiles support that."""
        if TiledLinear.unavailable_reason(options):
            return None
        expert_tiles: list[WeightTiles] = []
        for parts in _experts(source, names, TiledLinear):
            tiles = [part_tiles for part in parts if part.order is None and (part_tiles := part.tiles()) is not None]
            if (
                not parts
                or len(tiles) < len(parts)
                or {part_tiles.layout for part_tiles in tiles} != {(expert_tiles or tiles)[0].layout}
            ):
                return None
            expert_tiles += [moved_tiles(part_tiles, options.device) for part_tiles in tiles]
        if len({part.scales.dtype for part in expert_tiles}) > 1:
            return None
        major = torch.cuda.get_device_properties(options.device).major
        return cls(shape_of(source, names), bias, joined_tiles(expert_tiles), major, options.batch_invariant)

    def apply(self, out: Tensor, x: Tensor, pairs: Routed) -> None:
        """Write the product of each listed pair into `out`; tiles have the rows that an expert has on average."""
        sizes = (out.shape[1], columns_of(self.tiles), self.tiles.layout)
        rows = None if self.is_invariant else max(1, -(-out.shape[0] // self.shape[0]))
        tiled_expert_linear(out, x, self.tiles, self.bias, pairs, tiled_config(rows, *sizes, 1, major=self.major))


def _experts(
    source: TensorSource, names: ExpertNames, form: type[QuantizedLinear]
) -> Iterator[tuple[QuantizedWeight, ...]]:
    """Yield each expert's weight, both halves if gated; () if it is not quantized, or not all of it alike."""
    for expert in range(names.experts):
        linear_names = LinearNames(names.of(expert))
        parts: list[QuantizedWeight | None] = []
        if form.keeps(source, linear_names):
            with suppress(ArgumentError):  # a shard begins within a group
                if names.is_stack and isinstance(source, QuantizedSource):
                    parts = [source.read_quantized(linear_names.weights[0], expert=expert)]
                else:
                    parts = [*(read_parts(source, linear_names) or [])]
        whole = parts[0] if len(parts) == 1 else None
        yield () if whole is None else tuple(whole.rows(rows) for rows in _halves_of(whole.shape[0], names))


def _halves_of(rows: int, names: ExpertNames) -> tuple[slice, ...]:
    """Return the rows of an expert's weight, or if gated of each half."""
    if not names.is_gated:
        return (slice(0, rows),)
    if names.is_stack and names.layout.interleaved:
        return slice(0, rows, 2), slice(1, rows, 2)
    return slice(0, rows // 2), slice(rows // 2, rows)
