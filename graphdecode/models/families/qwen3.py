"""Qwen 3 (Yang et al., 2025): queries and keys are normed per head; biases of attention where a config.json asks."""

from typing import Any, ClassVar

from graphdecode.models.config import ModelConfig
from graphdecode.models.families.llama import attention_biases
from graphdecode.models.families.qwen2 import Qwen2
from graphdecode.models.weight_map import Part, WeightMap


class Qwen3(Qwen2):
    """Qwen 3, dense; its windows are those of Qwen 2."""

    architecture = "Qwen3ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = Qwen2.defaults | {"head_dim": 128}

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        return attention_biases(settings)

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        return super().layer_weights(config, at, name) | head_norms(config, at, name)


def head_norms(config: ModelConfig, at: str, name: str) -> WeightMap:
    """Return the places of the norms of a layer's queries and keys, of each head by itself."""
    shape = (config.head_dim,)
    return {f"{at}{norm}": (Part(f"{name}self_attn.{norm}.weight", shape),) for norm in ("q_norm", "k_norm")}
