"""Gemma 2 (Gemma Team, 2024): norms before and behind each block, every other layer with a window, soft caps."""

from typing import Any, ClassVar

from graphdecode.models.config import ModelConfig, UnsupportedModelError, layer_windows, number
from graphdecode.models.families.llama import Llama, attention_biases
from graphdecode.models.weight_map import Part, WeightMap


class Gemma2(Llama):
    """Gemma 2. The weights of its norms are their distance from 1; its embedding is scaled by the root of its width."""

    architecture = "Gemma2ForCausalLM"
    norm_offset = 1.0
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
        given = self.defaults | settings
        return super().config(given | {"hidden_act": given["hidden_activation"]})

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of each layer: that of the first, the third and so on."""
        return layer_windows(settings, [layer % 2 == 0 for layer in range(layers)])

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        return attention_biases(settings) | {
            "sm_scale": number(settings, "query_pre_attn_scalar") ** -0.5,
            "attention_soft_cap": number(settings, "attn_logit_softcapping", 0.0),
            "logits_soft_cap": number(settings, "final_logit_softcapping", 0.0),
            "embedding_scale": fields["hidden_size"] ** 0.5,
        }

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        names = {
            "after_attention": "post_attention_layernorm",
            "before_mlp": "pre_feedforward_layernorm",
            "after_mlp": "post_feedforward_layernorm",
        }
        norms = {f"{at}{place}": (Part(f"{name}{own}.weight", (config.hidden_size,)),) for place, own in names.items()}
        return super().layer_weights(config, at, name) | norms
