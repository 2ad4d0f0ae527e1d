"""Qwen 3 with experts (Yang et al., 2025): many small ones, none of them shared."""

from typing import Any, ClassVar

from graphdecode.models.config import switched_windows
from graphdecode.models.families.qwen3 import Qwen3
from graphdecode.models.families.sparse import Sparse


class Qwen3Moe(Sparse, Qwen3):
    """Qwen 3, with experts."""

    architecture = "Qwen3MoeForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "decoder_sparse_step": 1,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
    }

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of all layers, whatever `layer_types` says."""
        return switched_windows({**settings, "layer_types": None}, [True] * layers)
