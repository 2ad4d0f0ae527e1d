"""LFM2 (Liquid AI, 2025): short gated convolutions, and attention in some layers."""

from typing import Any, ClassVar, NamedTuple

import torch

from graphdecode.cache import Recurrent
from graphdecode.models.blocks import Mixer
from graphdecode.models.config import ModelConfig, count, flag, number
from graphdecode.models.families.hybrid import Hybrid, conv_weight, recurrent_layers, renamed
from graphdecode.models.fields import layer_numbers
from graphdecode.models.recurrent_blocks import ShortConv
from graphdecode.models.weight_map import Part, Run, WeightMap, product
from graphdecode.models.weights import Weights


class ConvSizes(NamedTuple):
    """Sizes of the convolutions."""

    channels: int
    width: int  # kernel size
    has_bias: bool  # of the convolutions and the products around them

    def split(self, count: int) -> "ConvSizes | None":
        """Return the sizes of one of `count` shards; None if the channels cannot be split."""
        return None if self.channels % count else self._replace(channels=self.channels // count)

    @property
    def state(self) -> Recurrent:
        """The recurrent state of a layer."""
        return Recurrent((("conv_state", (self.width - 1, self.channels)),))


class Lfm2(Hybrid):
    """LFM2, dense."""

    architecture = "Lfm2ForCausalLM"
    has_head_norms = True
    final_norm = "model.embedding_norm"
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
    }

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        settings |= {"rms_norm_eps": settings["norm_eps"], "intermediate_size": _intermediate_size(settings)}
        settings["tie_word_embeddings"] = settings.get("tie_embedding", settings["tie_word_embeddings"])
        return super().config(settings)

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        width, layers = count(settings, "conv_L_cache"), fields["num_hidden_layers"]
        stated = layer_numbers(settings, "full_attn_idxs")
        attending = range(layers) if stated is None else stated
        kinds = settings.get("layer_types") or ["full_attention" if i in attending else "conv" for i in range(layers)]
        sizes = ConvSizes(fields["hidden_size"], width, flag(settings, "conv_bias", False))
        return recurrent_layers(kinds, layers, sizes, ("conv",))

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        names = {
            "input_layernorm": "operator_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.o_proj": "self_attn.out_proj",
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        }
        return renamed(super().layer_weights(config, at, name), name, names)

    def mixer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        hidden, conv, (channels, width, bias) = config.hidden_size, f"{name}conv.", config.mixer
        weight_map: WeightMap = {f"{at}conv": (Part(f"{conv}conv.weight", (channels, 1, width), 0),)}
        if bias:
            weight_map[f"{at}conv_bias"] = (Part(f"{conv}conv.bias", (channels,), 0),)
        return weight_map | {
            **product(f"{at}in_proj", {f"{conv}in_proj": (Run(channels),) * 3}, hidden, split=0, bias=bias),
            **product(f"{at}out_proj", {f"{conv}out_proj": hidden}, channels, split=1, bias=bias),
        }

    def recurrent_mixer(self, config: ModelConfig, weights: Weights, at: str) -> Mixer:
        bias = weights.tensor(f"{at}conv_bias", torch.float32) if config.mixer.has_bias else None
        return ShortConv(
            weights.linear(f"{at}in_proj"), weights.linear(f"{at}out_proj"), conv_weight(weights, f"{at}conv"), bias
        )


def _intermediate_size(settings: dict[str, Any]) -> int:
    size = count(settings, "block_ff_dim", settings.get("intermediate_size"))
    if not flag(settings, "block_auto_adjust_ff_dim", True):
        return size
    multiple = count(settings, "block_multiple_of", 256)
    size = int(number(settings, "block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple
