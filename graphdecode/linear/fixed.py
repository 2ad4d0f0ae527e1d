"""On a GPU, a plain weight with one small product for any number of rows: a row's bits do not depend on the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from graphdecode.kernels.linear.small_linear import small_linear
from graphdecode.kernels.linear.small_linear_config import SmallLinearConfig, fixed_config
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import FormOptions, WeightForm

_ROWS = 512  # that are taken at a time: more would need more workspace


@dataclass(frozen=True, kw_only=True)
class Fixed(WeightForm):
    """A plain weight with a product that follows from its shape alone.

    Attributes:
        weight: [out_features, in_features].
        config: of the product.
        counters: int32, the workspace of products with splits; shared by all weights of a model.
    """

    path = "fixed"
    weight: Tensor
    config: SmallLinearConfig
    counters: Tensor

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: it is for those who ask for it, on a GPU; a CPU's compiled product is invariant anyway."""
        return "" if options.batch_invariant and options.device.type == "cuda" else "is for batch_invariant on a GPU"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> Self:
        """Return the weight itself, with its one configuration."""
        out_features, in_features = weight.shape
        return cls(
            out_features=out_features,
            in_features=in_features,
            weight=weight,
            bias=bias,
            config=fixed_config(out_features, in_features, weight.element_size()),
            counters=options.tuner.counters(weight.device),
        )

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        for begin in range(0, x.shape[0], _ROWS):
            rows = slice(begin, begin + _ROWS)
            small_linear(out[rows], x[rows], self.weight, self.bias, self.counters, self.config)

    @property
    def workspace(self) -> list[Tensor]:
        """The counters."""
        return [self.counters]

    def choice(self, rows: int) -> LinearChoice:
        """Return the one path, whatever the number of rows."""
        return LinearChoice(self.path, self.config)
