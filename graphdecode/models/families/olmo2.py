"""OLMo 2 (Team OLMo, 2024): norms behind each block and none before; queries are normed over all heads, and keys."""

from typing import Any, ClassVar

from graphdecode.models.blocks import Attention
from graphdecode.models.config import ModelConfig
from graphdecode.models.families.llama import Llama, attention_biases, head_run
from graphdecode.models.split_blocks import jointly_normed
from graphdecode.models.weight_map import Part, WeightMap
from graphdecode.models.weights import Weights


class Olmo2(Llama):
    """OLMo 2."""

    architecture = "Olmo2ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5}

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        return attention_biases(settings)

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        places = super().layer_weights(config, at, name)
        del places[f"{at}before_attention"], places[f"{at}before_mlp"]
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
