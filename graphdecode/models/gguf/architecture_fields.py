"""What a config.json of one architecture has beside what all have, from the metadata of GGUF.

What a file does not say, such as which layers of Gemma see a window, is what the architecture's models all have.
"""

from __future__ import annotations

from typing import Any

from graphdecode.models.gguf.container import Metadata

_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # these alone scale queries by other than their heads' channels


def mixtral(metadata: Metadata) -> dict[str, Any]:
    """Return how many experts there are."""
    return {
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "sliding_window": None,
    }


def qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    """Return the experts, whose weights add up to one."""
    return {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    """Return the experts, and the one that all tokens share."""
    shared = {"shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length")}
    return qwen3_moe(metadata) | {"norm_topk_prob": False} | shared


def gemma2(metadata: Metadata) -> dict[str, Any]:
    """Return windows in every other layer, and the caps of the logits."""
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        **_windows(metadata, period=2),
        "query_pre_attn_scalar": _gemma_query_scalar(metadata),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def gemma3(metadata: Metadata) -> dict[str, Any]:
    """Return windows in five layers of six, which have a rope of their own."""
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        **_windows(metadata, period=6),
        "query_pre_attn_scalar": _gemma_query_scalar(metadata),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def phi3(metadata: Metadata) -> dict[str, Any]:
    """Return the window of all layers, and the context that the model was first trained for."""
    trained = metadata.count("context_length")
    return {
        "sliding_window": metadata.number("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length", trained),
    }


def olmo3(metadata: Metadata) -> dict[str, Any]:
    """Return windows in three layers of four."""
    return _windows(metadata, period=4)


def smollm3(metadata: Metadata) -> dict[str, Any]:
    """Return that every fourth layer has no rope."""
    layers = metadata.count("block_count")
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)], "use_sliding_window": False}


def granite(metadata: Metadata) -> dict[str, Any]:
    """Return the multipliers."""
    head_dim = metadata.count("embedding_length") / metadata.count("attention.head_count")
    return {
        "attention_multiplier": metadata.number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def gpt_oss(metadata: Metadata) -> dict[str, Any]:
    """Return windows in every other layer, the experts, and what their activation is cut off at."""
    return {
        **mixtral(metadata),
        **_windows(metadata, period=2),
        "swiglu_limit": 7.0,
    }


def _windows(metadata: Metadata, period: int) -> dict[str, Any]:
    """Return which layers see a window: those that the file names, else all but the last of each period."""
    layers = metadata.count("block_count")
    stated = metadata.layers("attention.sliding_window_pattern")
    if not stated:
        period = metadata.count("attention.sliding_window_pattern", period)
        stated = [(layer + 1) % period != 0 for layer in range(layers)]
    return {
        "sliding_window": metadata.number("attention.sliding_window"),
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in stated],
    }


def _gemma_query_scalar(metadata: Metadata) -> float:
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    if metadata.count("block_count") == _GEMMA_27B_LAYERS[metadata.architecture]:
        return hidden // heads
    return metadata.count("attention.key_length", hidden // heads)
