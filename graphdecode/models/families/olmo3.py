"""OLMo 3 (Team OLMo, 2025): OLMo 2 with windows in three of four layers, which keep plain rotary angles."""

from __future__ import annotations

from typing import Any, ClassVar

from graphdecode.models.config import ModelConfig, is_windowed, layer_windows
from graphdecode.models.families.olmo2 import Olmo2
from graphdecode.models.rope import RopeConfig, ropes_by_layer_type

_THETA = 500000.0


class Olmo3(Olmo2):
    """OLMo 3."""

    architecture = "Olmo3ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = Olmo2.defaults | {"sliding_window": 4096}

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        """Take the fields of a config.json."""
        return super().config(settings | ropes_by_layer_type(settings, _THETA, _THETA))

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of each layer."""
        return layer_windows(settings, _pattern(layers))

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """Return which layers have which angles."""
        windowed = is_windowed(settings, _pattern(fields["num_hidden_layers"]))
        local = RopeConfig.from_dict(settings["sliding_rope"], fields["max_position_embeddings"])
        return {"layer_ropes": tuple(local if window else fields["rope"] for window in windowed)}


def _pattern(layers: int) -> list[bool]:
    return [(layer + 1) % 4 != 0 for layer in range(layers)]
