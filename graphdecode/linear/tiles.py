"""On a GPU: a weight of few bits in tiles, multiplied as it is, with what a layer does beside the product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from graphdecode.kernels.linear.linear import quantize_int8
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, tiled_config
from graphdecode.kernels.linear.tiled_linear import tiled_linear
from graphdecode.kernels.linear.weight_tiles import WeightTiles, columns_of, moved_tiles, tiled
from graphdecode.kernels.model.act_mul import act_mul
from graphdecode.kernels.model.embedding import tiled_embedding
from graphdecode.kernels.native.optional_triton import has_early_start
from graphdecode.linear.gguf_blocks import TILED_BLOCKS
from graphdecode.linear.groups import KEPT_GROUPS
from graphdecode.linear.kept import Kept
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.plain import ROWS_AT_ONCE, Fixed, Plain
from graphdecode.linear.quantized_weight import QuantizedWeight
from graphdecode.linear.weight_form import FormOptions, RowTable, WeightForm


class TiledProduct(NamedTuple):
    """The products that `tiled_linear` makes of one weight for some number of rows; each part writes its columns."""

    parts: tuple[WeightTiles, ...]
    sizes: tuple[int, ...]
    bias: Tensor | None
    counters: Tensor
    config: SmallLinearConfig
    normed_config: SmallLinearConfig

    def write(self, out: Tensor, x: Tensor, **fused: Any) -> None:
        """Write the product for `x` into `out`; see `tiled_linear` for what can be fused with it."""
        biases = [None] * len(self.sizes) if self.bias is None else self.bias.split(self.sizes)
        config = self.config if fused.get("gain") is None else self.normed_config
        columns = [out] if len(self.parts) == 1 else out.split(self.sizes, dim=1)
        for begin in range(0, x.shape[0], ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            for part, bias, place in zip(self.parts, biases, columns, strict=True):
                tiled_linear(place[rows], x[rows], part, bias, self.counters, config, **fused)

    def normed(self, out: Tensor, x: Tensor, gain: Tensor, eps: float) -> None:
        """Write the product for the norm of `x`; see `FusedProduct`."""
        self.write(out, x, gain=gain, eps=eps)

    def gated(self, out: Tensor, x: Tensor, gain: Tensor | None, eps: float, activation: str) -> None:
        """Write the gated product for `x`, or for its norm; see `FusedProduct`."""
        if len(self.parts) == 1:
            self.write(out, x, gain=gain, eps=eps, epilogue=activation)
            return
        gate_up = x.new_empty((x.shape[0], sum(self.sizes)))
        self.write(gate_up, x, gain=gain, eps=eps)
        act_mul(out, gate_up, activation)

    def added(self, residual: Tensor, x: Tensor, scale: float) -> None:
        """Add the product for `x` to the residual; see `FusedProduct`."""
        self.write(residual, x, epilogue="add", scale=scale)


class TileRows(NamedTuple):
    """An embedding in tiles."""

    weight: WeightTiles

    def gather(self, out: Tensor, tokens: Tensor, live: Tensor, scale: float) -> None:
        """Write the tokens' rows; see `RowTable`."""
        tiled_embedding(out, tokens, self.weight, live, scale)


@dataclass(frozen=True)
class Tiles(WeightForm):
    """A weight in tiles; tensors that are fused and differ in type are parts, each with a product of its own."""

    path = "tiles"
    parts: tuple[WeightTiles, ...]
    sizes: tuple[int, ...]  # output features of the parts
    counters: Tensor  # int32, the workspace of products with splits; all weights share it
    units: int  # multiprocessors of the GPU
    early: bool  # kernels can begin early
    major: int  # of its compute capability
    is_invariant: bool  # a row's bits do not depend on the number of rows
    order: Tensor | None = None  # int32 [in_features], the input feature of each column; None: as they stand

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: it is for a GPU."""
        is_cuda = options.device.type == "cuda"
        return "" if is_cuda else f"needs a CUDA device, the device is {options.device.type}"

    @classmethod
    def of_tiles(
        cls,
        shape: tuple[int, ...],
        bias: Tensor | None,
        parts: list[WeightTiles],
        options: FormOptions,
        order: Tensor | None = None,
    ) -> Self:
        """Return a weight of parts one below another."""
        device = options.device
        properties = torch.cuda.get_device_properties(device)
        return cls(
            shape,
            bias,
            tuple(moved_tiles(part, device) for part in parts),
            tuple(part.words.shape[1] for part in parts),
            options.tuner.counters(device),
            properties.multi_processor_count,
            has_early_start(device),
            properties.major,
            options.batch_invariant,
            None if order is None else order.to(device),
        )

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        x = x if self.order is None else torch.index_select(x, 1, self.order)
        self._product(x.shape[0]).write(out, x)

    def fused(self, rows: int) -> TiledProduct | None:
        """Return the product itself, unless columns are to be put in order first."""
        return self._product(rows) if self.order is None else None

    def choice(self, rows: int) -> LinearChoice:
        """Return the one path, with how the work is dealt out."""
        return LinearChoice(self.path, self._config(rows))

    @property
    def row_table(self) -> RowTable | None:
        """The weight where it is in one part, and its columns as they stand."""
        return TileRows(self.parts[0]) if len(self.parts) == 1 and self.order is None else None

    @property
    def workspace(self) -> list[Tensor]:
        """The counters."""
        return [self.counters]

    def _product(self, rows: int) -> TiledProduct:
        configs = self._config(rows), self._config(rows, is_normed=True)
        return TiledProduct(self.parts, self.sizes, self.bias, self.counters, *configs)

    def _config(self, rows: int, *, is_normed: bool = False) -> SmallLinearConfig:
        first, given = self.parts[0], None if self.is_invariant else min(rows, ROWS_AT_ONCE)
        sizes = (self.sizes[0], columns_of(first), first.layout)
        return tiled_config(given, *sizes, self.units, self.early, is_normed, self.major)


@dataclass(frozen=True)
class Int8Tiles(Tiles):
    """An int8 weight."""

    quantize = "int8"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return the weight rounded to int8, with a scale for each row; see `quantize_int8`."""
        codes, scales = quantize_int8(weight, options.row_maxima)
        tiles = tiled(codes.view(torch.uint8), "s8", scales[:, None], 0)
        return cls.of_tiles(weight.shape, bias, [tiles], options)


@dataclass(frozen=True)
class KeptTiles(Kept, Tiles):
    """A weight in the few bits in which its source has it."""

    kinds: ClassVar[set[str]] = {*TILED_BLOCKS, *KEPT_GROUPS}

    @classmethod
    def plain(cls, options: FormOptions) -> type[WeightForm]:
        """Return the form of plain weights on a GPU."""
        return Fixed if options.batch_invariant else Plain

    @classmethod
    def of_parts(
        cls, shape: tuple[int, ...], bias: Tensor | None, parts: list[QuantizedWeight], options: FormOptions
    ) -> Self | None:
        """Return parts in tiles; see `Kept`."""
        made = [held for part in parts if (held := part.tiles()) is not None]
        return None if len(made) < len(parts) else cls.of_tiles(shape, bias, made, options, parts[0].order)
