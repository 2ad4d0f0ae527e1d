"""On a GPU: the weights of experts in tiles of few bits, undone as they are multiplied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from graphdecode.kernels.linear.small_linear_config import tiled_config
from graphdecode.kernels.linear.weight_tiles import WeightTiles, columns_of, joined_tiles, moved_tiles
from graphdecode.kernels.moe.tiled_expert_linear import tiled_expert_linear
from graphdecode.linear.expert_form import NO_GATE, ExpertForm, ExpertNames, Gate, shape_of
from graphdecode.linear.groups import GroupSource
from graphdecode.linear.quantised_experts import blocks_of_expert, groups_of_expert
from graphdecode.linear.tile_sources import TILED_BLOCKS, tiles_of_blocks, tiles_of_groups
from graphdecode.linear.tiles import Tiles
from graphdecode.linear.weight_form import BlockSource, FormOptions, TensorSource


@dataclass(frozen=True)
class TiledExperts(ExpertForm):
    """Weights in tiles, the rows of one expert after another."""

    path = "tiles"
    tiles: WeightTiles
    major: int  # of the GPU's compute capability
    is_invariant: bool  # a pair's bits do not depend on the number of pairs

    @classmethod
    def _of(
        cls,
        shape: tuple[int, ...],
        made: Iterable[list[WeightTiles] | None],
        bias: Tensor | None,
        options: FormOptions,
    ) -> Self | None:
        """Return the tiles of all experts, one after another, as one weight; None where one has none."""
        held: list[WeightTiles] = []
        for parts in made:
            if parts is None or {part.layout for part in parts} != {(held or parts)[0].layout}:
                return None
            held += [moved_tiles(part, options.device) for part in parts]
        if len({part.scales.dtype for part in held}) > 1:
            return None
        major = torch.cuda.get_device_properties(options.device).major
        return cls(shape, bias, joined_tiles(held), major, options.batch_invariant)

    def apply(
        self, out: Tensor, x: Tensor, order: Tensor, offsets: Tensor, *, slots: int, gate: Gate = NO_GATE
    ) -> None:
        """Write the product of each listed pair into `out`; tiles have the rows that an expert has on average."""
        sizes = (out.shape[1], columns_of(self.tiles), self.tiles.layout)
        rows = None if self.is_invariant else max(1, -(-out.shape[0] // self.shape[0]))
        config = tiled_config(rows, *sizes, 1, major=self.major)
        tiled_expert_linear(out, x, self.tiles, self.bias, order, offsets, config, slots=slots, **gate._asdict())


@dataclass(frozen=True)
class BlockTileExperts(TiledExperts):
    """Weights in GGUF's blocks."""

    quantize = "gguf"

    @classmethod
    def load(
        cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions
    ) -> ExpertForm | None:
        """Read all experts' blocks; None where they have none that tiles can hold, or not all of one type."""
        if Tiles.why_not(options) or not isinstance(source, BlockSource):
            return None

        def made() -> Iterator[list[WeightTiles] | None]:
            for expert in range(names.experts):
                parts = blocks_of_expert(source, names, expert)
                is_kept = parts is not None and all(kind in TILED_BLOCKS for kind, _ in parts)
                yield [tiles_of_blocks(stored.contiguous(), kind) for kind, stored in parts or ()] if is_kept else None

        return cls._of(shape_of(source, names), made(), bias, options)


@dataclass(frozen=True)
class GroupTileExperts(TiledExperts):
    """Weights in groups."""

    @classmethod
    def load(
        cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions
    ) -> ExpertForm | None:
        """Read all experts' groups; None where they have none that tiles can hold, or not all of one kind."""
        if Tiles.why_not(options) or not isinstance(source, GroupSource):
            return None

        def made() -> Iterator[list[WeightTiles] | None]:
            for expert in range(names.experts):
                parts = groups_of_expert(source, names, expert)
                tiles = [None if part.order is not None else tiles_of_groups(part) for part in parts or ()]
                whole = [held for held in tiles if held is not None]
                yield None if parts is None or len(whole) < len(parts) else whole

        return cls._of(shape_of(source, names), made(), bias, options)
