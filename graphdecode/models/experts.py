"""Mixtures of experts: the feed-forward part of a layer of which each token takes a few experts, and its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphdecode.kernels.moe.moe_combine import moe_combine
from graphdecode.kernels.moe.moe_route import moe_route
from graphdecode.linear.expert_form import ExpertForm, Gate
from graphdecode.linear.weight_form import WeightForm
from graphdecode.models.blocks import Block, FeedForward, GatedMlp, ResidualStream


@dataclass(frozen=True)
class Experts(Block):
    """The gated MLPs of a layer's experts: `down(gate(x))`, each expert's read once for all tokens that go to it.

    Attributes:
        gate_up: of all experts, [hidden] to [2 * width], the gate first.
        down: of all experts, [width] to [hidden].
        count: how many there are.
        slots: how many of them a token takes.
        width: channels inside of one.
        gate: what is made of the halves of `gate_up`'s products.
    """

    gate_up: ExpertForm
    down: ExpertForm
    count: int
    slots: int
    width: int
    gate: Gate

    def run(self, hidden: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
        """Return what the experts give for the pairs that `moe_route` listed, [tokens * slots, hidden]."""
        pairs, dtype = hidden.shape[0] * self.slots, torch.float32 if self.down.gives_floats else None
        inner, parts = hidden.new_empty((pairs, self.width)), hidden.new_empty((pairs, hidden.shape[1]), dtype=dtype)
        self.gate_up.apply(inner, hidden, order, offsets, slots=self.slots, gate=self.gate)
        self.down.apply(parts, inner, order, offsets, slots=1)
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

    def run(self, stream: ResidualStream) -> None:
        """Take `hidden`, and give what is to be added to the residual; all of it stays on the device."""
        rows, count, slots = stream.hidden.shape[0], self.experts.count, self.experts.slots
        logits = stream.room_of(self.router, "router")
        self.router.apply(logits, stream.hidden)
        ids, order = (logits.new_empty(size, dtype=torch.int32) for size in ((rows, slots), (rows * slots,)))
        offsets = logits.new_empty((count + 1,), dtype=torch.int32)
        weights = logits.new_empty((rows, slots), dtype=torch.float32)
        moe_route(ids, weights, order, offsets, logits[:, :count], stream.live, self.renormalise)
        parts = self.experts.run(stream.hidden, order, offsets)
        if self.shared is None:
            moe_combine(stream.open(in_floats=self.experts.down.gives_floats), parts, ids, weights)
        else:
            self.shared.run(stream)
            moe_combine(stream.given, parts, ids, weights, logits[:, count:])
