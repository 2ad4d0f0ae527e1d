"""Mistral (Jiang et al., 2023): a Llama without biases, with a window in all layers; and Mixtral, with experts."""

from typing import Any, ClassVar

from graphdecode.models.config import ExpertsConfig, layer_windows
from graphdecode.models.families.llama import Biases, Llama
from graphdecode.models.families.sparse import Sparse, experts_everywhere


class Mistral(Llama):
    """Mistral, and models of the same architecture."""

    architecture = "MistralForCausalLM"
    biases: ClassVar[Biases] = {}
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }

    def windows(self, settings: dict[str, Any], layers: int) -> tuple[int, ...]:
        """Return the window of all layers, whatever `layer_types` says."""
        return layer_windows({"sliding_window": settings["sliding_window"]}, [True] * layers)


class Mixtral(Sparse, Mistral):
    """Mixtral: experts in every layer."""

    architecture = "MixtralForCausalLM"
    defaults: ClassVar[dict[str, Any]] = Mistral.defaults | {
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
    }
    mlp = "block_sparse_moe."
    gate_up = ("w1", "w3")
    down = "w2"

    def experts(self, settings: dict[str, Any], fields: dict[str, Any]) -> ExpertsConfig:
        return experts_everywhere(settings, fields)
