"""Llama (Touvron et al., 2023): norms before attention and the gated MLP; optional biases."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from graphdecode.models.blocks import Attention, DecoderLayer, FeedForward, GatedMlp, Identity, Layer, Mixer
from graphdecode.models.config import ModelConfig, all_but_every, common_fields, flag, layer_ropes, layer_windows
from graphdecode.models.family import Family, outer_weights
from graphdecode.models.weight_map import Part, Run, WeightMap, product
from graphdecode.models.weights import Weights

Biases = dict[str, str | bool]
ATTENTION_BIASES: Biases = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}


class Llama(Family):
    """Llama 1 to 3, and models of the same architecture."""

    architecture = "LlamaForCausalLM"
    # they apply to fields that a subclass does not name, too
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 2048, "hidden_act": "silu"}
    has_partial_rotary: ClassVar[bool] = False  # whether partial rotation is supported
    # biases of products -> the field of config.json that enables them, or a constant
    biases: ClassVar[Biases] = ATTENTION_BIASES | {"mlp_bias": "mlp_bias"}
    norms: ClassVar[dict[str, str]] = {  # a layer's norms -> their modules
        "before_attention": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
    }
    window_period: ClassVar[int] = 0  # each such layer sees all tokens, the others a window; 0: no windows
    has_window_rope: ClassVar[bool] = False  # whether layers with a window have their own rope; see `layer_ropes`
    has_head_norms: ClassVar[bool] = False  # whether queries and keys are normed per head
    final_norm: ClassVar[str] = "model.norm"  # module of the final norm

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        settings = Llama.defaults | settings
        fields = common_fields(settings, may_be_partial=self.has_partial_rotary)
        fields["windows"] = self.windows(settings, fields["num_hidden_layers"])
        fields |= self.options(settings, fields)
        return ModelConfig(architecture=self.architecture, **fields)

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return `ModelShape.windows`."""
        return layer_windows(settings, self.has_window(settings, layers)) if self.window_period else (-1,) * layers

    def has_window(self, settings: dict[str, Any], layers: int) -> list[bool]:
        """Return whether each layer has a window if `layer_types` does not say."""
        return all_but_every(self.window_period, layers)

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """Return further fields of the configuration, such as biases.

        `settings`: config.json with the family's defaults. `fields`: fields read so far.
        """
        ropes = {}
        if self.has_window_rope:
            ropes = layer_ropes(settings, fields, self.has_window(settings, fields["num_hidden_layers"]))
        return ropes | {
            name: stated if isinstance(stated, bool) else flag(settings, stated, False)
            for name, stated in self.biases.items()
        }

    def weights(self, config: ModelConfig) -> WeightMap:
        weight_map = outer_weights(config, final_norm=self.final_norm)
        for index in range(config.num_hidden_layers):
            weight_map |= self.layer_weights(config, f"layers.{index}.", f"model.layers.{index}.")
        return weight_map

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        """Return the weight map of one layer: prefix `at` in the model, `name` in the source."""
        hidden, ff = config.hidden_size, config.intermediate_size
        q, kv = config.num_attention_heads * config.head_dim, (head_run(config),)
        attention, mlp = f"{name}self_attn.", f"{name}mlp."
        qkv: dict[str, int | tuple[Run, ...]] = {f"{attention}q_proj": q}
        qkv |= {f"{attention}k_proj": kv, f"{attention}v_proj": kv}
        gate_up = {f"{mlp}gate_proj": ff, f"{mlp}up_proj": ff}
        head_norms = ("q_norm", "k_norm") if self.has_head_norms else ()
        return {
            **norms_at(self.norms, config, at, name),
            **product(f"{at}qkv", qkv, hidden, split=0, bias=config.qkv_bias),
            **product(f"{at}o", {f"{attention}o_proj": hidden}, q, split=1, bias=config.o_bias),
            **product(f"{at}gate_up", gate_up, hidden, split=0, bias=config.mlp_bias),
            **product(f"{at}down", {f"{mlp}down_proj": hidden}, ff, split=1, bias=config.mlp_bias),
            **{f"{at}{norm}": (Part(f"{attention}{norm}.weight", (config.head_dim,)),) for norm in head_norms},
        }

    def layer(self, config: ModelConfig, weights: Weights, index: int) -> Layer:
        """Read and return one layer, with the norms that the map has."""
        at, eps, scale = f"layers.{index}.", config.rms_norm_eps, config.residual_scale
        after_attention, after_mlp = (weights.optional_norm(f"{at}after_{each}", eps) for each in ("attention", "mlp"))
        mixer, mlp = self.mixer(config, weights, index), self.feed_forward(config, weights, index)
        return DecoderLayer(
            input_norm=weights.optional_norm(f"{at}before_attention", eps) or Identity(),
            mixer=replace(mixer, output_norm=after_attention, output_scale=scale),
            mlp_norm=weights.optional_norm(f"{at}before_mlp", eps) or Identity(),
            mlp=replace(mlp, output_norm=after_mlp, output_scale=scale),
        )

    def mixer(self, config: ModelConfig, weights: Weights, index: int) -> Mixer:
        """Return a layer's mixer: attention."""
        return self.attention(config, weights, index)

    def attention(self, config: ModelConfig, weights: Weights, index: int) -> Attention:
        """Return a layer's attention, with the head norms that the map has."""
        at, eps = f"layers.{index}.", config.rms_norm_eps
        return Attention(
            qkv=weights.linear(f"{at}qkv"),
            q_norm=weights.optional_norm(f"{at}q_norm", eps),
            k_norm=weights.optional_norm(f"{at}k_norm", eps),
            o=weights.linear(f"{at}o"),
            head_dim=config.head_dim,
            cos_sin=weights.cos_sin(config.layer_ropes[index] if config.layer_ropes else config.rope, config.head_dim),
            options=config.attention_options(index),
        )

    def feed_forward(self, config: ModelConfig, weights: Weights, index: int) -> FeedForward:
        """Return a layer's MLP or experts."""
        at = f"layers.{index}."
        return GatedMlp(weights.linear(f"{at}gate_up"), weights.linear(f"{at}down"), config.activation)


def norms_at(modules: Mapping[str, str], config: ModelConfig, at: str, name: str) -> WeightMap:
    """Return the weight map of norms over the residual stream, given their modules in a layer."""
    shape = (config.hidden_size,)
    return {f"{at}{param_name}": (Part(f"{name}{module}.weight", shape),) for param_name, module in modules.items()}


def head_run(config: ModelConfig) -> Run:
    """Return the rows of a layer's keys or values."""
    return Run(config.num_key_value_heads * config.head_dim, config.num_key_value_heads)
