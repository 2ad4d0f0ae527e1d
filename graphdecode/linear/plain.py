"""The weight as it stands: torch's product on a CPU; on a GPU cuBLAS, or a small product where that proved faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from graphdecode.kernels.linear.linear import linear
from graphdecode.kernels.linear.small_linear import small_linear
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import FormOptions, WeightForm

_ROWS = 512  # that a small product takes at a time: more would need more workspace


@dataclass(frozen=True)
class Plain(WeightForm):
    """A plain weight."""

    path = "plain"
    is_measured = True
    weight: Tensor  # [out_features, in_features]
    counters: Tensor | None = None  # int32, the workspace of small products with splits; all weights share it

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return the weight itself, on a GPU with a measured choice for each number of rows."""
        if not weight.is_cuda:
            return cls(weight.shape, bias, weight)
        choices = options.tuner.choose_small(weight, bias, options.batch_sizes)
        return cls(weight.shape, bias, weight, options.tuner.counters(weight.device), choices=choices)

    def apply(self, out: Tensor, x: Tensor) -> None:
        """Write the product for `x` [rows, in_features] into `out` [rows, out_features]."""
        config = self.choice(x.shape[0]).config
        if config is None:
            linear(out, x, self.weight, self.bias)
            return
        for begin in range(0, x.shape[0], _ROWS):
            rows = slice(begin, begin + _ROWS)
            small_linear(out[rows], x[rows], self.weight, self.bias, self.counters, config)

    @property
    def workspace(self) -> list[Tensor]:
        """The counters, where there are some."""
        return [] if self.counters is None else [self.counters]

    def rechosen(self, change: Callable[[LinearChoice], LinearChoice | None]) -> WeightForm:
        """Return the same weight with other products for the numbers of rows that have a choice."""
        changed = {rows: change(choice) for rows, choice in self.choices.items()}
        return replace(self, choices={rows: choice for rows, choice in changed.items() if choice is not None})
