"""SmolLM3 (Hugging Face, 2025): a Llama whose every fourth layer has no positions."""

from typing import Any, ClassVar

from graphdecode.errors import shown
from graphdecode.models.config import UnsupportedModelError, all_but_every, count, switched_windows
from graphdecode.models.families.llama import Llama
from graphdecode.models.rope import RopeConfig


class SmolLM3(Llama):
    """SmolLM3."""

    architecture = "SmolLM3ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    }

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of each layer: layers without a rotary embedding have one."""
        return switched_windows(settings, [not rotated for rotated in has_rope(settings, layers)])

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        return super().options(settings, fields) | {"layer_ropes": ropes_or_none(settings, fields)}


def ropes_or_none(settings: dict[str, Any], fields: dict[str, Any]) -> tuple[RopeConfig | None, ...]:
    """Return the rotary embedding of each layer, or None."""
    return tuple(fields["rope"] if rotated else None for rotated in has_rope(settings, fields["num_hidden_layers"]))


def has_rope(settings: dict[str, Any], layers: int) -> list[bool]:
    """Return whether each layer has a rotary embedding; in `no_rope_layers`, 1 means that it has."""
    flags = settings.get("no_rope_layers")
    if not flags and flags != 0:
        return all_but_every(count(settings, "no_rope_layer_interval", 4), layers)
    if not isinstance(flags, list) or len(flags) < layers or any(rotated not in (0, 1) for rotated in flags):
        raise UnsupportedModelError(f"no_rope_layers must be {layers} zeros and ones, got {shown(flags)}")
    return [bool(rotated) for rotated in flags[:layers]]
