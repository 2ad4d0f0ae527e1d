"""Mamba2 (Dao and Gu, 2024), without attention and MLP; Bamba (IBM and others, 2024), with both."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from graphdecode.cache import LayerState
from graphdecode.models.blocks import Addend, BlockOutput, FeedForward, Layer, Mixer, Norm
from graphdecode.models.config import ModelConfig
from graphdecode.models.families.hybrid import (
    MAMBA2_DEFAULTS,
    Mamba2Hybrid,
    mamba2_sizes,
    mamba2_weights,
    recurrent_layers,
    renamed,
)
from graphdecode.models.families.llama import norms_at
from graphdecode.models.family import outer_weights
from graphdecode.models.fields import layer_numbers
from graphdecode.models.forward_context import ForwardContext
from graphdecode.models.weight_map import WeightMap
from graphdecode.models.weights import Weights


@dataclass(frozen=True)
class OneBlockLayer(Layer):
    """One block after a norm: `x + block(norm(x))`."""

    input_norm: Norm
    block: Mixer | FeedForward

    def __call__(self, x: Addend, residual: Tensor, context: ForwardContext, cache: LayerState) -> BlockOutput:
        hidden, residual = self.input_norm(x, residual, context, into=self.block.input_linear)
        if isinstance(self.block, Mixer):
            return self.block(hidden, residual, context, cache)
        return self.block(hidden, residual, context)

    def append(self, x: Addend, residual: Tensor, context: ForwardContext, cache: LayerState) -> None:
        if isinstance(self.block, Mixer):
            hidden, residual = self.input_norm(x, residual, context, into=self.block.input_linear)
            self.block.append(hidden, residual, context, cache)


class Mamba2Family(Mamba2Hybrid):
    """Mamba2."""

    architecture = "Mamba2ForCausalLM"
    # config.json has no fields of attention; sequence length is limited only by memory
    defaults: ClassVar[dict[str, Any]] = {
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
        return super().config(settings)

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        sizes = mamba2_sizes(settings)
        return {"recurrent": (sizes.state,) * fields["num_hidden_layers"], "mixer": sizes}

    def weights(self, config: ModelConfig) -> WeightMap:
        weight_map = outer_weights(config, embedding="backbone.embeddings", final_norm="backbone.norm_f")
        for index in range(config.num_hidden_layers):
            at, name = f"layers.{index}.", f"backbone.layers.{index}."
            weight_map |= norms_at({"input_norm": "norm"}, config, at, name)
            weight_map |= self.block_weights(config, index, at, f"{name}mixer.")
        return weight_map

    def block_weights(self, config: ModelConfig, index: int, at: str, name: str) -> WeightMap:
        """Return the weight map of a layer's block, whose tensors' names begin with `name`."""
        return mamba2_weights(config, at, name)

    def layer(self, config: ModelConfig, weights: Weights, index: int) -> Layer:
        norm = weights.norm(f"layers.{index}.input_norm", config.rms_norm_eps)
        return OneBlockLayer(norm, self.block(config, weights, index))

    def block(self, config: ModelConfig, weights: Weights, index: int) -> Mixer | FeedForward:
        """Return a layer's block."""
        return self.mixer(config, weights, index)


class Bamba(Mamba2Hybrid):
    """Bamba: Mamba2, and attention in some layers."""

    architecture = "BambaForCausalLM"
    final_norm = "model.final_layernorm"
    has_partial_rotary = True
    defaults: ClassVar[dict[str, Any]] = MAMBA2_DEFAULTS | {
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
    }

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        layers, attending = fields["num_hidden_layers"], layer_numbers(settings, "attn_layer_indices") or ()
        kinds = ["full_attention" if index in attending else "mamba" for index in range(layers)]
        return super().options(settings, fields) | recurrent_layers(kinds, layers, mamba2_sizes(settings), ("mamba",))

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        names = {"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward"}
        return renamed(super().layer_weights(config, at, name), name, names)
