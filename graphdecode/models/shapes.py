"""Models by shape alone: random weights made on the device, for measuring."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError
from graphdecode.models.config import ModelConfig

_LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "llama-100m": _LLAMA
    | {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
    },
    "llama-3.2-1b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_parameters": _LLAMA3_ROPE | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": _LLAMA3_ROPE | {"factor": 8.0},
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}
PREFIX = "shape:"
_STANDARD_DEVIATION = 0.02


def shape_config(name: str) -> ModelConfig:
    """Return the configuration of a shape, such as `shape:llama-3.1-8b`, in bf16.

    Raises:
        ValueError: the shape is unknown; the message lists those that are known.
    """
    shape = _SHAPES.get(name.removeprefix(PREFIX))
    if shape is None:
        raise ArgumentError(f"unknown shape {name!r}; known are {', '.join(PREFIX + known for known in _SHAPES)}")
    return ModelConfig.from_dict({"dtype": "bfloat16", "rms_norm_eps": 1e-5} | shape)


class RandomWeights:
    """Stands in for a checkpoint: any tensor that is asked for, drawn from a normal distribution on the device.

    Args:
        device: where the tensors are made.
        dtype: of the tensors.
        seed: of the draws.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def check(self, expected: dict[str, tuple[int, ...]], optional: set[str]) -> None:
        """Remember the shapes; whatever a model has is there."""
        self._shapes = dict(expected)

    def read(self, *names: str) -> Tensor:
        """Return one tensor, or several fused along their first dimension."""
        shapes = [self._shapes[name] for name in names]
        sizes = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        tensor = torch.empty(sizes, dtype=self._dtype, device=self._device)
        if names[0].endswith("norm.weight"):
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, _STANDARD_DEVIATION, generator=self._generator)
