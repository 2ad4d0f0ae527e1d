"""The products of experts with their rows, over weights in blocks of few bits, which are never undone in memory.

What it computes is that of `expert_linear`, with sums as `quantised_linear` has them: weights are not rounded,
activations are not quantised, and a row's result depends neither on other rows nor on the number of threads. The panels
of all experts are those of one weight, one expert after another, with a gate one of it and one of `up` by turns.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import torch
from torch import Tensor

from ..linear.quantised_linear import PANEL, QuantisedPanels, are_blocks_of, undone
from ..native.registration import operator
from ..native.signature import Int32, Wide, Written
from .expert_linear import GATES, write_products

_BY_PANEL = ("panels", "scales", "mins", "factors", "min_factors")


def panels_by_turns(gate: QuantisedPanels, up: QuantisedPanels) -> QuantisedPanels:
    """Return one expert's panels, one of the gate and one of `up` by turns; the two are of one kind."""
    both = zip(_by_panel(gate), _by_panel(up), strict=True)
    turns: dict[str, Any] = {name: torch.stack((own, other), 1).flatten(0, 1) for (name, own), (_, other) in both}
    return gate._replace(**turns)


def stacked_panels(made: Iterable[QuantisedPanels | None], count: int) -> QuantisedPanels | None:
    """Return the panels of `count` experts as those of one weight; None where one has none, or they differ in kind.

    Args:
        made: of each; it is dropped before the next one is made.
        count: how many experts there are.
    """
    whole: QuantisedPanels | None = None
    kind = None
    for expert, own in enumerate(made):
        if own is None or kind not in (None, _kind(own)):
            return None
        if whole is None:
            kind = _kind(own)
            memory: dict[str, Any] = {
                name: held.new_empty((count * len(held), *held.shape[1:])) for name, held in _by_panel(own)
            }
            whole = own._replace(**memory)
        for (_, place), (_, held) in zip(_by_panel(whole), _by_panel(own), strict=True):
            place[expert * len(held) : (expert + 1) * len(held)] = held
    return whole


def _by_panel(weight: QuantisedPanels) -> Iterator[tuple[str, Tensor]]:
    """Yield what a weight has for each panel, by name."""
    for name in _BY_PANEL:
        held = getattr(weight, name)
        if held is not None:
            yield name, held


def _kind(weight: QuantisedPanels) -> tuple[object, ...]:
    """Return what experts of one product have in common."""
    table = None if weight.table is None else tuple(weight.table.tolist())
    shapes = tuple((name, held.shape, held.dtype) for name, held in _by_panel(weight))
    return (shapes, table, weight.scale_dtype, weight.code)


def _undone_expert(weight: QuantisedPanels, expert: int, experts: int, width: int, is_gated: bool) -> Tensor:
    """Return what one expert's panels stand for, float32 [out_features, in_features], the gate first."""
    own: dict[str, Any] = {name: held.chunk(experts)[expert] for name, held in _by_panel(weight)}
    by_half = undone(weight._replace(**own)).unflatten(0, (-1, 1 + is_gated, PANEL)).transpose(0, 1).flatten(1, 2)
    return by_half[:, :width].flatten(0, 1)


def _is_served(
    out: Tensor, x: Tensor, weight: QuantisedPanels, columns: Tensor | None, *_: object, **_others: object
) -> bool:
    return are_blocks_of(weight, x.shape[1]) and x.stride(1) == 1


@operator(is_compiled=_is_served)
def quantised_expert_linear(
    out: Written[Wide],
    x: Tensor,
    weight: QuantisedPanels,
    columns: Int32 | None,
    bias: Tensor | None,
    order: Int32,
    offsets: Int32,
    *,
    slots: int,
    gate: Annotated[str, GATES] = "none",
    alpha: float = 1.0,
    limit: float = 0.0,
    batch_invariant: bool = False,
) -> None:
    """Write each listed pair's product with the weights of its expert into `out`. CPU alone.

    Args:
        out: [pairs, width], contiguous, of x's dtype, or fp32; pairs that are not listed are left alone.
        x: [pairs / slots, in_features], float32 or bfloat16, rows may be strided.
        weight: the panels of all experts, as `stacked_panels` returned them.
        columns: [experts, in_features], the input feature of each column of an expert's weight; None: as they stand.
        bias: [experts, out_features] or None.
        order: int32 [pairs], the pairs by expert, as `moe_route` wrote them.
        offsets: int32 [experts + 1], where each expert's pairs begin.
        slots: pairs that share a row of x.
        gate: one of `GATES`; "none": the plain product.
        alpha: of `swiglu_clamped`.
        limit: of `swiglu_clamped`.
        batch_invariant: as `quantised_linear` has it.

    Raises:
        ValueError: the gate is not known.
    """
    experts, is_gated = len(offsets) - 1, gate != "none"

    def plain(expert: int) -> Tensor:
        own = _undone_expert(weight, expert, experts, out.shape[1], is_gated)
        return own if columns is None else torch.empty_like(own).index_copy_(1, columns[expert].long(), own)

    write_products(out, x, plain, bias, order, offsets, slots=slots, gate=gate, alpha=alpha, limit=limit)
