"""Mistral (Jiang et al., 2023): a Llama without biases whose layers all see a window."""

from typing import Any, ClassVar

from graphdecode.models.config import layer_windows
from graphdecode.models.families.llama import Llama


class Mistral(Llama):
    """Mistral, and all that share its shape."""

    architecture = "MistralForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of all layers, whatever `layer_types` says."""
        return layer_windows({"sliding_window": settings["sliding_window"]}, [True] * layers)

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """Return that no product has a bias, whatever the fields of a config.json say."""
        return {}
