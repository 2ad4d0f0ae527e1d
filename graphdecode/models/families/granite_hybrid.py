"""Granite 4 (IBM, 2025), the models without Mamba: Granite 3 with one product for gate and up, and no experts."""

from typing import Any

from graphdecode.errors import shown
from graphdecode.models.config import ModelConfig, UnsupportedModelError, count
from graphdecode.models.families.granite import Granite
from graphdecode.models.weight_map import Run, WeightMap, product

_ATTENTION = ("attention", "full_attention")  # as checkpoints and transformers 5 call it


class GraniteHybrid(Granite):
    """Granite 4, where all layers attend."""

    architecture = "GraniteMoeHybridForCausalLM"

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        """Take the fields of a config.json."""
        kinds = settings.get("layer_types") or settings.get("layers_block_type") or ["mamba"]
        other = [kind for kind in kinds if kind not in _ATTENTION] if isinstance(kinds, list) else [kinds]
        if other:
            names = ", ".join(sorted({shown(kind, plain=True) for kind in other}))
            raise UnsupportedModelError(
                f"{len(other)} layers are of the kind {names}, which keeps another state than keys and values; "
                "Granite 4 is run where all layers are attention, as those of micro, 1b and 350m without an h are"
            )
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
        return super().options(settings, fields) | ropes

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        """Return the places of one layer."""
        hidden, ff, mlp = config.hidden_size, Run(config.intermediate_size), f"{name}shared_mlp."
        return super().layer_weights(config, at, name) | {
            **product(f"{at}gate_up", {f"{mlp}input_linear": (ff, ff)}, hidden, split=0),
            **product(f"{at}down", {f"{mlp}output_linear": hidden}, ff.size, split=1),
        }
