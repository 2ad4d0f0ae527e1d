"""Mixtral (Jiang et al., 2024): a Mistral with experts in every layer."""

from __future__ import annotations

from typing import Any, ClassVar

from graphdecode.models.config import ExpertsConfig, count
from graphdecode.models.families.mistral import Mistral
from graphdecode.models.families.sparse import Sparse


class Mixtral(Sparse, Mistral):
    """Mixtral, and all that share its shape."""

    architecture = "MixtralForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
    }
    mlp = "block_sparse_moe."
    gate_up = ("w1", "w3")
    down = "w2"

    def experts(self, settings: dict[str, Any], fields: dict[str, Any]) -> ExpertsConfig:
        """Return what the experts look like: the intermediate size is that of each."""
        return ExpertsConfig(
            count=count(settings, "num_local_experts"),
            top_k=count(settings, "num_experts_per_tok"),
            intermediate_size=fields["intermediate_size"],
            renormalize=True,
            layers=(True,) * fields["num_hidden_layers"],
        )
