"""OLMo 2 (Team OLMo, 2024): norms behind each block and none before; queries are normed over all heads, and keys."""

from __future__ import annotations

from typing import Any, ClassVar

from graphdecode.models.blocks import Attention, Layer
from graphdecode.models.config import ModelConfig
from graphdecode.models.families.llama import Llama, attention_biases, head_run, sandwich_layer
from graphdecode.models.split_blocks import jointly_normed
from graphdecode.models.weight_map import Part, WeightMap
from graphdecode.models.weights import Weights


class Olmo2(Llama):
    """OLMo 2."""

    architecture = "Olmo2ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }

    def biases(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return that attention's products may have biases."""
        return attention_biases(settings)

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        """Return the places of one layer; see `Llama.layer_weights`."""
        places = super().layer_weights(config, at, name)
        del places[f"{at}input_norm"], places[f"{at}post_norm"]
        q, kv = config.num_attention_heads * config.head_dim, head_run(config)
        return places | {
            f"{at}q_norm": (Part(f"{name}self_attn.q_norm.weight", (q,), 0),),
            f"{at}k_norm": (Part(f"{name}self_attn.k_norm.weight", (kv.size,), 0, (kv,)),),
            f"{at}after_attention": (Part(f"{name}post_attention_layernorm.weight", (config.hidden_size,)),),
            f"{at}after_mlp": (Part(f"{name}post_feedforward_layernorm.weight", (config.hidden_size,)),),
        }

    def attention(self, config: ModelConfig, weights: Weights, index: int) -> Attention:
        """Return a layer's attention; ranks that share its heads norm them together."""
        attention, shared = super().attention(config, weights, index), weights.shared
        return attention if shared is None else jointly_normed(attention, shared, f"layers.{index}.q_norm")

    def layer(self, config: ModelConfig, weights: Weights, index: int) -> Layer:
        """Return one layer, its weights read."""
        return sandwich_layer(self, config, weights, index)
