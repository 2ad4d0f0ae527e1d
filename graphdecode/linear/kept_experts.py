"""The weights of experts in the few bits in which their source has them: in panels on a CPU, in tiles on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.kernels.linear.quantised_linear import QuantisedPanels
from graphdecode.kernels.linear.small_linear_config import tiled_config
from graphdecode.kernels.linear.weight_tiles import WeightTiles, columns_of, joined_tiles, moved_tiles
from graphdecode.kernels.moe.quantised_expert_linear import panels_by_turns, quantised_expert_linear, stacked_panels
from graphdecode.kernels.moe.tiled_expert_linear import tiled_expert_linear
from graphdecode.linear.expert_form import NO_GATE, ExpertForm, ExpertNames, Gate, shape_of
from graphdecode.linear.few_bits import FewBits, FewBitsSource, read_parts
from graphdecode.linear.kept import Kept, KeptPanels
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.tiles import KeptTiles
from graphdecode.linear.weight_form import FormOptions, LinearNames, TensorSource


@dataclass(frozen=True)
class ExpertPanels(ExpertForm):
    """Weights in panels, whose values are the source's own, not rounded."""

    path = "panels"
    weight: QuantisedPanels
    columns: Tensor | None  # int32 [experts, in_features], the input feature of each column; None: as they stand
    layout: str  # the path of their `FewBits`
    batch_invariant: bool

    @classmethod
    def load(
        cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions
    ) -> ExpertForm | None:
        """Read all experts' weights; None where they are in no few bits, or not all of one kind."""
        if KeptPanels.why_not(options):
            return None
        firsts: list[FewBits] = []  # of each expert

        def made() -> Iterator[QuantisedPanels | None]:
            for parts in _experts(source, names, KeptPanels):
                panels = [held for part in parts if (held := part.panels(by_values=False)) is not None]
                if not parts or len(panels) < len(parts):
                    yield None
                    return
                firsts.append(parts[0])
                yield panels[0] if len(panels) == 1 else panels_by_turns(*panels)

        weight = stacked_panels(made(), names.experts)
        columns = [first.order.int() for first in firsts if first.order is not None]
        if weight is None or 0 < len(columns) < names.experts:
            return None
        order = torch.stack(columns) if columns else None
        return cls(shape_of(source, names), bias, weight, order, firsts[0].path, options.batch_invariant)

    @property
    def gives_floats(self) -> bool:
        """Sums are written as they are."""
        return True

    def choice(self, rows: int) -> LinearChoice:
        """Return the layout, which says more than that they are in panels."""
        return LinearChoice(self.layout)

    def apply(
        self, out: Tensor, x: Tensor, order: Tensor, offsets: Tensor, *, slots: int, gate: Gate = NO_GATE
    ) -> None:
        """Write the product of each listed pair into `out`."""
        invariant, chosen = self.batch_invariant, gate._asdict()
        held = (self.weight, self.columns, self.bias)
        quantised_expert_linear(out, x, *held, order, offsets, slots=slots, **chosen, batch_invariant=invariant)


@dataclass(frozen=True)
class ExpertTiles(ExpertForm):
    """Weights in tiles, the rows of one expert after another, undone as they are multiplied."""

    path = "tiles"
    tiles: WeightTiles
    major: int  # of the GPU's compute capability
    is_invariant: bool  # a pair's bits do not depend on the number of pairs

    @classmethod
    def load(
        cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions
    ) -> ExpertForm | None:
        """Read all experts' weights; None where they are in no few bits that tiles can hold, or not all of one kind."""
        if KeptTiles.why_not(options):
            return None
        held: list[WeightTiles] = []
        for parts in _experts(source, names, KeptTiles):
            tiles = [own for part in parts if part.order is None and (own := part.tiles()) is not None]
            if not parts or len(tiles) < len(parts) or {own.layout for own in tiles} != {(held or tiles)[0].layout}:
                return None
            held += [moved_tiles(own, options.device) for own in tiles]
        if len({part.scales.dtype for part in held}) > 1:
            return None
        major = torch.cuda.get_device_properties(options.device).major
        return cls(shape_of(source, names), bias, joined_tiles(held), major, options.batch_invariant)

    def apply(
        self, out: Tensor, x: Tensor, order: Tensor, offsets: Tensor, *, slots: int, gate: Gate = NO_GATE
    ) -> None:
        """Write the product of each listed pair into `out`; tiles have the rows that an expert has on average."""
        sizes = (out.shape[1], columns_of(self.tiles), self.tiles.layout)
        rows = None if self.is_invariant else max(1, -(-out.shape[0] // self.shape[0]))
        config = tiled_config(rows, *sizes, 1, major=self.major)
        tiled_expert_linear(out, x, self.tiles, self.bias, order, offsets, config, slots=slots, **gate._asdict())


def _experts(source: TensorSource, names: ExpertNames, form: type[Kept]) -> Iterator[tuple[FewBits, ...]]:
    """Yield each expert's weight, with a gate both halves; nothing of one that has none, or a part of some."""
    for expert in range(names.experts):
        own, found = LinearNames(names.of(expert)), None
        if form.keeps(source, own):
            with suppress(ArgumentError):  # a shard's part begins within a group
                found = _whole(source, names, own, expert)
        yield () if found is None else tuple(found.rows(rows) for rows in _parts_of(found.shape[0], names))


def _whole(source: TensorSource, names: ExpertNames, own: LinearNames, expert: int) -> FewBits | None:
    """Return an expert's weight in one; None where it is in no few bits, or in several kinds."""
    if names.is_stack and isinstance(source, FewBitsSource):
        return source.read_few_bits(own.weights[0], expert=expert)
    parts = read_parts(source, own) or []
    return parts[0] if len(parts) == 1 else None


def _parts_of(rows: int, names: ExpertNames) -> tuple[slice, ...]:
    """Return which rows of an expert's weight are multiplied as one: with a gate those of each half."""
    if not names.is_gated:
        return (slice(0, rows),)
    if names.is_stack and names.has_turns:
        return slice(0, rows, 2), slice(1, rows, 2)
    return slice(0, rows // 2), slice(rows // 2, rows)
