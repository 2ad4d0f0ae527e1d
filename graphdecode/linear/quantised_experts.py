"""On a CPU with compiled kernels: the weights of experts in the blocks or groups of few bits in which their source has
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.kernels.linear.quantised_linear import QuantisedPanels
from graphdecode.kernels.moe.quantised_expert_linear import panels_by_turns, quantised_expert_linear, stacked_panels
from graphdecode.linear.blocks import stored_blocks
from graphdecode.linear.expert_form import NO_GATE, ExpertForm, ExpertNames, Gate, shape_of
from graphdecode.linear.gguf_blocks import GGUF_BLOCKS, gguf_panels
from graphdecode.linear.group_panels import KEPT_GROUPS, fused_groups, panels_of_groups
from graphdecode.linear.groups import Groups, GroupSource
from graphdecode.linear.panels import Panels
from graphdecode.linear.weight_form import BlockSource, FormOptions, LinearNames, TensorSource

T = TypeVar("T")


@dataclass(frozen=True)
class QuantisedExperts(ExpertForm):
    """Weights in panels of few bits, whose values are the source's own, not rounded."""

    weight: QuantisedPanels
    columns: Tensor | None  # int32 [experts, in_features], the input feature of each column; None: as they stand
    batch_invariant: bool

    @property
    def gives_floats(self) -> bool:
        """Sums are written as they are."""
        return True

    def apply(
        self, out: Tensor, x: Tensor, order: Tensor, offsets: Tensor, *, slots: int, gate: Gate = NO_GATE
    ) -> None:
        """Write the product of each listed pair into `out`."""
        invariant, chosen = self.batch_invariant, gate._asdict()
        held = (self.weight, self.columns, self.bias)
        quantised_expert_linear(out, x, *held, order, offsets, slots=slots, **chosen, batch_invariant=invariant)


@dataclass(frozen=True)
class BlockExperts(QuantisedExperts):
    """Weights in GGUF's blocks."""

    path = "blocks"
    quantize = "gguf"

    @classmethod
    def load(
        cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions
    ) -> ExpertForm | None:
        """Read all experts' blocks; None where they have none, or not all of one type."""
        if Panels.why_not(options) or not isinstance(source, BlockSource):
            return None
        blocks = (blocks_of_expert(source, names, expert) for expert in range(names.experts))
        weight = _in_panels(blocks, names.experts, lambda stored: gguf_panels(stored[1], stored[0]))
        return None if weight is None else cls(shape_of(source, names), bias, weight, None, options.batch_invariant)


@dataclass(frozen=True)
class GroupExperts(QuantisedExperts):
    """Weights in groups."""

    path = "groups"

    @classmethod
    def load(
        cls, source: TensorSource, names: ExpertNames, bias: Tensor | None, options: FormOptions
    ) -> ExpertForm | None:
        """Read all experts' groups; None where they have none, or not all of one kind."""
        if Panels.why_not(options) or not isinstance(source, GroupSource):
            return None
        orders: list[Tensor | None] = []

        def groups() -> Iterator[tuple[Groups, ...] | None]:
            for expert in range(names.experts):
                parts = groups_of_expert(source, names, expert)
                orders.append(None if parts is None else parts[0].order)
                yield parts

        weight = _in_panels(groups(), names.experts, _panels_of_part)
        columns = [order.int() for order in orders if order is not None]
        if weight is None or 0 < len(columns) < names.experts:
            return None
        order = torch.stack(columns) if columns else None
        return cls(shape_of(source, names), bias, weight, order, options.batch_invariant)


def blocks_of_expert(source: BlockSource, names: ExpertNames, expert: int) -> tuple[tuple[str, Tensor], ...] | None:
    """Return type and blocks of an expert's weight, with a gate of both halves; None where it has none."""
    own = LinearNames(names.of(expert))
    kinds = {source.tensors[name].dtype for name in own.weights}
    if len(kinds) > 1 or not kinds <= GGUF_BLOCKS:
        return None
    parts = stored_blocks(source, own, None)
    return None if parts is None else tuple(parts)


def groups_of_expert(source: GroupSource, names: ExpertNames, expert: int) -> tuple[Groups, ...] | None:
    """Return an expert's weight in groups, with a gate both halves; None where it has none, or a part of some."""
    own, whole = names.of(expert), None
    if not {source.tensors[name].dtype for name in own} <= KEPT_GROUPS:
        return None
    with suppress(ArgumentError):  # a shard's part begins within a group
        if names.is_stack:
            whole = source.read_groups(own[0], expert=expert)
        else:
            whole = fused_groups(source, LinearNames(own), None)
    return None if whole is None else tuple(whole.rows(rows) for rows in _parts_of(whole.shape[0], names))


def _parts_of(rows: int, names: ExpertNames) -> tuple[slice, ...]:
    """Return which rows of an expert's weight are multiplied as one: with a gate those of each half."""
    if not names.is_gated:
        return (slice(0, rows),)
    if names.is_stack and names.has_turns:
        return slice(0, rows, 2), slice(1, rows, 2)
    return slice(0, rows // 2), slice(rows // 2, rows)


def _panels_of_part(groups: Groups) -> QuantisedPanels | None:
    """Return a part in panels; what `panels_of_groups` chooses by values is the same for all experts."""
    is_wide = groups.bits == 8 and groups.zeros is not None
    return panels_of_groups(replace(groups, scales=groups.scales.float()) if is_wide else groups)


def _in_panels(
    experts: Iterator[tuple[T, ...] | None], count: int, to_panels: Callable[[T], QuantisedPanels | None]
) -> QuantisedPanels | None:
    """Return the parts of all experts in panels; None where they cannot be."""

    def made() -> Iterator[QuantisedPanels | None]:
        for parts in experts:
            panels = [held for part in parts or () if (held := to_panels(part)) is not None]
            if parts is None or len(panels) < len(parts):
                yield None
            else:
                yield panels[0] if len(panels) == 1 else panels_by_turns(*panels)

    return stacked_panels(made(), count)
