"""What weight forms compute: products of given inputs, or of the unit matrix."""

import torch
from torch import Tensor

from graphdecode.linear.weight_form import WeightForm


def product(form: WeightForm, x: Tensor | None = None) -> Tensor:
    """Return a form's product for `x`, by default the unit matrix: its weight, transposed, in float32."""
    x = torch.eye(form.in_features) if x is None else x
    out = torch.empty(len(x), form.out_features)
    form.apply(out, x)
    return out


def assert_same_products(form: WeightForm, other: WeightForm, seed: int) -> None:
    """Check two forms of one weight by three random inputs."""
    x = torch.randn(3, form.in_features, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(product(form, x), product(other, x), rtol=1e-4, atol=1e-4)
