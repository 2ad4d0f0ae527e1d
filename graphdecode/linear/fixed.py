"""On a GPU, a plain weight with one small product for any number of rows: a row's bits do not depend on the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from graphdecode.kernels.linear.small_linear_config import SmallLinearConfig, fixed_config
from graphdecode.kernels.native.early_start import has_early_start
from graphdecode.linear.linear_choice import LinearChoice
from graphdecode.linear.plain import Plain
from graphdecode.linear.weight_form import FormOptions, WeightForm


@dataclass(frozen=True)
class Fixed(Plain):
    """A plain weight with a product that follows from its shape alone."""

    path = "fixed"
    is_measured = False
    config: SmallLinearConfig | None = None

    @classmethod
    def why_not(cls, options: FormOptions) -> str:
        """Return why not: it is for those who ask for it, on a GPU; a CPU's compiled product is invariant anyway."""
        return "" if options.batch_invariant and options.device.type == "cuda" else "is for batch_invariant on a GPU"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        """Return the weight itself, with its one configuration."""
        early = has_early_start(weight.device)
        config = fixed_config(weight.shape[0], weight.shape[1], weight.element_size(), early)
        return cls(weight.shape, bias, weight, options.tuner.counters(weight.device), config)

    def choice(self, rows: int) -> LinearChoice:
        """Return the one path, whatever the number of rows."""
        return LinearChoice(self.path, self.config)
