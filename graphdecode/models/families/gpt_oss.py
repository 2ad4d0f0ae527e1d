"""gpt-oss (OpenAI, 2025): experts with biases and a clamped gate, attention sinks, a window in every other layer."""

from dataclasses import replace
from typing import Any, ClassVar

from graphdecode.linear.experts import StackLayout
from graphdecode.models.blocks import Attention
from graphdecode.models.config import ExpertsConfig, ModelConfig, number
from graphdecode.models.families.sparse import Sparse, experts_everywhere
from graphdecode.models.weight_map import Part, WeightMap
from graphdecode.models.weights import Weights


class GptOss(Sparse):
    """gpt-oss; experts' gates and inputs are interleaved."""

    architecture = "GptOssForCausalLM"
    stack_layout = StackLayout(interleaved=True, transposed=True)
    router = "router"
    has_biases = True
    window_period = 2
    defaults: ClassVar[dict[str, Any]] = {
        "attention_bias": True,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }

    def experts(self, settings: dict[str, Any], fields: dict[str, Any]) -> ExpertsConfig:
        alpha, limit = number(settings, "swiglu_alpha"), number(settings, "swiglu_limit")
        return replace(experts_everywhere(settings, fields), alpha=alpha, limit=limit)

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        sinks = Part(f"{name}self_attn.sinks", (config.num_attention_heads,), 0)
        return super().layer_weights(config, at, name) | {f"{at}sinks": (sinks,)}

    def attention(self, config: ModelConfig, weights: Weights, index: int) -> Attention:
        attention = super().attention(config, weights, index)
        sinks = weights.tensor(f"layers.{index}.sinks").float()
        return replace(attention, options=attention.options._replace(sinks=sinks))
