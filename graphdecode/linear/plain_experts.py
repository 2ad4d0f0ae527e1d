"""The weights of experts with all their bits: in panels on a CPU with compiled kernels, else as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from graphdecode.kernels.linear.native_linear import can_panel
from graphdecode.kernels.moe.expert_linear import expert_linear, expert_panels
from graphdecode.linear.expert_form import NO_GATE, ExpertForm, ExpertNames, Gate, plain_weights, shape_of
from graphdecode.linear.weight_form import FormOptions, TensorSource


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
        invariant = self.batch_invariant
        expert_linear(
            out, x, self.weight, self.bias, order, offsets, slots=slots, **gate._asdict(), batch_invariant=invariant
        )


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
