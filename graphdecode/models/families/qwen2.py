"""Qwen 2 and 2.5 (Yang et al., 2024): a Llama whose QKV product has a bias; windows where they are switched on."""

from typing import Any, ClassVar

from graphdecode.models.config import switched_windows, whole
from graphdecode.models.families.llama import Llama


class Qwen2(Llama):
    """Qwen 2 and 2.5."""

    architecture = "Qwen2ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    }

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of each layer: those from a number on have one."""
        first = whole(settings, "max_window_layers", 28)
        return switched_windows(settings, [layer >= first for layer in range(layers)])

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """Return that the QKV product alone has a bias, whatever the fields of a config.json say."""
        return {"qkv_bias": True}
