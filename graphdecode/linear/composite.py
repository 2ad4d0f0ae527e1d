"""Products made of other forms: transformed or adjacent outputs, and products that ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphdecode.distributed import Collectives
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import WeightForm


@dataclass(frozen=True)
class LinearWrapper(WeightForm):
    """A product that transforms the output of `form`; it is not fused."""

    form: WeightForm

    @property
    def workspace(self) -> list[Tensor]:
        return self.form.workspace

    @property
    def gives_floats(self) -> bool:
        return self.form.gives_floats

    def choice(self, rows: int) -> LinearChoice:
        return self.form.choice(rows)


@dataclass(frozen=True)
class MergedLinear(WeightForm):
    """Products for one input, whose outputs are adjacent; they are not fused."""

    path = "merged"
    forms: tuple[WeightForm, ...]

    @classmethod
    def wrap(cls, forms: Sequence[WeightForm]) -> WeightForm:
        """Return the product of all forms; one alone as it is."""
        shape = sum(form.out_features for form in forms), forms[0].in_features
        return forms[0] if len(forms) == 1 else cls(shape, None, tuple(forms))

    @property
    def workspace(self) -> list[Tensor]:
        return [tensor for form in self.forms for tensor in form.workspace]

    @property
    def gives_floats(self) -> bool:
        return all(form.gives_floats for form in self.forms)

    def apply(self, out: Tensor, x: Tensor) -> None:
        for form, columns in zip(self.forms, out.split([form.out_features for form in self.forms], 1), strict=True):
            part = columns if form.is_strided else torch.empty_like(columns)
            form.apply(part, x)
            if part is not columns:
                columns.copy_(part)


@dataclass(frozen=True)
class ScaledLinear(LinearWrapper):
    """`scale * product + shift`, per output."""

    path = "scaled"
    scale: Tensor  # float32 [out_features]
    shift: Tensor | None  # float32 [out_features]

    def apply(self, out: Tensor, x: Tensor) -> None:
        self.form.apply(out, x)
        self.transform(out)

    def transform(self, out: Tensor) -> None:
        """Scale and shift a product in place."""
        out.mul_(self.scale)
        if self.shift is not None:
            out.add_(self.shift)


@dataclass(frozen=True)
class ParallelLinear(LinearWrapper):
    """A product that ranks share; `form` is the rank's part."""

    collectives: Collectives
    param_name: str

    @property
    def workspace(self) -> list[Tensor]:
        return [*self.form.workspace, *self.collectives.workspace]


@dataclass(frozen=True)
class RowParallelLinear(ParallelLinear):
    """Each rank has some columns of the weight, and the same columns of `x`; the products are summed (all-reduce)."""

    path = "row_parallel"

    def apply(self, out: Tensor, x: Tensor) -> None:
        self.form.apply(out, x)
        self.sum(out)

    def sum(self, out: Tensor) -> None:
        """Replace the rank's product by the sum over the ranks."""
        self.collectives.all_reduce(out, self.param_name)


@dataclass(frozen=True)
class ColumnParallelLinear(ParallelLinear):
    """Each rank has some rows of the weight; the outputs are gathered on all (all-gather)."""

    path = "column_parallel"

    def apply(self, out: Tensor, x: Tensor) -> None:
        part = out.new_empty((out.shape[0], self.form.out_features))
        self.form.apply(part, x)
        self.collectives.all_gather(out, part, self.param_name)
