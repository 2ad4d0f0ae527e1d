"""Qwen 2 and 2.5 (Yang et al., 2024): a Llama whose QKV product has a bias; windows where they are switched on."""

from __future__ import annotations

from typing import Any, ClassVar

from graphdecode.errors import shown
from graphdecode.models.config import UnsupportedModelError, count, flag, whole
from graphdecode.models.families.llama import Llama

_LAYER_TYPES = ("full_attention", "sliding_attention")


class Qwen2(Llama):
    """Qwen 2 and 2.5."""

    architecture = "Qwen2ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    }

    def biases(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return that the QKV product alone has a bias, whatever the fields of a config.json say."""
        return {"qkv_bias": True}

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of each layer: where windows are switched on, and the layer is one of those.

        transformers keeps the keys with `key > query - sliding_window`: that many less one before the query's own.
        """
        if not flag(settings, "use_sliding_window", False) or settings.get("sliding_window") is None:
            return (-1,) * layers
        size = count(settings, "sliding_window")
        first = whole(settings, "max_window_layers", 28)
        kinds = settings.get("layer_types") or [_LAYER_TYPES[layer >= first] for layer in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _LAYER_TYPES for kind in kinds):
            raise UnsupportedModelError(
                f"layer_types must name {layers} layers, each one of {', '.join(_LAYER_TYPES)}, got {shown(kinds)}"
            )
        return tuple(size - 1 if kind == "sliding_attention" else -1 for kind in kinds)
