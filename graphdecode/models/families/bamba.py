"""Bamba (IBM and others, 2024): Mamba2, and attention in some layers."""

from typing import Any, ClassVar

from graphdecode.models.config import ModelConfig
from graphdecode.models.families.hybrid import Mamba2Hybrid, mamba2_sizes, recurrent_layers, renamed
from graphdecode.models.weight_map import WeightMap


class Bamba(Mamba2Hybrid):
    """Bamba."""

    architecture = "BambaForCausalLM"
    final_norm = "model.final_layernorm"
    has_partial_rotary = True
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        layers, attending = fields["num_hidden_layers"], settings.get("attn_layer_indices") or ()
        kinds = ["full_attention" if index in attending else "mamba" for index in range(layers)]
        sizes = mamba2_sizes(settings)
        return {"recurrent": recurrent_layers(kinds, layers, sizes.state, ("mamba",)), "mixer": sizes}

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        names = {"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward"}
        return renamed(super().layer_weights(config, at, name), name, names)
