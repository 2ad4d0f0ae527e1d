"""Adapters of chosen weights, saved as PEFT does, and models with what they add."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
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
TABLES = ("model.embed_tokens", "lm_head")  # modules whose weights PEFT saves beside their adapters
HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}  # products of an expert -> half of `gate_up_proj`


def products_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of matrices, and of stacks of them, by their names without numbers."""
    products: dict[str, list[str]] = {}
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not re.search(NO_PRODUCT, name):
            products.setdefault(re.sub(r"\.\d+\.", ".N.", name), []).append(name)
    if "lm_head.weight" not in products:  # tied
        products["lm_head.weight"] = ["lm_head.weight"]
    return products


def layers_products_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the weights of linear layers within layers, by their names without numbers."""
    products: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and re.search(r"\.\d+\.", name):
            products.setdefault(re.sub(r"\.\d+\.", ".N.", name) + ".weight", []).append(f"{name}.weight")
    return products


def linear_weights(model: nn.Module) -> list[str]:
    """Return the weights of linear layers within layers, but for routers and gates of shared experts."""
    names = [name for of_kind in layers_products_of(model).values() for name in of_kind]
    return [name for name in names if not re.search(r"gate\.weight$|router", name)]


def single_experts(model: nn.Module) -> list[str]:
    """Return every other expert's weights, by the names of models that have no stacks."""
    if type(model).__name__.startswith(TRANSPOSED):
        return []
    mlp, products = ("block_sparse_moe", ("w1", "w3", "w2")) if "Mixtral" in type(model).__name__ else ("mlp", None)
    return [
        f"{name.rpartition('.experts.')[0].replace('mlp', mlp)}.experts.{expert}.{product}.weight"
        for name, stack in model.named_parameters()
        if name.endswith("experts.down_proj")
        for expert in range(0, len(stack), 2)
        for product in products or ("gate_proj", "up_proj", "down_proj")
    ]


def save_peft(
    folder: Path,
    model: nn.Module,
    names: Iterable[str],
    *,
    rank: int = 2,
    size: float = 0.2,
    seed: int = 1,
    **settings: Any,
) -> dict[str, Tensor]:
    """Save an adapter of weights; return what it adds to each parameter.

    Args:
        folder: to be made.
        model: of transformers.
        names: of its parameters, or of single experts.
        rank: of the adapter.
        size: of the numbers in A and B.
        seed: of these numbers.
        settings: further fields of its configuration; `lora_alpha` is by default the rank.
    """
    drawn, tensors, targets = torch.Generator().manual_seed(seed), {}, []
    added: dict[str, Tensor] = {}
    alpha, is_old = settings.setdefault("lora_alpha", rank), settings.get("peft_version") == "0.18.1"
    wrapped: set[str] = set()
    # PEFT wraps the parameters of a module one after another, the last outermost
    for name in sorted(names, key=lambda each: each.endswith("gate_up_proj")):
        stack, expert, part = _in_stack(name)
        weight, (path, _, last) = model.get_parameter(stack), name.rpartition(".")
        total = added.setdefault(stack, torch.zeros_like(weight))
        weight, total = (each if expert is None else each[expert] for each in (weight, total))
        weight, total = (each if part is None else each.chunk(2)[part] for each in (weight, total))
        module = None if expert is not None else model.get_submodule(path)
        is_stack, is_table = weight.dim() == 3, isinstance(module, nn.Embedding)
        experts, (outputs, inputs) = len(weight) if is_stack else 1, weight.shape[-2:]
        is_mirrored = is_table or isinstance(module, Conv1D)
        # A of an old version has a stack's second dimension
        is_mirrored |= is_stack and (is_old or type(model).__name__.startswith(TRANSPOSED))
        if is_mirrored:
            outputs, inputs = inputs, outputs
        of_module = path if module is None or isinstance(module, (nn.Linear, nn.Embedding, Conv1D)) else name
        lora_r = _matching(settings.get("rank_pattern", {}), of_module, rank)
        scale = _matching(settings.get("alpha_pattern", {}), of_module, alpha)
        scale /= math.sqrt(lora_r) if settings.get("use_rslora") else lora_r
        a = torch.randn(lora_r * experts, inputs, generator=drawn) * size
        b = torch.randn(outputs, lora_r * experts, generator=drawn) * size
        values = scale * torch.einsum("ore,eri->eoi", b.view(outputs, lora_r, experts), a.view(experts, lora_r, inputs))
        values = values if is_stack else values[0]
        total += values.mT if is_mirrored else values
        if of_module == name:
            targets.append(f"{path.rpartition('.')[2]}.{last}")
        inner = ".base_layer" if path in wrapped else ""
        wrapped.add(path)
        wrapper = f"base_model.model.{path}{inner}.lora_" + ("embedding_{}" if is_table else "{}.weight")
        tensors |= {wrapper.format("A"): a, wrapper.format("B"): b}
        if path in TABLES:
            saved = weight.detach().to(torch.bfloat16 if seed % 2 else weight.dtype, copy=True)
            tensors[f"base_model.model.{path}.base_layer.weight"] = saved
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": rank, "target_parameters": sorted(set(targets)), "peft_version": "0.21.0"}
    (folder / "adapter_config.json").write_text(json.dumps(stated | settings))
    return added


def _in_stack(name: str) -> tuple[str, int | None, int | None]:
    """Return the parameter that has a weight, and for a single expert its index there, and its half, if any."""
    match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name)
    if match is None:
        return name, None, None
    half = HALVES.get(match[3])
    stack = f"{match[1].replace('block_sparse_moe', 'mlp')}.{'down_proj' if half is None else 'gate_up_proj'}"
    return stack, int(match[2]), half


def _matching(patterns: Mapping[str, float], name: str, default: float) -> Any:
    """Return the value of the first expression that matches as PEFT does."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)


@contextmanager
def with_added(model: nn.Module, added: dict[str, Tensor]) -> Iterator[nn.Module]:
    """Add to weights meanwhile; those that share their memory are changed each by itself, as with PEFT."""
    before = {name: model.get_parameter(name) for name in added}
    for name, values in added.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(before[name].detach() + values))
    try:
        yield model
    finally:
        for name, weight in before.items():
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, weight)
