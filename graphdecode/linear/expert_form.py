"""What a form of the weights of a layer's experts is: those of one product, of all experts, read expert by expert."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import FormOptions, Shard, TensorSource, read_fused, tensors_in


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
