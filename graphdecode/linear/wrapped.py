"""Products that are changed after another form has computed them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import FormOptions, WeightForm


@dataclass(frozen=True)
class Wrapped(WeightForm):
    """A product that does something to the output of `form`; it has no fused product."""

    form: WeightForm

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Refuse: the weight is read by another form.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{cls.__name__} is made of another form")

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the form."""
        return self.form.tensors

    @property
    def workspace(self) -> list[Tensor]:
        """That of the form."""
        return self.form.workspace

    @property
    def gives_floats(self) -> bool:
        """What the form's product gives."""
        return self.form.gives_floats

    def choice(self, rows: int) -> LinearChoice:
        """Return the path of the form's product."""
        return self.form.choice(rows)

    def rechosen(self, change: Callable[[LinearChoice], LinearChoice | None]) -> WeightForm:
        """Return the same around another product; see `WeightForm.rechosen`."""
        return replace(self, form=self.form.rechosen(change))


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
        """Write the scaled product into `out`."""
        self.form.apply(out, x)
        out.mul_(self.scale)
        if self.shift is not None:
            out.add_(self.shift)

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the form, and the scales."""
        return [*self.form.tensors, self.scale, *([] if self.shift is None else [self.shift])]
