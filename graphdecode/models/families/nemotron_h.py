"""Nemotron-H (NVIDIA, 2025): one block a layer, which is Mamba2, attention without positions, or an MLP."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from graphdecode.cache import LayerState, Recurrent
from graphdecode.errors import shown
from graphdecode.linear.weight_form import Stored, WeightForm
from graphdecode.models.blocks import FeedForward, Layer, Norm, ResidualStream
from graphdecode.models.config import ModelConfig, UnsupportedModelError, choice, count, flag, number
from graphdecode.models.families.hybrid import Mamba2Hybrid, mamba2_sizes, mamba2_weights, renamed
from graphdecode.models.families.llama import head_run
from graphdecode.models.families.mamba2 import MixerLayer
from graphdecode.models.family import edges
from graphdecode.models.weight_map import Part, WeightMap, product
from graphdecode.models.weights import Weights

_KINDS = {"linear_attention": "mamba", "mamba": "mamba", "M": "mamba"}
_KINDS |= {"full_attention": "attention", "attention": "attention", "*": "attention"}
_KINDS |= {"mlp": "mlp", "-": "mlp"}
_OLDER_NAMES = {  # of fields; these go before the others
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min",
}


@dataclass(frozen=True)
class SquaredReluMlp(FeedForward):
    """`down(relu(up(x)) ** 2)` (So et al., 2021)."""

    up: WeightForm  # [intermediate, hidden]
    down: WeightForm  # [hidden, intermediate]

    def run(self, stream: ResidualStream) -> None:
        up = stream.buffer_for(self.up)
        stream.project(self.up, up)
        activated = stream.buffer(self.down.in_features, use="activated")
        activated.copy_(up.relu_().square_())
        stream.set_output(self.down, activated)


@dataclass(frozen=True)
class MlpLayer(Layer):
    """`x + mlp(norm(x))`."""

    input_norm: Norm
    mlp: FeedForward

    def run(self, stream: ResidualStream, cache: LayerState) -> None:
        stream.norm(self.input_norm)
        self.mlp.run(stream)


class NemotronH(Mamba2Hybrid):
    """Nemotron-H, without experts."""

    architecture = "NemotronHForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_min": 0.001,
    }

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        """Take the fields of a config.json; their number of layers, and whether ends are tied, mean nothing."""
        settings = self.defaults | settings
        settings |= {ours: settings[older] for older, ours in _OLDER_NAMES.items() if older in settings}
        choice(settings, "mlp_hidden_act", ("relu2",))
        settings |= {
            "layer_types": _kinds(settings),
            "num_hidden_layers": len(_kinds(settings)),
            "tie_word_embeddings": False,
            "rms_norm_eps": settings["layer_norm_epsilon"],
            "hidden_act": settings["mamba_hidden_act"],
        }
        return super().config(settings)

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        names = {
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
        }
        named = settings | {ours: settings[theirs] for ours, theirs in names.items()}
        named |= {"mamba_d_ssm": count(named, "mamba_n_heads") * count(named, "mamba_d_head"), "mamba_expand": 1}
        sizes = mamba2_sizes(
            named,
            conv_bias=flag(settings, "use_conv_bias", True),
            proj_bias=flag(settings, "use_bias", False),
            out_bias=flag(settings, "use_bias", False),
            step_limits=(number(settings, "time_step_min"), float("inf")),
        )
        states = {"mamba": sizes.state, "attention": None, "mlp": Recurrent(())}
        return {
            "recurrent": tuple(states[kind] for kind in settings["layer_types"]),
            "mixer": sizes,
            "mlp_bias": flag(settings, "mlp_bias", False),
            "layer_ropes": (None,) * fields["num_hidden_layers"],
        }

    def weights_in(self, config: ModelConfig, tensors: Mapping[str, Stored]) -> WeightMap:
        """Return the places, with the prefix `model.` if the source has it, as transformers writes it."""
        places = self.weights(config)
        return renamed(places, "", {"backbone": "model"}) if "model.embeddings.weight" in tensors else places

    def weights(self, config: ModelConfig) -> WeightMap:
        hidden, ff = config.hidden_size, config.intermediate_size
        q, kv = config.num_attention_heads * config.head_dim, (head_run(config),)
        places = edges(config, embedding="backbone.embeddings", final_norm="backbone.norm_f")
        for index, state in enumerate(config.recurrent):
            at, name = f"layers.{index}.", f"backbone.layers.{index}."
            own = f"{name}mixer."
            places[f"{at}input_norm"] = (Part(f"{name}norm.weight", (hidden,)),)
            if state is None:
                qkv: dict[str, Any] = {f"{own}q_proj": q, f"{own}k_proj": kv, f"{own}v_proj": kv}
                places |= product(f"{at}qkv", qkv, hidden, split=0)
                places |= product(f"{at}o", {f"{own}o_proj": hidden}, q, split=1)
            elif state.shapes:
                places |= mamba2_weights(config, at, own)
            else:
                places |= product(f"{at}up", {f"{own}up_proj": ff}, hidden, split=0, bias=config.mlp_bias)
                places |= product(f"{at}down", {f"{own}down_proj": hidden}, ff, split=1, bias=config.mlp_bias)
        return places

    def layer(self, config: ModelConfig, weights: Weights, index: int) -> Layer:
        at, state = f"layers.{index}.", config.recurrent[index]
        norm = weights.norm(f"{at}input_norm", config.rms_norm_eps)
        if state is not None and not state.shapes:
            return MlpLayer(norm, SquaredReluMlp(weights.linear(f"{at}up"), weights.linear(f"{at}down")))
        return MixerLayer(norm, self.mixer(config, weights, index))


def _kinds(settings: dict[str, Any]) -> list[str]:
    """Return the kind of each layer: mamba, attention or mlp."""
    name = next((n for n in ("layers_block_type", "layer_types", "hybrid_override_pattern") if settings.get(n)), None)
    given = settings[name] if name else None
    if not isinstance(given, (list, str)) or not all(isinstance(each, str) and each in _KINDS for each in given):
        raise UnsupportedModelError(
            f"{name or 'layers_block_type'} must name layers without experts, each one of {', '.join(_KINDS)}, "
            f"got {shown(given)}"
        )
    return [_KINDS[each] for each in given]
