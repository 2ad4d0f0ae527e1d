"""The weight as it stands: torch's product on a CPU; on a GPU cuBLAS, or a small product where that proved faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from graphdecode.kernels.linear.linear import linear
from graphdecode.kernels.linear.small_linear import small_linear
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import FormOptions, WeightForm


@dataclass(frozen=True, kw_only=True)
class Plain(WeightForm):
    """A plain weight.

    Attributes:
        weight: [out_features, in_features].
        counters: int32, the workspace of small products with splits; shared by all weights of a model.
    """

    path = "plain"
    is_measured = True
    weight: Tensor
    counters: Tensor | None = None

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return "": everything can be left as it is."""
        return ""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> Self:
        """Return the weight itself, on a GPU with a measured choice for each number of rows."""
        out_features, in_features = weight.shape
        plain = cls(out_features=out_features, in_features=in_features, weight=weight, bias=bias)
        if not weight.is_cuda:
            return plain
        choices = options.tuner.choose_small(weight, bias, options.batch_sizes)
        return replace(plain, choices=choices, counters=options.tuner.counters(weight.device))

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        config = self.choice(x.shape[0]).config
        if config is None:
            linear(out, x, self.weight, self.bias)
        else:
            small_linear(out, x, self.weight, self.bias, self.counters, config)

    @property
    def workspace(self) -> list[Tensor]:
        """The counters, where there are some."""
        return [] if self.counters is None else [self.counters]

    def rechosen(self, change: Callable[[LinearChoice], LinearChoice | None]) -> WeightForm:
        """Return the same weight with other products for the numbers of rows that have a choice."""
        changed = {rows: change(choice) for rows, choice in self.choices.items()}
        return replace(self, choices={rows: choice for rows, choice in changed.items() if choice is not None})
