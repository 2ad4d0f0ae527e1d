"""Mamba2 (Dao and Gu, 2024), by itself: no attention, no MLP; and Bamba (IBM and others, 2024), with both."""

from dataclasses import dataclass
from typing import Any, ClassVar

from graphdecode.cache import LayerState
from graphdecode.models.blocks import Layer, Mixer, Norm, ResidualStream
from graphdecode.models.config import ModelConfig, common_fields
from graphdecode.models.families.hybrid import (
    Mamba2Hybrid,
    mamba2_mixer,
    mamba2_sizes,
    mamba2_weights,
    recurrent_layers,
    renamed,
)
from graphdecode.models.family import Family, edges
from graphdecode.models.weight_map import Part, WeightMap
from graphdecode.models.weights import Weights


@dataclass(frozen=True)
class MixerLayer(Layer):
    """One block behind a norm: `x + mixer(norm(x))`."""

    input_norm: Norm
    mixer: Mixer

    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        stream.norm(self.input_norm)
        self.mixer.run(stream, cache)


class Mamba2Family(Family):
    """Mamba2."""

    architecture = "Mamba2ForCausalLM"
    # a config.json says nothing of attention; sequences may be as long as there is memory for their tokens
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "intermediate_size": 1,
        "max_position_embeddings": 2**20,
        "num_attention_heads": 1,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 8,
        "state_size": 128,
        "num_heads": 128,
        "layer_norm_epsilon": 1e-5,
    }

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        settings = self.defaults | settings
        names = {
            "mamba_n_heads": "num_heads",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_expand": "expand",
            "rms_norm_eps": "layer_norm_epsilon",
        }
        settings |= {ours: settings[theirs] for ours, theirs in names.items()}
        settings |= {"mamba_d_head": settings.get("head_dim", 64), "head_dim": 16}  # of attention, which no layer has
        settings |= {"mamba_conv_bias": settings.get("use_conv_bias", True)}
        settings |= {"mamba_proj_bias": settings.get("use_bias", False)}
        fields, sizes = common_fields(settings), mamba2_sizes(settings)
        layers = fields["num_hidden_layers"]
        fields |= {"recurrent": (sizes.state,) * layers, "mixer": sizes, "windows": (-1,) * layers}
        return ModelConfig(architecture=self.architecture, **fields)

    def weights(self, config: ModelConfig) -> WeightMap:
        places = edges(config, embedding="backbone.embeddings", final_norm="backbone.norm_f")
        for index in range(config.num_hidden_layers):
            at, name = f"layers.{index}.", f"backbone.layers.{index}."
            places[f"{at}input_norm"] = (Part(f"{name}norm.weight", (config.hidden_size,)),)
            places |= mamba2_weights(config, at, f"{name}mixer.")
        return places

    def layer(self, config: ModelConfig, weights: Weights, index: int) -> Layer:
        at = f"layers.{index}."
        return MixerLayer(weights.norm(f"{at}input_norm", config.rms_norm_eps), mamba2_mixer(config, weights, at))


class Bamba(Mamba2Hybrid):
    """Bamba: Mamba2, and attention in some layers."""

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
