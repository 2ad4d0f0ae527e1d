"""Linear layers of transformers' module, replaced by weight forms of ours."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graphdecode.linear.forms import linear_of
from graphdecode.linear.lora import AdapterSpan, LoRALinear
from graphdecode.linear.weight_form import FormOptions, WeightForm
from graphdecode.models.adapters import AdapterSlots
from graphdecode.models.fields import UnsupportedModelError
from graphdecode.models.transformers_backend.module_decoder import AdoptedConfig
from graphdecode.models.weight_map import Part


class FormLinear(nn.Module):
    """A linear layer of one of our weight forms; `spans` are the tokens of a pass that may have adapters.

    `weight` is on the meta device: modules read its dtype.
    """

    def __init__(self, form: WeightForm, spans: list[AdapterSpan], dtype: torch.dtype, *, in_floats: bool) -> None:
        super().__init__()
        self.form, self.spans, self.weight = form, spans, torch.empty(form.shape, dtype=dtype, device="meta")
        self.in_floats = in_floats
        self.in_features = form.in_features
        self.out_features = form.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return the product for `x` [..., in_features], [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        dtype = torch.float32 if self.in_floats else rows.dtype
        out = rows.new_empty((rows.shape[0], self.out_features), dtype=dtype)
        if not (self.spans and isinstance(self.form, LoRALinear)):
            self.form.apply(out, rows)
        elif len(rows) != len(self.spans[0].rows):
            raise UnsupportedModelError(
                f"the module gives a product of {[*self.form.shape]} {len(rows)} rows for {len(self.spans[0].rows)} "
                "tokens, and adapters go by tokens: load it with max_adapters=0"
            )
        else:
            inner = rows.new_empty((len(rows), self.form.inner_size), dtype=torch.float32)
            self.form.adapt(out, rows, inner, self.spans)
        return out.view(*x.shape[:-1], self.out_features)


def weight_of(module: nn.Module) -> Tensor | None:
    """Return the weight [out_features, in_features] of a plain linear layer; None of any other module."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's, with a transposed weight

    if type(module) is nn.Linear:
        return module.weight.detach()
    return module.weight.detach().t() if type(module) is Conv1D else None


def takes_adapters(path: str, mixers: Collection[str]) -> bool:
    """Whether the product at a path can have adapters; experts and `mixers` see only some of the tokens."""
    return "experts" not in path.split(".") and not path.startswith(tuple(f"{mixer}." for mixer in mixers))


def replace_linears(
    model: Any, config: AdoptedConfig, options: FormOptions, adapters: AdapterSlots | None, spans: list[AdapterSpan]
) -> list[tuple[str, WeightForm]]:
    """Replace all plain linear layers by forms, and return each with its name, such as `q_proj`.

    `adapters`: slots to register products with, by path. `spans`: see `FormLinear`.
    """
    head = model.get_output_embeddings()
    paths = [path for path, module in model.named_modules() if weight_of(module) is not None]
    paths = [path for path in paths if path not in config.unreplaced_linears]
    forms = []
    for path in paths:  # by path: a list of modules would hold all weights until the end
        above, _, name = path.rpartition(".")
        module: Any = model.get_submodule(path)
        weight: Any = weight_of(module)
        bias = None if module.bias is None else module.bias.detach()
        form = linear_of(weight.contiguous(), bias, replace(options, in_floats=module is head))
        if adapters is not None and takes_adapters(path, config.mixers):
            form = adapters.wrap(form, path, (Part(f"{path}.weight", form.shape),))
        forms.append((name, form))
        setattr(model.get_submodule(above), name, FormLinear(form, spans, weight.dtype, in_floats=module is head))
    return forms
