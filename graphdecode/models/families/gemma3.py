"""Gemma 3 (Gemma Team, 2025), text: five layers with a window to one without, and rotary angles for each kind."""

from typing import Any, ClassVar

from graphdecode.models.config import ModelConfig, all_but_every, count, layer_ropes, layer_windows
from graphdecode.models.families.gemma2 import Gemma2
from graphdecode.models.families.qwen3 import head_norms
from graphdecode.models.rope import ropes_by_layer_type
from graphdecode.models.weight_map import WeightMap


class Gemma3(Gemma2):
    """Gemma 3's decoder; queries and keys are normed per head."""

    architecture = "Gemma3ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = Gemma2.defaults | {
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        local_theta = settings.get("rope_local_base_freq", 1e4)  # in older files
        return super().config(settings | ropes_by_layer_type(settings, 1e6, local_theta))

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        return layer_windows(settings, _pattern(settings, layers))

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        pattern = _pattern(settings, fields["num_hidden_layers"])
        return super().options(settings, fields) | layer_ropes(settings, fields, pattern)

    def layer_weights(self, config: ModelConfig, at: str, name: str) -> WeightMap:
        return super().layer_weights(config, at, name) | head_norms(config, at, name)


def _pattern(settings: dict[str, Any], layers: int) -> list[bool]:
    return all_but_every(count(settings, "sliding_window_pattern", 6), layers)
