"""Products of a module in our weight forms: what reads a weight fastest is known here better than to the module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graphdecode.linear.forms import linear_of
from graphdecode.linear.weight_form import FormOptions, WeightForm


class FormLinear(nn.Module):
    """A linear layer whose weight has one of our forms.

    Args:
        form: of the weight.
        in_floats: whether products are float32: sums as they are.
    """

    def __init__(self, form: WeightForm, *, in_floats: bool = False) -> None:
        super().__init__()
        self.form = form
        self.in_floats = in_floats
        self.in_features = form.in_features
        self.out_features = form.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return the product for `x` [..., in_features], [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        dtype = torch.float32 if self.in_floats else rows.dtype
        out = rows.new_empty((rows.shape[0], self.out_features), dtype=dtype)
        self.form.apply(out, rows)
        return out.view(*x.shape[:-1], self.out_features)


def weight_of(module: nn.Module) -> Tensor | None:
    """Return the weight [out_features, in_features] of a plain linear layer; None of any other module."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's: a product whose weight lies the other way round

    if type(module) is nn.Linear:
        return module.weight.detach()
    return module.weight.detach().t() if type(module) is Conv1D else None


def replace_linears(model: Any, options: FormOptions) -> list[tuple[str, WeightForm]]:
    """Put forms in the place of all plain linear layers; each weight is dropped as soon as its form is made.

    Args:
        model: changed in place; its output layer gives float32.
        options: of the forms.

    Returns:
        Name within its layer, such as `q_proj`, and form of each.
    """
    head = model.get_output_embeddings()
    paths = [path for path, module in model.named_modules() if weight_of(module) is not None]
    forms = []
    for path in paths:  # modules in a list would hold all weights until the end
        above, _, name = path.rpartition(".")
        module: Any = model.get_submodule(path)
        weight = weight_of(module)
        assert weight is not None
        bias = None if module.bias is None else module.bias.detach()
        in_floats = module is head
        forms.append((name, linear_of(weight.contiguous(), bias, replace(options, in_floats=in_floats))))
        setattr(model.get_submodule(above), name, FormLinear(forms[-1][1], in_floats=in_floats))
    return forms
