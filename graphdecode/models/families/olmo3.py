"""OLMo 3 (Team OLMo, 2025): OLMo 2 with windows in three of four layers, which keep plain rotary angles."""

from typing import Any, ClassVar

from graphdecode.models.config import ModelConfig, all_but_every, layer_ropes, layer_windows
from graphdecode.models.families.olmo2 import Olmo2
from graphdecode.models.rope import ropes_by_layer_type

_THETA = 500000.0


class Olmo3(Olmo2):
    """OLMo 3."""

    architecture = "Olmo3ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = Olmo2.defaults | {"sliding_window": 4096}

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        return super().config(settings | ropes_by_layer_type(settings, _THETA, _THETA))

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        return layer_windows(settings, all_but_every(4, layers))

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        pattern = all_but_every(4, fields["num_hidden_layers"])
        return super().options(settings, fields) | layer_ropes(settings, fields, pattern)
