"""Low-rank adapters in GGUF, as `convert_lora_to_gguf.py` of llama.cpp writes them."""

import math
from collections.abc import Iterator
from pathlib import Path

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
    for key, wanted in expected.items():
        found = fields.whole(key, str)
        if found != wanted:
            raise UnsupportedModelError(f"{key} is {found!r:.80}, and should be {wanted!r}")
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
    metadata = {**file.fields, f"{name}.attention.head_count": 1}  # so that views tell which rows are permuted
    for base, pair in halves.items():
        if len(pair) < 2:
            raise UnsupportedModelError(f"{base} has only one of A and B")
        a, b = (TensorView(pair[half], pair[half].shape) for half in ("lora_a", "lora_b"))
        for weight, view in architecture.views(metadata, {base: pair["lora_b"]}):
            if isinstance(view, TensorView) and view.head_dim:
                if b.shape[0] % config.head_dim:
                    raise UnsupportedModelError(f"{base} has a B of {b.shape[0]} rows for heads of {config.head_dim}")
                b = TensorView(pair["lora_b"], b.shape, head_dim=config.head_dim)
            down = _values(a)
            down = down.T if base == "token_embd.weight" else down
            yield weight.removesuffix(".weight"), down, _values(b), alpha / b.shape[1]


def _values(view: TensorView) -> Tensor:
    values = torch.empty(view.shape)
    view.read(values, None)
    return values
