"""Granite 4 (IBM, 2025), dense: Granite 3 with one product for gate and up, and Mamba2 in place of most attention."""

from typing import Any, ClassVar

from graphdecode.errors import shown
from graphdecode.models.blocks import Mixer
from graphdecode.models.config import ModelConfig, UnsupportedModelError, count
from graphdecode.models.families.granite import Granite
from graphdecode.models.families.hybrid import Hybrid, mamba2_mixer, mamba2_sizes, mamba2_weights, recurrent_layers
from graphdecode.models.weight_map import Run, WeightMap, product
from graphdecode.models.weights import Weights

_MAMBA, _ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")  # in files of either age


class GraniteHybrid(Granite, Hybrid):
    """Granite 4, dense."""

    architecture = "GraniteMoeHybridForCausalLM"
    defaults: ClassVar[dict[str, Any]] = Granite.defaults | {
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        """Take the fields of a config.json."""
        settings = self.defaults | settings
        experts = settings.get("num_local_experts", 8)
        if experts:
            raise UnsupportedModelError(
                f"num_local_experts is {shown(experts)}, and Granite 4 is run without experts alone"
            )
        return super().config({**settings, "intermediate_size": count(settings, "shared_intermediate_size", 1024)})

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """Return biases and multipliers, and whether there are rotary embeddings."""
        kind = settings.get("position_embedding_type") or "nope"
        if kind not in ("rope", "nope"):
            raise UnsupportedModelError(f"position_embedding_type must be rope, nope or null, got {shown(kind)}")
        ropes = {} if kind == "rope" else {"layer_ropes": (None,) * fields["num_hidden_layers"]}
        layers = fields["num_hidden_layers"]
        kinds = settings.get("layer_types") or settings.get("layers_block_type") or ["mamba"] * layers
        sizes = mamba2_sizes(settings)
        recurrent = recurrent_layers(kinds, layers, sizes.state, _MAMBA, _ATTENTION)
        return super().options(settings, fields) | ropes | {"recurrent": recurrent, "mixer": sizes}

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        """Return the places of one layer."""
        hidden, ff, mlp = config.hidden_size, Run(config.intermediate_size), f"{name}shared_mlp."
        return super().layer_weights(config, at, name) | {
            **product(f"{at}gate_up", {f"{mlp}input_linear": (ff, ff)}, hidden, split=0),
            **product(f"{at}down", {f"{mlp}output_linear": hidden}, ff.size, split=1),
        }

    def mixer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        """Return the places of a Mamba2 mixer."""
        return mamba2_weights(config, at, f"{name}mamba.")

    def recurrent_mixer(self, config: ModelConfig, weights: Weights, at: str) -> Mixer:
        """Return the Mamba2 mixer of a layer."""
        return mamba2_mixer(config, weights, at)
