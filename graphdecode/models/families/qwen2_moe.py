"""Qwen 1.5 and 2 with experts (Yang et al., 2024): small ones, and a shared one whose share a gate decides."""

from typing import Any, ClassVar

from graphdecode.models.config import flag, switched_windows, whole
from graphdecode.models.families.qwen2 import Qwen2
from graphdecode.models.families.sparse import Sparse


class Qwen2Moe(Sparse, Qwen2):
    """Qwen 1.5 and 2, with experts."""

    architecture = "Qwen2MoeForCausalLM"
    defaults: ClassVar[dict[str, Any]] = Qwen2.defaults | {
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "shared_expert_intermediate_size": 5632,
    }

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of each layer: every other one of the first layers has one."""
        first = whole(settings, "max_window_layers", 28)
        return switched_windows(settings, [layer % 2 == 0 and layer < first for layer in range(layers)])

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        return super().options(settings, fields) | {"qkv_bias": flag(settings, "qkv_bias", True)}
