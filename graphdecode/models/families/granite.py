"""Granite 3 (IBM, 2024): a Llama with multipliers on embedding, attention, residual stream and logits.

Granite 4 (2025) replaces most attention by Mamba2, and may have experts beside the MLP.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from graphdecode.errors import shown
from graphdecode.linear.weight_form import Stored
from graphdecode.models.config import ExpertsConfig, ModelConfig, UnsupportedModelError, count, number
from graphdecode.models.families.hybrid import MAMBA2_DEFAULTS, Mamba2Hybrid, mamba2_sizes, recurrent_layers
from graphdecode.models.families.llama import Llama
from graphdecode.models.families.sparse import Sparse, experts_everywhere, experts_of
from graphdecode.models.weight_map import Part, Run, WeightMap, product

_IN_TRANSFORMERS = {  # ends of names there, where checkpoints keep older ones
    "router.layer.weight": "router.weight",
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
}
_MAMBA, _ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")  # in older and newer files


class Granite(Llama):
    """Granite 3, dense."""

    architecture = "GraniteForCausalLM"

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        return super().options(settings, fields) | {
            "embedding_scale": number(settings, "embedding_multiplier", 1.0),
            "sm_scale": number(settings, "attention_multiplier", 1.0),
            "residual_scale": number(settings, "residual_multiplier", 1.0),
            "logits_scale": 1.0 / number(settings, "logits_scaling", 1.0),
        }


class GraniteHybrid(Granite, Sparse, Mamba2Hybrid):
    """Granite 4."""

    architecture = "GraniteMoeHybridForCausalLM"
    mlp = stacked_mlp = "block_sparse_moe."
    stacks = ("input_linear.weight", "output_linear.weight")
    router = "router.layer"
    gates_shared_expert = False
    defaults: ClassVar[dict[str, Any]] = (
        Granite.defaults
        | MAMBA2_DEFAULTS
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
        }
    )

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        if count(settings, "num_local_experts", 0, least=0) == 0:  # each layer has only the shared MLP
            settings["intermediate_size"] = count(settings, "shared_intermediate_size")
        return super().config(settings)

    def experts(self, settings: dict[str, Any], fields: dict[str, Any]) -> ExpertsConfig | None:
        if count(settings, "num_local_experts", 0, least=0) == 0:
            return None
        shared = count(settings, "shared_intermediate_size")
        return replace(experts_everywhere(settings, fields), shared_intermediate_size=shared)

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        kind = settings.get("position_embedding_type") or "nope"
        if kind not in ("rope", "nope"):
            raise UnsupportedModelError(f"position_embedding_type must be rope, nope or null, got {shown(kind)}")
        ropes = {} if kind == "rope" else {"layer_ropes": (None,) * fields["num_hidden_layers"]}
        layers = fields["num_hidden_layers"]
        kinds = settings.get("layer_types") or settings.get("layers_block_type") or ["mamba"] * layers
        recurrent = recurrent_layers(kinds, layers, mamba2_sizes(settings), _MAMBA, _ATTENTION)
        return super().options(settings, fields) | ropes | recurrent

    def weights_in(self, config: ModelConfig, tensors: Mapping[str, Stored]) -> WeightMap:
        """Return the weight map for a source; GGUF files split gate and input of the shared MLP."""
        weight_map = super().weights_in(config, tensors)
        if "model.layers.0.mlp.gate_proj.weight" in tensors:
            for index in range(config.num_hidden_layers):
                at = f"layers.{index}."
                dense = Llama.layer_weights(self, config, at, f"model.{at}")
                weight_map |= {f"{at}{param_name}": dense[f"{at}{param_name}"] for param_name in ("gate_up", "down")}
        return weight_map

    def layouts(self, config: ModelConfig) -> tuple[WeightMap, ...]:
        maps = super().layouts(config)
        return *maps, {param_name: tuple(map(_as_in_transformers, parts)) for param_name, parts in maps[0].items()}

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        shared = _shared_weights(config, config.intermediate_size, at, name)
        return super().layer_weights(config, at, name) | shared

    def expert_weights(self, config: ModelConfig, at: str, name: str, *, is_stacked: bool) -> WeightMap:
        """Return the weight map of one layer's router, experts and shared MLP; experts are always stacked."""
        shared = _shared_weights(config, experts_of(config).shared_intermediate_size, at, name)
        return super().expert_weights(config, at, name, is_stacked=True) | shared


def _shared_weights(config: ModelConfig, width: int, at: str, name: str) -> WeightMap:
    hidden, half, mlp = config.hidden_size, Run(width), f"{name}shared_mlp."
    gate_up = product(f"{at}gate_up", {f"{mlp}input_linear": (half, half)}, hidden, split=0)
    return gate_up | product(f"{at}down", {f"{mlp}output_linear": hidden}, width, split=1)


def _as_in_transformers(part: Part) -> Part:
    end = next((end for end in _IN_TRANSFORMERS if part.name.endswith(end)), "")
    return part._replace(name=part.name.removesuffix(end) + _IN_TRANSFORMERS.get(end, ""))
