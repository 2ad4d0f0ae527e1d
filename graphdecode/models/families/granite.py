"""Granite 3 (IBM, 2024): a Llama with multipliers on embedding, attention, residual stream and logits."""

from typing import Any

from graphdecode.models.config import number
from graphdecode.models.families.llama import Llama


class Granite(Llama):
    """Granite 3, dense."""

    architecture = "GraniteForCausalLM"

    def options(self, settings: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        return super().options(settings, fields) | {
            "embedding_scale": number(settings, "embedding_multiplier", 1.0),
            "sm_scale": number(settings, "attention_multiplier", 1.0),
            "residual_scale": number(settings, "residual_multiplier", 1.0),
            "logits_scale": 1.0 / number(settings, "logits_scaling", 1.0),
        }
