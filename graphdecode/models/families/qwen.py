"""Qwen 2 (Yang et al., 2024): a Llama with a QKV bias. Qwen 3 (2025): queries and keys are normed instead.

Both have versions with many small experts, in Qwen 2 with a gated shared expert.
"""

from typing import Any, ClassVar

from graphdecode.models.config import count, flag, switched_windows
from graphdecode.models.families.llama import ATTENTION_BIASES, Biases, Llama
from graphdecode.models.families.sparse import Sparse


class Qwen2(Llama):
    """Qwen 2 and 2.5."""

    architecture = "Qwen2ForCausalLM"
    biases: ClassVar[Biases] = {"qkv_bias": True}
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    }

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of each layer: with `use_sliding_window`, layers from `max_window_layers` on have one."""
        first = count(settings, "max_window_layers", 28, least=0)
        return switched_windows(settings, [layer >= first for layer in range(layers)])


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
        """Return the window of each layer: every other one of the first `max_window_layers` has one."""
        first = count(settings, "max_window_layers", 28, least=0)
        return switched_windows(settings, [layer % 2 == 0 and layer < first for layer in range(layers)])

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        return super().options(settings, fields) | {"qkv_bias": flag(settings, "qkv_bias", True)}


class Qwen3(Qwen2):
    """Qwen 3, dense."""

    architecture = "Qwen3ForCausalLM"
    biases = ATTENTION_BIASES
    has_head_norms = True
    defaults: ClassVar[dict[str, Any]] = Qwen2.defaults | {"head_dim": 128}


class Qwen3Moe(Sparse, Qwen3):
    """Qwen 3, with experts."""

    architecture = "Qwen3MoeForCausalLM"
    defaults: ClassVar[dict[str, Any]] = Qwen2.defaults | {
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
    }

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of all layers; `layer_types` is ignored."""
        return switched_windows({**settings, "layer_types": None}, [True] * layers)
