"""Products whose weight several ranks share: by columns (all-reduce), or by rows (all-gather)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from graphdecode.distributed import Collectives
from graphdecode.linear.wrapped import Wrapped


@dataclass(frozen=True)
class Summed(Wrapped):
    """Each rank has some columns of the weight, and the same columns of `x`; the products are summed.

    Attributes:
        collectives: of the ranks.
        place: in the model.
    """

    path = "summed"
    collectives: Collectives
    place: str

    def apply(self, out: Tensor, x: Tensor) -> None:
        self.form.apply(out, x)
        self.collectives.all_reduce(out, self.place)

    @property
    def workspace(self) -> list[Tensor]:
        return [*self.form.workspace, *self.collectives.workspace]


@dataclass(frozen=True)
class Gathered(Summed):
    """Each rank has some rows of the weight; all get all outputs."""

    path = "gathered"

    def apply(self, out: Tensor, x: Tensor) -> None:
        part = out.new_empty((out.shape[0], self.form.out_features))
        self.form.apply(part, x)
        self.collectives.all_gather(out, part, self.place)
