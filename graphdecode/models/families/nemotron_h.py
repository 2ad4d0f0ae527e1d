"""Nemotron-H (NVIDIA, 2025): one block per layer: Mamba2, attention without positions, or an MLP."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from graphdecode.cache import Recurrent
from graphdecode.errors import shown
from graphdecode.linear.weight_form import Stored, WeightForm
from graphdecode.models.blocks import BlockOutput, FeedForward, Mixer
from graphdecode.models.config import ModelConfig, UnsupportedModelError, choice, count, flag, number
from graphdecode.models.families.hybrid import mamba2_sizes, renamed
from graphdecode.models.families.llama import Llama, head_run
from graphdecode.models.families.mamba2 import Mamba2Family
from graphdecode.models.forward_context import ForwardContext, Hidden
from graphdecode.models.weight_map import WeightMap, product
from graphdecode.models.weights import Weights

_KINDS = {
    **dict.fromkeys(("linear_attention", "mamba", "M"), "mamba"),
    **dict.fromkeys(("full_attention", "attention", "*"), "attention"),
    **dict.fromkeys(("mlp", "-"), "mlp"),
}
_IN_TRANSFORMERS = {"backbone": "model"}  # modules there
_OLDER_NAMES = {  # older field names -> names here; the older ones take precedence
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

    @property
    def input_linear(self) -> WeightForm:
        return self.up

    def __call__(self, x: Hidden, residual: Tensor, context: ForwardContext) -> BlockOutput:
        activated = context.buffer(self.down.in_features, use="activated")
        activated.copy_(context.linear(self.up, x).relu_().square_())
        return self.output_linear(self.down, activated, residual, context)


class NemotronH(Mamba2Family):
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
        """Read the fields of config.json; `num_hidden_layers` and `tie_word_embeddings` are ignored."""
        settings |= {ours: settings[older] for older, ours in _OLDER_NAMES.items() if older in settings}
        choice(settings, "mlp_hidden_act", ("relu2",))
        settings |= {
            "layer_types": _kinds(settings),
            "num_hidden_layers": len(_kinds(settings)),
            "tie_word_embeddings": False,
            "rms_norm_eps": settings["layer_norm_epsilon"],
            "hidden_act": settings["mamba_hidden_act"],
        }
        return Llama.config(self, settings)

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
        """Return the weight map for a source, whose prefix may be `model.`, as transformers writes it."""
        weight_map = self.weights(config)
        return renamed(weight_map, "", _IN_TRANSFORMERS) if "model.embeddings.weight" in tensors else weight_map

    def layouts(self, config: ModelConfig) -> tuple[WeightMap, ...]:
        return (*super().layouts(config), renamed(self.weights(config), "", _IN_TRANSFORMERS))

    def block_weights(self, config: ModelConfig, index: int, at: str, name: str) -> WeightMap:
        hidden, ff, state = config.hidden_size, config.intermediate_size, config.recurrent[index]
        if state is not None and state.shapes:
            return super().block_weights(config, index, at, name)
        if state is not None:
            up = product(f"{at}up", {f"{name}up_proj": ff}, hidden, split=0, bias=config.mlp_bias)
            return up | product(f"{at}down", {f"{name}down_proj": hidden}, ff, split=1, bias=config.mlp_bias)
        q, kv = config.num_attention_heads * config.head_dim, (head_run(config),)
        qkv: dict[str, Any] = {f"{name}q_proj": q, f"{name}k_proj": kv, f"{name}v_proj": kv}
        o = product(f"{at}o", {f"{name}o_proj": hidden}, q, split=1)
        return product(f"{at}qkv", qkv, hidden, split=0) | o

    def block(self, config: ModelConfig, weights: Weights, index: int) -> Mixer | FeedForward:
        at, state = f"layers.{index}.", config.recurrent[index]
        if state is not None and not state.shapes:
            return SquaredReluMlp(weights.linear(f"{at}up"), weights.linear(f"{at}down"))
        return self.mixer(config, weights, index)


def _kinds(settings: dict[str, Any]) -> list[str]:
    name = next((n for n in ("layers_block_type", "layer_types", "hybrid_override_pattern") if settings.get(n)), None)
    kinds = settings[name] if name else None
    if not isinstance(kinds, (list, str)) or not all(isinstance(each, str) and each in _KINDS for each in kinds):
        raise UnsupportedModelError(
            f"{name or 'layers_block_type'} must name layers without experts, each one of {', '.join(_KINDS)}, "
            f"got {shown(kinds)}"
        )
    return [_KINDS[each] for each in kinds]
