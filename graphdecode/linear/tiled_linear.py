"""Quantized weights in tiles, for a GPU; their products fuse norm and epilogue.

Products of more rows may dequantize the weight first, where that is faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from graphdecode.kernels.linear.dequantize_tiles import dequantized_linear
from graphdecode.kernels.linear.small_linear import MOST_ROWS, SmallLinearConfig, tiled_config
from graphdecode.kernels.linear.tiled_linear import tiled_linear
from graphdecode.kernels.linear.weight_tiles import WeightTiles, columns_of, moved_tiles
from graphdecode.kernels.model.act_mul import ACTIVATIONS, act_mul
from graphdecode.kernels.native.optional_triton import has_early_start
from graphdecode.linear.linear_choice import DEQUANTIZED, Choices, LinearChoice
from graphdecode.linear.quantization.quantized_weight import QuantizedWeight
from graphdecode.linear.quantized_linear import Int8Linear, QuantizedLinear
from graphdecode.linear.small_linear_timing import FusedForm, TiledOperand
from graphdecode.linear.unquantized import UnquantizedLinear
from graphdecode.linear.weight_form import CHUNK_ROWS, FormOptions, FusedProduct, RowTable


@dataclass(frozen=True)
class TiledLinear(QuantizedLinear):
    """A quantized weight in tiles; fused tensors of several types are parts, each with its own product."""

    path = "tiles"
    device = "cuda"
    unquantized = UnquantizedLinear
    parts: tuple[WeightTiles, ...]
    counters: Tensor  # int32, workspace of products with splits, shared by all weights
    units: int  # multiprocessors of the GPU
    early: bool  # kernels support programmatic dependent launch
    major: int  # its major compute capability
    is_invariant: bool  # a row's bits do not depend on the number of rows
    fused_form: FusedForm  # what a step fuses with the product
    order: Tensor | None = None  # int32 [in_features], the input feature of each column; None: in order
    # workspace of products that dequantize the weight first, shared by all weights; None: there are none
    scratch: Tensor | None = None

    @classmethod
    def of_parts(
        cls, shape: tuple[int, ...], bias: Tensor | None, parts: list[QuantizedWeight], options: FormOptions
    ) -> Self | None:
        tiles = [each for part in parts if (each := part.tiles()) is not None]
        if len(tiles) < len(parts):
            return None
        order = parts[0].order
        device = options.device
        properties = torch.cuda.get_device_properties(device)
        form = cls(
            shape,
            bias,
            tuple(moved_tiles(part, device) for part in tiles),
            options.tuner.counters(device),
            properties.multi_processor_count,
            has_early_start(device),
            properties.major,
            options.batch_invariant,
            options.fused,
            None if order is None else order.to(device),
        )
        return form if options.batch_invariant else form._with_choices(options)

    def _with_choices(self, options: FormOptions) -> Self:
        """Return the weight with the fastest product for some numbers of rows.

        Few rows are measured if it is one part in order; many with its largest part, for all of them.
        """
        tuner, config = options.tuner, partial(self._config, is_normed=self.fused_form.is_normed)
        largest = max(self.parts, key=lambda part: part.words.shape[1])
        operand = TiledOperand(largest, self.in_features, options.dtype)
        choices: Choices | None = None
        if len(self.parts) == 1 and self.order is None:
            choices = tuner.choose_tiled(operand, self.bias, options.batch_sizes, options.fused, config)
        scratch = tuner.scratch(options.device, options.dtype)
        if scratch is not None and scratch.numel() >= self.in_features:
            operand = operand._replace(scratch=scratch)
            many = tuner.choose_dequantized(operand, options.batch_sizes, options.fused, config)
            choices = many if choices is None else choices | many
        return replace(self, choices=choices or {}, scratch=scratch)

    def apply(self, out: Tensor, x: Tensor) -> None:
        x = x if self.order is None else torch.index_select(x, 1, self.order)
        if self.scratch is None or out.dtype != self.scratch.dtype or not self._dequantizes(x.shape[0]):
            self._product(x.shape[0]).write(out, x)
            return
        sizes = [part.words.shape[1] for part in self.parts]
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(sizes)
        for part, bias, columns in zip(self.parts, biases, out.split(sizes, dim=1), strict=True):
            dequantized_linear(columns, x, part, bias, self.scratch)

    def fused(self, rows: int) -> FusedProduct | None:
        """Return the product; None if the input has to be reordered, or the weight dequantized, first."""
        return self._product(rows) if self.order is None and not self._dequantizes(rows) else None

    def choice(self, rows: int) -> LinearChoice:
        """Return the path with its configuration, and its measurements, if any."""
        known = self.choices.get(rows)
        return known or LinearChoice(DEQUANTIZED if self._dequantizes(rows) else self.path, self._config(rows))

    def _dequantizes(self, rows: int) -> bool:
        """Whether products of so many rows dequantize the weight first: so do those of the next lower measured rows."""
        if rows <= MOST_ROWS:
            return False
        measured = max((each for each in self.choices if MOST_ROWS < each <= rows), default=None)
        return measured is not None and self.choices[measured].path == DEQUANTIZED

    @property
    def row_table(self) -> RowTable | None:
        """The weight, if it has one part and its columns are in order."""
        return RowTable(self.parts[0], self.out_features) if len(self.parts) == 1 and self.order is None else None

    @property
    def workspace(self) -> list[Tensor]:
        return [self.counters] if self.scratch is None else [self.counters, self.scratch]

    def _product(self, rows: int) -> FusedProduct:
        """Return the product for `rows` rows; each part writes its columns."""
        configs = {is_normed: self._config(rows, is_normed=is_normed) for is_normed in (False, True)}
        sizes = tuple(part.words.shape[1] for part in self.parts)
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(sizes)

        def product(out: Tensor, x: Tensor, *, gain: Tensor | None = None, **fused: Any) -> None:
            config = configs[gain is not None]
            if len(sizes) == 1:
                tiled_linear(out, x, self.parts[0], self.bias, self.counters, config, gain=gain, **fused)
                return
            activation = fused.pop("epilogue") if fused.get("epilogue") in ACTIVATIONS else None
            whole = out if activation is None else x.new_empty((x.shape[0], sum(sizes)))
            for part, bias, columns in zip(self.parts, biases, whole.split(sizes, dim=1), strict=True):
                tiled_linear(columns, x, part, bias, self.counters, config, gain=gain, **fused)
            if activation is not None:
                act_mul(out, whole, activation)

        return FusedProduct(product)

    def _config(self, rows: int, *, is_normed: bool = False) -> SmallLinearConfig:
        measured = self.choices.get(rows) if is_normed == self.fused_form.is_normed else None
        if measured is not None and measured.config is not None:
            return measured.config
        first, config_rows = self.parts[0], None if self.is_invariant else min(rows, CHUNK_ROWS)
        sizes = (first.words.shape[1], columns_of(first), first.layout)
        early = self.early and self.fused_form.starts_early(config_rows or 1)
        return tiled_config(config_rows, *sizes, self.units, early, is_normed, self.major)


@dataclass(frozen=True)
class Int8TiledLinear(Int8Linear, TiledLinear):
    """An int8 weight in tiles."""
