"""OLMo Hybrid (Team OLMo, 2025): OLMo 2 with gated delta nets in three of four layers, which norm before each block."""

from collections.abc import Mapping
from typing import Any, ClassVar

from graphdecode.linear.weight_form import Stored
from graphdecode.models.blocks import Mixer
from graphdecode.models.config import ModelConfig, all_but_every, choice, count, flag
from graphdecode.models.families.hybrid import Hybrid, recurrent_layers, renamed
from graphdecode.models.families.olmo2 import Olmo2
from graphdecode.models.families.qwen3_5 import DeltaSizes, delta_net
from graphdecode.models.weight_map import Part, WeightMap, product
from graphdecode.models.weights import Weights

_NORM_EPS = 1e-5  # of the heads' outputs, whatever a config.json says


class OlmoHybrid(Olmo2, Hybrid):
    """OLMo Hybrid."""

    architecture = "OlmoHybridForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "linear_allow_neg_eigval": True,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 65536,
    }

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        choice(settings, "hidden_act", ("silu", "swish"))  # of the convolution too
        layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
        is_linear = all_but_every(4, layers)
        if all(is_linear):
            is_linear[-1] = False
        kinds = settings.get("layer_types") or [("full_attention", "linear_attention")[each] for each in is_linear]
        key_heads = count(settings, "linear_num_key_heads", heads)
        key_dim = count(settings, "linear_key_head_dim", int(0.75 * fields["hidden_size"] / key_heads))
        sizes = DeltaSizes(
            key_heads=key_heads,
            key_dim=key_dim,
            heads=count(settings, "linear_num_value_heads", heads),
            value_dim=count(settings, "linear_value_head_dim", 2 * key_dim),
            width=count(settings, "linear_conv_kernel_dim"),
            strength=2.0 if flag(settings, "linear_allow_neg_eigval", True) else 1.0,
        )
        rope = settings.get("rope_parameters")  # with a base of null where the model has none
        has_rope = not isinstance(rope, dict) or rope.get("rope_theta") is not None
        return super().options(settings, fields) | {
            "recurrent": recurrent_layers(kinds, layers, sizes.state, ("linear_attention",)),
            "mixer": sizes,
            "layer_ropes": () if has_rope else (None,) * layers,
        }

    def weights(self, config: ModelConfig) -> WeightMap:
        """Return all tensors that such a model has; layers with delta nets have their norms before the blocks."""
        places = super().weights(config)
        for index in range(config.num_hidden_layers):
            if config.keeps_state(index):
                at, name = f"layers.{index}.", f"model.layers.{index}."
                del places[f"{at}after_attention"], places[f"{at}after_mlp"]
                norms = {"before_attention": "attention_layer_norm", "before_mlp": "feedforward_layer_norm"}
                for place, own in norms.items():
                    places[f"{at}{place}"] = (Part(f"{name}{own}.weight", (config.hidden_size,)),)
        return places

    def weights_in(self, config: ModelConfig, tensors: Mapping[str, Stored]) -> WeightMap:
        """Return the same for a source, which transformers may have written.

        It renames a norm of attention layers, too, and cuts the weight of a convolution into parts of one size.
        """
        places = self.weights(config)
        for index in range(config.num_hidden_layers):
            at, name = f"layers.{index}.", f"model.layers.{index}."
            if config.keeps_state(index):
                found = [
                    part._replace(shape=tensors[part.name].shape)
                    for part in places[f"{at}conv"]
                    if part.name in tensors and tensors[part.name].shape[1:] == part.shape[1:]
                ]
                channels = sum(part.shape[0] for part in found)
                if channels == config.mixer.conv_channels:
                    places[f"{at}conv"] = tuple(found)
            elif f"{name}feedforward_layer_norm.weight" in tensors:
                place, norm = f"{at}after_attention", {"post_attention_layernorm": "feedforward_layer_norm"}
                places |= renamed({place: places[place]}, name, norm)
        return places

    def mixer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        sizes, own, hidden = config.mixer, f"{name}linear_attn.", config.hidden_size
        channels = {"q": sizes.key_size, "k": sizes.key_size, "v": sizes.value_size}
        qkvz = {f"{own}{part}_proj": size for part, size in (channels | {"g": sizes.value_size}).items()}
        ab = {f"{own}{part}_proj": sizes.heads for part in ("a", "b")}
        return {
            f"{at}conv": tuple(
                Part(f"{own}{part}_conv1d.weight", (size, 1, sizes.width)) for part, size in channels.items()
            ),
            f"{at}a_log": (Part(f"{own}A_log", (sizes.heads,)),),
            f"{at}dt_bias": (Part(f"{own}dt_bias", (sizes.heads,)),),
            f"{at}mixer_norm": (Part(f"{own}o_norm.weight", (sizes.value_dim,)),),
            **product(f"{at}qkvz", qkvz, hidden, split=None),
            **product(f"{at}ab", ab, hidden, split=None),
            **product(f"{at}out_proj", {f"{own}o_proj": hidden}, sizes.value_size, split=None),
        }

    def recurrent_mixer(self, config: ModelConfig, weights: Weights, at: str) -> Mixer:
        return delta_net(config.mixer, weights, at, _NORM_EPS)
