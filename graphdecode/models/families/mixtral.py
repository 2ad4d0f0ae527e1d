"""Mixtral (Jiang et al., 2024): a Mistral with experts in every layer."""

from typing import Any, ClassVar

from graphdecode.models.config import ExpertsConfig
from graphdecode.models.families.mistral import Mistral
from graphdecode.models.families.sparse import Sparse, experts_everywhere


class Mixtral(Sparse, Mistral):
    """Mixtral, and all that share its shape."""

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
