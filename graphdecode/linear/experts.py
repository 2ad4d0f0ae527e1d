"""The weights of a layer's experts: those of one product, of all experts, read expert by expert.

They have all their bits, in panels on a CPU with compiled kernels, else as they are; or the few bits in which their
source has them, in panels on a CPU, in tiles on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.kernels.linear.linear import can_panel
from graphdecode.kernels.linear.quantized_linear import QuantizedPanels
from graphdecode.kernels.linear.small_linear import tiled_config
from graphdecode.kernels.linear.weight_tiles import WeightTiles, columns_of, joined_tiles, moved_tiles
from graphdecode.kernels.moe.expert_linear import (
    Routed,
    expert_linear,
    expert_panels,
    panels_by_turns,
    quantized_expert_linear,
    stacked_panels,
    tiled_expert_linear,
)
from graphdecode.linear.kept import Kept, KeptPanels
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.quantized_weight import QuantizedSource, QuantizedWeight, read_parts
from graphdecode.linear.tiles import KeptTiles
from graphdecode.linear.weight_form import FormOptions, LinearNames, Shard, TensorSource, read_fused, tensors_in


class Gate(NamedTuple):
    """What is made of a product's two halves, by the names of `expert_linear`'s arguments; the plain one has none."""

    gate: str = "none"
    alpha: float = 1.0
    limit: float = 0.0


NO_GATE = Gate()


class ExpertNames(NamedTuple):
    """Where a source has the weights of one product of all experts.

    Attributes:
        weights: the tensors of one expert after another, to be fused along their rows; or one that is a stack, with all
            experts along its first dimension.
        experts: how many there are.
        is_gated: the first half of the outputs is the gate of the second.
        slots: how many of them a token takes.
        has_turns: stacks are [experts, in_features, out_features], and with a gate its outputs and those that it is for
            stand by turns, as gpt-oss has them.
    """

    weights: tuple[str, ...]
    experts: int
    is_gated: bool
    slots: int
    has_turns: bool = False

    @property
    def is_stack(self) -> bool:
        """Whether one tensor has all experts."""
        return len(self.weights) == 1

    def of(self, expert: int) -> tuple[str, ...]:
        """Return the tensors of one expert; of a stack that is the stack."""
        each = len(self.weights) // self.experts
        return self.weights if self.is_stack else self.weights[expert * each : (expert + 1) * each]


@dataclass(frozen=True)
class ExpertForm(ABC):
    """The weights of all experts for one of their products, as that reads them.

    Attributes:
        path: the form's name in reports.
        shape: [experts, out_features, in_features].
        bias: [experts, out_features] or None.
    """

    path: ClassVar[str]
    shape: tuple[int, ...]
    bias: Tensor | None

    @classmethod
    @abstractmethod
    def load(
        cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions
    ) -> ExpertForm | None:
        """Read all experts' weights into this form, one after another; None where they cannot take it."""

    @abstractmethod
    def apply(
        self, out: Tensor, x: Tensor, order: Tensor, offsets: Tensor, *, slots: int, gate: Gate = NO_GATE
    ) -> None:
        """Write the product of each listed pair into `out`; see `expert_linear` for the arguments."""

    @property
    def gives_floats(self) -> bool:
        """Whether the product takes no longer where it is written in float32, as it was summed up."""
        return False

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the product only reads."""
        return [tensor for entry in fields(self) for tensor in tensors_in(getattr(self, entry.name))]

    @property
    def nbytes(self) -> int:
        """What the weights of all experts take."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def choice(self, rows: int) -> LinearChoice:
        """Return the path that the products of so many tokens take."""
        return LinearChoice(self.path)


def shape_of(source: TensorSource, names: ExpertNames) -> tuple[int, int, int]:
    """Return [experts, out_features, in_features]."""
    shapes = [source.tensors[name].shape for name in names.of(0)]
    rows, columns = sum(shape[-2] for shape in shapes), shapes[0][-1]
    is_transposed = names.is_stack and names.has_turns
    return (names.experts, columns, rows) if is_transposed else (names.experts, rows, columns)


def plain_weights(source: TensorSource, names: ExpertNames, options: FormOptions) -> Iterator[Tensor]:
    """Yield each expert's weight [out_features, in_features], the gate first, in memory of its own."""
    for expert in range(names.experts):
        if not names.is_stack:
            yield read_fused(source, names.of(expert), None, options.dtype, options.device)
            continue
        (name,) = names.weights
        shape = source.tensors[name].shape[1:]
        stored = torch.empty((1, *shape), dtype=options.dtype, device=options.device)
        source.read(name, stored, Shard(expert, names.experts, 0))
        own = stored[0].T if names.has_turns else stored[0]
        yield torch.cat((own[::2], own[1::2])) if names.has_turns and names.is_gated else own


@dataclass(frozen=True)
class PlainExperts(ExpertForm):
    """Weights [experts, out_features, in_features], or the same in panels; see `expert_linear`."""

    path = "plain"
    weight: Tensor
    batch_invariant: bool

    @classmethod
    def load(cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions) -> PlainExperts:
        """Read all experts' weights; those of few bits are undone."""
        whole = stacked(plain_weights(source, names, options), names.experts, is_gated=names.is_gated)
        return cls(shape_of(source, names), bias, whole, options.batch_invariant)

    @property
    def gives_floats(self) -> bool:
        """On a CPU sums are written as they are."""
        return self.weight.is_cpu

    def apply(
        self, out: Tensor, x: Tensor, order: Tensor, offsets: Tensor, *, slots: int, gate: Gate = NO_GATE
    ) -> None:
        """Write the product of each listed pair into `out`."""
        pairs = Routed(order, offsets, slots, *gate)
        expert_linear(out, x, self.weight, self.bias, pairs, batch_invariant=self.batch_invariant)


def stacked(weights: Iterable[Tensor], count: int, *, is_gated: bool) -> Tensor:
    """Return the weights of all experts in one tensor, as `expert_linear` reads them fastest.

    Args:
        weights: [out_features, in_features] of each; each is dropped before the next one is made.
        count: how many experts there are.
        is_gated: whether the first half of the outputs is the gate of the second.
    """
    made = (expert_panels(own, is_gated) if can_panel(own) else own.unsqueeze(0) for own in weights)
    first = next(made)
    whole = first.new_empty((count, *first.shape))
    whole[0] = first
    for expert, own in enumerate(made, 1):
        whole[expert] = own
    return whole.flatten(0, 1)


@dataclass(frozen=True)
class ExpertPanels(ExpertForm):
    """Weights in panels, whose values are the source's own, not rounded."""

    path = "panels"
    weight: QuantizedPanels
    columns: Tensor | None  # int32 [experts, in_features], the input feature of each column; None: as they stand
    layout: str  # the path of their `QuantizedWeight`
    batch_invariant: bool

    @classmethod
    def load(
        cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions
    ) -> ExpertForm | None:
        """Read all experts' weights; None where they are in no few bits, or not all of one kind."""
        if KeptPanels.why_not(options):
            return None
        firsts: list[QuantizedWeight] = []  # of each expert

        def made() -> Iterator[QuantizedPanels | None]:
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
        held, pairs = (self.weight, self.columns, self.bias), Routed(order, offsets, slots, *gate)
        quantized_expert_linear(out, x, *held, pairs, batch_invariant=self.batch_invariant)


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
        tiled_expert_linear(out, x, self.tiles, self.bias, Routed(order, offsets, slots, *gate), config)


def _experts(source: TensorSource, names: ExpertNames, form: type[Kept]) -> Iterator[tuple[QuantizedWeight, ...]]:
    """Yield each expert's weight, with a gate both halves; nothing of one that has none, or a part of some."""
    for expert in range(names.experts):
        own, found = LinearNames(names.of(expert)), None
        if form.keeps(source, own):
            with suppress(ArgumentError):  # a shard's part begins within a group
                found = _whole(source, names, own, expert)
        yield () if found is None else tuple(found.rows(rows) for rows in _parts_of(found.shape[0], names))


def _whole(source: TensorSource, names: ExpertNames, own: LinearNames, expert: int) -> QuantizedWeight | None:
    """Return an expert's weight in one; None where it is in no few bits, or in several kinds."""
    if names.is_stack and isinstance(source, QuantizedSource):
        return source.read_quantized(own.weights[0], expert=expert)
    parts = read_parts(source, own) or []
    return parts[0] if len(parts) == 1 else None


def _parts_of(rows: int, names: ExpertNames) -> tuple[slice, ...]:
    """Return which rows of an expert's weight are multiplied as one: with a gate those of each half."""
    if not names.is_gated:
        return (slice(0, rows),)
    if names.is_stack and names.has_turns:
        return slice(0, rows, 2), slice(1, rows, 2)
    return slice(0, rows // 2), slice(rows // 2, rows)
