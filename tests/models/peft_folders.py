"""Adapters of chosen weights, saved as PEFT does, and models with what they add."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

TRANSPOSED = ("GptOss", "Llama4")  # models whose stacks of experts are [experts, inputs, outputs]
# convolutions, a table of further inputs of layers, vectors of experts
NO_PRODUCT = r"conv(1d)?\.weight$|embed_tokens_per_layer|_bias$"


def products_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of matrices, and of stacks of them, by their names without numbers."""
    found: dict[str, list[str]] = {}
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not re.search(NO_PRODUCT, name):
            found.setdefault(re.sub(r"\.\d+\.", ".N.", name), []).append(name)
    if "lm_head.weight" not in found:  # tied
        found["lm_head.weight"] = ["lm_head.weight"]
    return found


def layers_products_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the weights of linear layers within layers, by their names without numbers."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and re.search(r"\.\d+\.", name):
            found.setdefault(re.sub(r"\.\d+\.", ".N.", name) + ".weight", []).append(f"{name}.weight")
    return found


def save_peft(
    folder: Path,
    model: nn.Module,
    names: list[str],
    *,
    rank: int = 2,
    size: float = 0.2,
    seed: int = 1,
    **settings: Any,
) -> dict[str, Tensor]:
    """Save an adapter of weights; return what it adds to each.

    Args:
        folder: to be made.
        model: of transformers.
        names: of its parameters.
        rank: of the adapter.
        size: of the numbers in A and B.
        seed: of these numbers.
        settings: further fields of its configuration; `lora_alpha` is by default the rank.
    """
    drawn, tensors, added, targets = torch.Generator().manual_seed(seed), {}, {}, []
    alpha = settings.setdefault("lora_alpha", rank)
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    wrapped: set[str] = set()
    # PEFT wraps the parameters of a module one after another, the last outermost
    for name in sorted(names, key=lambda each: each.endswith("gate_up_proj")):
        weight, (path, _, last) = model.get_parameter(name), name.rpartition(".")
        module, is_stack = model.get_submodule(path), weight.dim() == 3
        experts, (outputs, inputs) = len(weight) if is_stack else 1, weight.shape[-2:]
        is_table = isinstance(module, nn.Embedding)
        is_mirrored = is_table or isinstance(module, Conv1D)
        if is_mirrored or (is_stack and type(model).__name__.startswith(TRANSPOSED)):
            outputs, inputs, is_mirrored = inputs, outputs, True
        a = torch.randn(rank * experts, inputs, generator=drawn) * size
        b = torch.randn(outputs, rank * experts, generator=drawn) * size
        values = scale * torch.einsum("ore,eri->eoi", b.view(outputs, rank, experts), a.view(experts, rank, inputs))
        values = values if is_stack else values[0]
        added[name] = values.mT if is_mirrored else values
        if not isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
            targets.append(f"{path.rpartition('.')[2]}.{last}")
        inner = ".base_layer" if path in wrapped else ""
        wrapped.add(path)
        wrapper = f"base_model.model.{path}{inner}.lora_" + ("embedding_{}" if is_table else "{}.weight")
        tensors |= {wrapper.format("A"): a, wrapper.format("B"): b}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": rank, "target_parameters": sorted(set(targets)), "peft_version": "0.21.0"}
    (folder / "adapter_config.json").write_text(json.dumps(stated | settings))
    return added


@contextmanager
def with_added(model: nn.Module, added: dict[str, Tensor]) -> Iterator[nn.Module]:
    """Add to weights meanwhile; those that share their memory are changed each by itself, as with PEFT."""
    kept = {name: model.get_parameter(name) for name in added}
    for name, values in added.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(kept[name].detach() + values))
    try:
        yield model
    finally:
        for name, weight in kept.items():
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, weight)
