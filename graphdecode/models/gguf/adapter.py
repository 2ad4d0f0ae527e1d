"""Low-rank adapters in GGUF, as `convert_lora_to_gguf.py` of llama.cpp writes them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphdecode.models.config import ModelShape, UnsupportedModelError
from graphdecode.models.gguf.architectures import architecture_for
from graphdecode.models.gguf.container import GgufTensor, Metadata, TensorView, read_header

_ACTIVATED = "adapter.alora.invocation_tokens"  # activated LoRA changes only the tokens after these


def read_gguf_adapter(path: Path, config: ModelShape) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Yield module in transformers, A [rank, in_features], B [out_features, rank], and the scale of B.

    Raises:
        UnsupportedModelError: it is no adapter, one of another architecture, or a tensor is not of a product.
        CheckpointError: it is not a GGUF file, or damaged.
    """
    file = read_header(path)
    fields = Metadata(file.fields)
    name, architecture = architecture_for(config.architecture)
    expected = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": name}
    for key, value in expected.items():
        stated = fields.whole(key, str)
        if stated != value:
            raise UnsupportedModelError(f"{key} is {stated!r:.80}, and should be {value!r}")
    alpha = fields.whole("adapter.lora.alpha", (int, float))
    if not math.isfinite(alpha) or alpha == 0.0:
        raise UnsupportedModelError(f"adapter.lora.alpha must be a number other than 0, got {alpha}")
    if _ACTIVATED in file.fields:
        raise UnsupportedModelError(f"{_ACTIVATED} is given, and adapters change all tokens")
    halves: dict[str, dict[str, GgufTensor]] = {}
    for tensor_name, tensor in file.tensors.items():
        base, _, half = tensor_name.rpartition(".")
        if half not in ("lora_a", "lora_b"):
            raise UnsupportedModelError(f"{tensor_name} is not the A or B of a product")
        if len(tensor.shape) != 2:
            raise UnsupportedModelError(f"{tensor_name} is {[*tensor.shape]}; adapters of experts are not supported")
        halves.setdefault(base, {})[half] = tensor
    metadata = {**file.fields, **_sizes(name, config)}
    for base, pair in halves.items():
        if len(pair) < 2:
            raise UnsupportedModelError(f"{base} has only one of A and B")
        rows, columns = pair["lora_b"].shape[0], pair["lora_a"].shape[1]
        views = architecture.views(metadata, {base: pair["lora_b"]})
        if not views:
            raise UnsupportedModelError(
                f"{base} is one of several tensors of a product, and adapters of it are not read"
            )
        for weight, view in views.items():
            assert isinstance(view, TensorView)  # others are of several tensors
            head_dim, orders = config.head_dim if view.head_dim else 0, (view.rows, view.columns)
            if head_dim and rows % head_dim:
                raise UnsupportedModelError(f"{base} has a B of {rows} rows for heads of {head_dim}")
            for order, size in zip(orders, (rows, columns), strict=True):
                if order is not None and len(order) != size:
                    raise UnsupportedModelError(f"{base} has A and B of {size} channels, not {len(order)}")
            down = _values(TensorView(pair["lora_a"], pair["lora_a"].shape, columns=orders[1]))
            down = down.T if base == "token_embd.weight" else down
            up = _values(TensorView(pair["lora_b"], pair["lora_b"].shape, head_dim=head_dim, rows=orders[0]))
            yield weight.removesuffix(".weight"), down, up, alpha / up.shape[1]


def _sizes(name: str, config: ModelShape) -> dict[str, int]:
    """Return the fields of a model's file that tell in which order its rows and columns are."""
    sizes = {"attention.head_count": 1}  # a view then tells whether rows of heads are permuted
    mixer: Any = getattr(config, "mixer", None)
    if hasattr(mixer, "key_heads"):  # of delta nets
        sizes |= {"ssm.time_step_rank": mixer.heads, "ssm.group_count": mixer.key_heads}
        sizes |= {"ssm.state_size": mixer.key_dim, "ssm.inner_size": mixer.heads * mixer.value_dim}
    return {f"{name}.{field}": value for field, value in sizes.items()}


def _values(view: TensorView) -> Tensor:
    values = torch.empty(view.shape)
    view.read(values, None)
    return values
