"""SmolLM3 (Hugging Face, 2025): a Llama of which every fourth layer knows nothing of positions."""

from __future__ import annotations

from typing import Any, ClassVar

from graphdecode.errors import shown
from graphdecode.models.config import UnsupportedModelError, count, flag, layer_windows
from graphdecode.models.families.llama import Llama


class SmolLM3(Llama):
    """SmolLM3."""

    architecture = "SmolLM3ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    }

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of each layer: where windows are switched on, and the layer is one of those."""
        if not flag(settings, "use_sliding_window", False):
            return (-1,) * layers
        return layer_windows(settings, [not rotated for rotated in _has_rope(settings, layers)])

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """Return which layers have no rotary embedding."""
        has_rope = _has_rope(settings, fields["num_hidden_layers"])
        return {"layer_ropes": tuple(fields["rope"] if rotated else None for rotated in has_rope)}


def _has_rope(settings: dict[str, Any], layers: int) -> list[bool]:
    """Return for each layer whether it has a rotary embedding; the field's name says the opposite of what it holds."""
    given = settings.get("no_rope_layers")
    if given is None:
        every = count(settings, "no_rope_layer_interval", 4)
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if not isinstance(given, list) or len(given) < layers or any(rotated not in (0, 1) for rotated in given):
        raise UnsupportedModelError(f"no_rope_layers must be {layers} zeros and ones, got {shown(given)}")
    return [bool(rotated) for rotated in given[:layers]]
