"""Mistral (Jiang et al., 2023): a Llama without biases whose layers all see a window."""

from __future__ import annotations

from typing import Any, ClassVar

from graphdecode.models.config import count
from graphdecode.models.families.llama import Llama


class Mistral(Llama):
    """Mistral, and all that share its shape."""

    architecture = "MistralForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }

    def biases(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return that no product has a bias, whatever the fields of a config.json say."""
        return {}

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of all layers.

        transformers keeps the keys with `key > query - sliding_window`: that many less one before the query's own.
        """
        size = settings["sliding_window"]
        return (-1 if size is None else count(settings, "sliding_window") - 1,) * layers
