"""Products that transform the output of another form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import FormOptions, WeightForm


@dataclass(frozen=True)
class Wrapped(WeightForm):
    """A product that transforms the output of `form`; it has no fused product."""

    form: WeightForm

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Raise TypeError: the weight is in another form."""
        raise TypeError(f"{cls.__name__} is made of another form")

    @property
    def tensors(self) -> list[Tensor]:
        return self.form.tensors

    @property
    def workspace(self) -> list[Tensor]:
        return self.form.workspace

    @property
    def gives_floats(self) -> bool:
        return self.form.gives_floats

    def choice(self, rows: int) -> LinearChoice:
        return self.form.choice(rows)

    def with_choices(self, change: Callable[[LinearChoice], LinearChoice | None]) -> WeightForm:
        return replace(self, form=self.form.with_choices(change))


@dataclass(frozen=True)
class Scaled(Wrapped):
    """`scale * product + shift` of each output.

    Attributes:
        scale: float32 [out_features].
        shift: float32 [out_features], or None.
    """

    path = "scaled"
    scale: Tensor
    shift: Tensor | None

    def apply(self, out: Tensor, x: Tensor) -> None:
        self.form.apply(out, x)
        out.mul_(self.scale)
        if self.shift is not None:
            out.add_(self.shift)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.form.tensors, self.scale, *([] if self.shift is None else [self.shift])]
