"""Bamba (IBM and others, 2024): Mamba2, and attention in some layers."""

from typing import Any, ClassVar

from graphdecode.models.blocks import Mixer
from graphdecode.models.config import ModelConfig
from graphdecode.models.families.hybrid import (
    Hybrid,
    mamba2_mixer,
    mamba2_sizes,
    mamba2_weights,
    recurrent_layers,
    renamed,
)
from graphdecode.models.weight_map import Part, WeightMap
from graphdecode.models.weights import Weights


class Bamba(Hybrid):
    """Bamba."""

    architecture = "BambaForCausalLM"
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
        """Return which layers have a Mamba2 mixer, and its sizes."""
        layers, attending = fields["num_hidden_layers"], settings.get("attn_layer_indices") or ()
        kinds = ["full_attention" if index in attending else "mamba" for index in range(layers)]
        sizes = mamba2_sizes(settings)
        return {"recurrent": recurrent_layers(kinds, layers, sizes.state, ("mamba",)), "mixer": sizes}

    def weights(self, config: ModelConfig) -> WeightMap:
        """Return all tensors that such a model has; the last norm has a name of its own."""
        return super().weights(config) | {"final_norm": (Part("model.final_layernorm.weight", (config.hidden_size,)),)}

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        """Return the places of one layer; see `Llama.layer_weights`."""
        names = {"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward"}
        return renamed(super().layer_weights(config, at, name), name, names)

    def mixer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        """Return the places of a Mamba2 mixer."""
        return mamba2_weights(config, at, f"{name}mamba.")

    def recurrent_mixer(self, config: ModelConfig, weights: Weights, at: str) -> Mixer:
        """Return the Mamba2 mixer of a layer."""
        return mamba2_mixer(config, weights, at)
