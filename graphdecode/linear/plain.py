"""The weight as it stands: torch's product on a CPU; on a GPU cuBLAS, or a small product where that proved faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from graphdecode.kernels.linear.linear import linear
from graphdecode.kernels.linear.small_linear import small_linear
from graphdecode.kernels.linear.small_linear_config import SmallLinearConfig
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.weight_form import FormOptions, WeightForm

ROWS_AT_ONCE = 512  # that a small product takes at a time: more would need more workspace


class SmallProduct(NamedTuple):
    """The products that `small_linear` makes of one weight."""

    weight: Tensor
    bias: Tensor | None
    counters: Tensor | None
    config: SmallLinearConfig

    def write(self, out: Tensor, x: Tensor, **fused: Any) -> None:
        """Write the product for `x` into `out`; see `small_linear` for what can be fused with it."""
        for begin in range(0, x.shape[0], ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            small_linear(out[rows], x[rows], self.weight, self.bias, self.counters, self.config, **fused)

    def normed(self, out: Tensor, x: Tensor, gain: Tensor, eps: float) -> None:
        """Write the product for the norm of `x`; see `FusedProduct`."""
        self.write(out, x, gain=gain, eps=eps)

    def gated(self, out: Tensor, x: Tensor, gain: Tensor | None, eps: float, activation: str) -> None:
        """Write the gated product for `x`, or for its norm; see `FusedProduct`."""
        self.write(out, x, gain=gain, eps=eps, epilogue=activation)

    def added(self, residual: Tensor, x: Tensor, scale: float) -> None:
        """Add the product for `x` to the residual; see `FusedProduct`."""
        self.write(residual, x, epilogue="add", scale=scale)


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
        small = self.fused(x.shape[0])
        if small is None:
            linear(out, x, self.weight, self.bias)
        else:
            small.write(out, x)

    def fused(self, rows: int) -> SmallProduct | None:
        """Return the small product, where so many rows have one."""
        config = self.choice(rows).config
        return None if config is None else SmallProduct(self.weight, self.bias, self.counters, config)

    @property
    def workspace(self) -> list[Tensor]:
        """The counters, where there are some."""
        return [] if self.counters is None else [self.counters]

    def rechosen(self, change: Callable[[LinearChoice], LinearChoice | None]) -> WeightForm:
        """Return the same weight with other products for the numbers of rows that have a choice."""
        changed = {rows: change(choice) for rows, choice in self.choices.items()}
        return replace(self, choices={rows: choice for rows, choice in changed.items() if choice is not None})
