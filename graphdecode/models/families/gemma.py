"""Gemma 2 (Gemma Team, 2024): norms before and after each block, every other layer with a window, soft caps.

Gemma 3 (2025), text: five layers with a window to one without, with different rotary embeddings.
"""

from typing import Any, ClassVar

from graphdecode.models.config import ModelConfig, UnsupportedModelError, all_but_every, count, number
from graphdecode.models.families.llama import ATTENTION_BIASES, Llama
from graphdecode.models.rope import ropes_by_layer_type


class Gemma2(Llama):
    """Gemma 2. Norm weights are stored minus 1; the embedding is scaled by sqrt(hidden_size)."""

    architecture = "Gemma2ForCausalLM"
    norm_offset = 1.0
    biases = ATTENTION_BIASES
    window_period = 2
    norms: ClassVar[dict[str, str]] = {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        if settings.get("use_bidirectional_attention"):
            raise UnsupportedModelError("use_bidirectional_attention is not supported; a token sees those before it")
        return super().config(settings | {"hidden_act": settings["hidden_activation"]})

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        return super().options(settings, fields) | {
            "sm_scale": number(settings, "query_pre_attn_scalar") ** -0.5,
            "attention_soft_cap": number(settings, "attn_logit_softcapping", 0.0),
            "logits_soft_cap": number(settings, "final_logit_softcapping", 0.0),
            "embedding_scale": fields["hidden_size"] ** 0.5,
        }


class Gemma3(Gemma2):
    """Gemma 3's decoder; queries and keys are normed per head."""

    architecture = "Gemma3ForCausalLM"
    has_head_norms = has_window_rope = True
    defaults: ClassVar[dict[str, Any]] = Gemma2.defaults | {
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        local_theta = settings.get("rope_local_base_freq", 1e4)  # in older files
        return super().config(settings | ropes_by_layer_type(settings, 1e6, local_theta))

    def has_window(self, settings: dict[str, Any], layers: int) -> list[bool]:
        return all_but_every(count(settings, "sliding_window_pattern", 6), layers)
