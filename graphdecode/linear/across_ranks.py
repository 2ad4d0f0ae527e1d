"""Products whose weight several ranks share: by columns, so that they are summed, or by rows, and put side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from graphdecode.distributed import Collectives
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import FormOptions, WeightForm


@dataclass(frozen=True)
class Summed(WeightForm):
    """Each rank has some columns of the weight, and its inputs are the same columns of `x`.

    Attributes:
        form: of the rank's shard.
        collectives: of the ranks.
        place: in the model.
    """

    path = "summed"
    form: WeightForm
    collectives: Collectives
    place: str

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Refuse: a shard is read before it is one.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{cls.__name__} is made of another form")

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the sum of all ranks' products into `out`."""
        self.form.apply(out, x)
        self.collectives.all_reduce(out, self.place)

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the shard."""
        return self.form.tensors

    @property
    def workspace(self) -> list[Tensor]:
        """That of the shard's product, and of the collectives."""
        return [*self.form.workspace, *self.collectives.workspace]

    @property
    def gives_floats(self) -> bool:
        """What the shard's product gives."""
        return self.form.gives_floats

    def choice(self, rows: int) -> LinearChoice:
        """Return the path of the shard's product."""
        return self.form.choice(rows)

    def rechosen(self, change: Callable[[LinearChoice], LinearChoice | None]) -> WeightForm:
        """Return the same with another product of the shard; see `WeightForm.rechosen`."""
        return replace(self, form=self.form.rechosen(change))


@dataclass(frozen=True)
class Gathered(Summed):
    """Each rank has some rows of the weight, and all get all outputs."""

    path = "gathered"

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the products of all ranks, side by side, into `out`."""
        part = out.new_empty((out.shape[0], self.form.out_features))
        self.form.apply(part, x)
        self.collectives.all_gather(out, part, self.place)
