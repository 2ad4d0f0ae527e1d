"""Mixtures of experts: the feed-forward part of a layer of which each token takes a few experts, and its weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from graphdecode.kernels.linear.native_linear import can_panel
from graphdecode.kernels.moe.expert_linear import expert_linear, expert_panels
from graphdecode.kernels.moe.moe_combine import moe_combine
from graphdecode.kernels.moe.moe_route import moe_route
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.blocks import Block, FeedForward, GatedMlp, Stream


@dataclass(frozen=True)
class Experts(Block):
    """The gated MLPs of a layer's experts: `down(gate(x))`, each expert's read once for all tokens that go to it.

    Attributes:
        gate_up: [experts, 2 * width, hidden], the gate first, or the same in panels; see `expert_linear`.
        gate_up_bias: [experts, 2 * width] or None.
        down: [experts, hidden, width], or the same in panels.
        down_bias: [experts, hidden] or None.
        count: how many there are.
        slots: how many of them a token takes.
        width: channels inside of one.
        gate: one of `expert_linear`'s.
        alpha: of the clamped gate.
        limit: of the clamped gate.
        batch_invariant: a token's bits do not depend on how many there are.
    """

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    count: int
    slots: int
    width: int
    gate: str
    alpha: float = 1.0
    limit: float = 0.0
    batch_invariant: bool = False

    def run(self, hidden: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
        """Return what the experts give for the pairs that `moe_route` listed, [tokens * slots, hidden]."""
        pairs = hidden.shape[0] * self.slots
        inner, parts = hidden.new_empty((pairs, self.width)), hidden.new_empty((pairs, hidden.shape[1]))
        expert_linear(
            inner,
            hidden,
            self.gate_up,
            self.gate_up_bias,
            order,
            offsets,
            slots=self.slots,
            gate=self.gate,
            alpha=self.alpha,
            limit=self.limit,
            batch_invariant=self.batch_invariant,
        )
        expert_linear(
            parts, inner, self.down, self.down_bias, order, offsets, slots=1, batch_invariant=self.batch_invariant
        )
        return parts

    def read_bytes(self, rows: int | None = None) -> int:
        """Of as many experts as so many tokens can go to."""
        held = sum(tensor.nbytes for tensor in self.tensors)
        return held if rows is None else held * min(rows * self.slots, self.count) // self.count


@dataclass(frozen=True)
class SparseMlp(FeedForward):
    """Experts behind a router, and a shared one that every token takes, by a share of its own, where there is one.

    Attributes:
        router: [experts, hidden], and with a shared expert one row more, the gate of its share.
        experts: of which a token takes those with its largest logits.
        shared: or None.
        renormalise: whether the weights of a token's experts add up to 1.
    """

    router: WeightForm
    experts: Experts
    shared: GatedMlp | None
    renormalise: bool

    def run(self, stream: Stream) -> None:
        """Replace `hidden`; all of it stays on the device."""
        rows, count, slots = stream.hidden.shape[0], self.experts.count, self.experts.slots
        logits = stream.empty(self.router.out_features)
        self.router.apply(logits, stream.hidden)
        ids, order = (logits.new_empty(size, dtype=torch.int32) for size in ((rows, slots), (rows * slots,)))
        offsets = logits.new_empty((count + 1,), dtype=torch.int32)
        weights = logits.new_empty((rows, slots), dtype=torch.float32)
        moe_route(ids, weights, order, offsets, logits[:, :count], stream.live, self.renormalise)
        parts = self.experts.run(stream.hidden, order, offsets)
        if self.shared is None:
            moe_combine(stream.hidden, parts, ids, weights)
        else:
            self.shared.run(stream)
            moe_combine(stream.hidden, parts, ids, weights, logits[:, count:])


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
