"""OLMo 2 (Team OLMo, 2024): norms after each block, none before; queries and keys are normed over all heads.

OLMo 3 (2025) has windows in three of four layers, with unscaled rotary embeddings. OLMo Hybrid (2025) has gated delta
nets in these layers, with norms before each block.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from graphdecode.linear.weight_form import Stored
from graphdecode.models.blocks import Attention, Mixer
from graphdecode.models.config import ModelConfig, all_but_every, choice, count, flag
from graphdecode.models.families.hybrid import OF_ATTENTION, Hybrid, recurrent_layers, renamed
from graphdecode.models.families.llama import ATTENTION_BIASES, Llama, head_run, norms_at
from graphdecode.models.families.qwen3_5 import DeltaSizes, delta_net
from graphdecode.models.rope import ropes_by_layer_type
from graphdecode.models.split_blocks import JointlyNormedAttention
from graphdecode.models.weight_map import Part, WeightMap, product
from graphdecode.models.weights import Weights

_THETA = 500000.0
_NORM_EPS = 1e-5  # of the norm in delta nets; not in config.json


class Olmo2(Llama):
    """OLMo 2."""

    architecture = "Olmo2ForCausalLM"
    biases = ATTENTION_BIASES
    norms: ClassVar[dict[str, str]] = {
        "after_attention": "post_attention_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }
    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5}

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        q, kv = config.num_attention_heads * config.head_dim, head_run(config)
        return super().layer_weights(config, at, name) | {
            f"{at}q_norm": (Part(f"{name}self_attn.q_norm.weight", (q,), 0),),
            f"{at}k_norm": (Part(f"{name}self_attn.k_norm.weight", (kv.size,), 0, (kv,)),),
        }

    def attention(self, config: ModelConfig, weights: Weights, index: int) -> Attention:
        """Return a layer's attention; ranks norm its heads together."""
        attention, collectives = super().attention(config, weights, index), weights.collectives
        if collectives is None:
            return attention
        return JointlyNormedAttention(**vars(attention), collectives=collectives, param_name=f"layers.{index}.q_norm")


class Olmo3(Olmo2):
    """OLMo 3."""

    architecture = "Olmo3ForCausalLM"
    window_period = 4
    has_window_rope = True
    defaults: ClassVar[dict[str, Any]] = Olmo2.defaults | {"sliding_window": 4096}

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        return super().config(settings | ropes_by_layer_type(settings, _THETA, _THETA))


class WholeDeltaSizes(DeltaSizes):
    """Sizes of a delta net that cannot be split over ranks: a source may cut a convolution's weight anywhere."""

    def split(self, count: int) -> None:
        """Return None."""


class OlmoHybrid(Olmo2, Hybrid):
    """OLMo Hybrid."""

    architecture = "OlmoHybridForCausalLM"
    attention_only = (*OF_ATTENTION, "after_attention", "after_mlp")
    defaults: ClassVar[dict[str, Any]] = {
        "linear_allow_neg_eigval": True,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 65536,
    }

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        choice(settings, "hidden_act", ("silu", "swish"))  # also of the convolution
        layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
        is_linear = all_but_every(4, layers)
        if all(is_linear):
            is_linear[-1] = False
        kinds = settings.get("layer_types") or [("full_attention", "linear_attention")[each] for each in is_linear]
        key_heads = count(settings, "linear_num_key_heads", heads)
        key_dim = count(settings, "linear_key_head_dim", int(0.75 * fields["hidden_size"] / key_heads))
        sizes = WholeDeltaSizes(
            key_heads=key_heads,
            key_dim=key_dim,
            heads=count(settings, "linear_num_value_heads", heads),
            value_dim=count(settings, "linear_value_head_dim", 2 * key_dim),
            width=count(settings, "linear_conv_kernel_dim"),
            strength=2.0 if flag(settings, "linear_allow_neg_eigval", True) else 1.0,
        )
        rope = settings.get("rope_parameters")  # `rope_theta` is null if the model has no rotary embedding
        has_rope = not isinstance(rope, dict) or rope.get("rope_theta") is not None
        return super().options(settings, fields) | {
            **recurrent_layers(kinds, layers, sizes, ("linear_attention",)),
            "layer_ropes": () if has_rope else (None,) * layers,
        }

    def weights_in(self, config: ModelConfig, tensors: Mapping[str, Stored]) -> WeightMap:
        """Return the weight map for a source, which transformers may have written.

        transformers renames a norm of attention layers, and cuts the weight of a convolution into equal parts.
        """
        weight_map = self.weights(config)
        for index in range(config.num_hidden_layers):
            at, name = f"layers.{index}.", f"model.layers.{index}."
            if config.has_state(index):
                stored = [
                    part._replace(shape=tensors[part.name].shape)
                    for part in weight_map[f"{at}conv"]
                    if part.name in tensors and tensors[part.name].shape[1:] == part.shape[1:]
                ]
                channels = sum(part.shape[0] for part in stored)
                if channels == config.mixer.conv_channels:
                    weight_map[f"{at}conv"] = tuple(stored)
            elif f"{name}feedforward_layer_norm.weight" in tensors:
                param_name, norm = f"{at}after_attention", {"post_attention_layernorm": "feedforward_layer_norm"}
                weight_map |= renamed({param_name: weight_map[param_name]}, name, norm)
        return weight_map

    def mixer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        sizes, prefix, hidden = config.mixer, f"{name}linear_attn.", config.hidden_size
        channels = {"q": sizes.key_size, "k": sizes.key_size, "v": sizes.value_size}
        projected = channels | {"g": sizes.value_size, "a": sizes.heads, "b": sizes.heads}
        names = {f"{prefix}{part}_proj": size for part, size in projected.items()}
        norms = {"before_attention": "attention_layer_norm", "before_mlp": "feedforward_layer_norm"}
        return {
            **norms_at(norms, config, at, name),
            f"{at}conv": tuple(
                Part(f"{prefix}{part}_conv1d.weight", (size, 1, sizes.width)) for part, size in channels.items()
            ),
            f"{at}a_log": (Part(f"{prefix}A_log", (sizes.heads,)),),
            f"{at}dt_bias": (Part(f"{prefix}dt_bias", (sizes.heads,)),),
            f"{at}mixer_norm": (Part(f"{prefix}o_norm.weight", (sizes.value_dim,)),),
            **product(f"{at}in_proj", names, hidden, split=None),
            **product(f"{at}out_proj", {f"{prefix}o_proj": hidden}, sizes.value_size, split=None),
        }

    def recurrent_mixer(self, config: ModelConfig, weights: Weights, at: str) -> Mixer:
        return delta_net(config.mixer, weights, at, _NORM_EPS)
