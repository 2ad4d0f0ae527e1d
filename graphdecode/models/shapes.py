"""Models with random weights, made on the device, for benchmarks."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphdecode.errors import ArgumentError, resembling
from graphdecode.hub.model_path import SHAPE_PREFIX
from graphdecode.linear.weight_form import Shard, Stored
from graphdecode.models.config import ModelConfig
from graphdecode.models.families import ARCHITECTURES
from graphdecode.models.family import config_of, family_of
from graphdecode.models.weight_map import parts

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def _shape(family: str, *sizes: int, **settings: Any) -> dict[str, Any]:
    return {"architectures": [ARCHITECTURES[family]], **dict(zip(_SIZES, sizes, strict=True)), **settings}


def _llama3(factor: float) -> dict[str, Any]:
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **bands}}


_TIED = {"tie_word_embeddings": True}
_DELTA_NET = {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, **_TIED}
_MAMBA2 = {"num_heads": 80, "head_dim": 64, "n_groups": 1, "state_size": 128, **_TIED}
_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_LATENT = {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
_LATENT |= {"moe_intermediate_size": 1536}
SHAPES = {  # sizes in the order of `_SIZES`
    "glm-4.7-flash": _shape("deepseek.Glm4MoeLite", 154880, 2048, 10240, 47, 20, 20, 202752, **_LATENT),
    "llama-100m": _shape("llama.Llama", 32000, 768, 2048, 12, 12, 4, 4096),
    "llama-3.2-1b": _shape("llama.Llama", 128256, 2048, 8192, 16, 32, 8, 131072, head_dim=64, **_TIED, **_llama3(32.0)),
    "llama-3.1-8b": _shape("llama.Llama", 128256, 4096, 14336, 32, 32, 8, 131072, **_llama3(8.0)),
    "qwen3-0.6b": _shape("qwen.Qwen3", 151936, 1024, 3072, 28, 16, 8, 40960, head_dim=128, rope_theta=1e6, **_TIED),
    "qwen3.5-0.8b": _shape("qwen3_5.Qwen35", 248320, 1024, 3584, 24, 8, 2, 262144, **_DELTA_NET),
    "mamba2-2.7b": _shape("mamba2.Mamba2Family", 50288, 2560, 1, 64, 1, 1, 2**20, **_MAMBA2),
    "qwen3-30b-a3b": _shape(
        "qwen.Qwen3Moe", 151936, 2048, 6144, 48, 32, 4, 40960, head_dim=128, rope_theta=1e6, **_QWEN3_EXPERTS
    ),
}
_STANDARD_DEVIATION = 0.02


def shape_config(name: str) -> ModelConfig:
    """Return the bf16 configuration of a shape, such as `shape:llama-3.1-8b`."""
    shape = SHAPES.get(name.removeprefix(SHAPE_PREFIX))
    if shape is None:
        known = [SHAPE_PREFIX + each for each in SHAPES]
        raise ArgumentError(f"unknown shape {name!r}; known are {', '.join(known)}{resembling(name, known)}")
    return config_of({"dtype": "bfloat16", "rms_norm_eps": 1e-5} | shape)


class RandomWeights:
    """Random normal tensors of a shape's model; norm weights are 1."""

    def __init__(self, model: str | Path) -> None:
        self.name = str(model)
        self._config = shape_config(self.name)
        self._generator: torch.Generator | None = None

    @classmethod
    def opens(cls, model: str | Path) -> bool:
        """Whether a model's name is a shape."""
        return str(model).startswith(SHAPE_PREFIX)

    def config(self) -> ModelConfig:
        """Return the configuration of the shape."""
        return self._config

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """The tensors that the family's weight map names."""
        weight_map = family_of(self._config.architecture).weights(self._config)
        return {part.name: Stored(part.shape, "BF16") for part in parts(weight_map)}

    def read(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Draw a tensor into `out`; a shard is cut from the whole tensor, so that all ranks have the same model."""
        if name.endswith("norm.weight"):
            out.fill_(1.0)
            return
        if self._generator is None:
            self._generator = torch.Generator(out.device).manual_seed(0)
        shape = self.tensors[name].shape
        whole = out if shard is None else out.new_empty(shape)
        whole.normal_(0.0, _STANDARD_DEVIATION, generator=self._generator)
        if shard is not None:
            out.copy_(whole[shard.slices(shape)])
