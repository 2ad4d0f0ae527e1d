"""The fields of a config.json that an architecture of GGUF states in its own words, beyond the tables of its row.

A row's `counts` and `numbers` name fields of the metadata; what is here is computed from several of them.
"""

from typing import Any

from graphdecode.models.fields import UnsupportedModelError
from graphdecode.models.gguf.container import Metadata

Settings = dict[str, Any]
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # these alone scale queries by other than their heads' channels
_WINDOWS = {"gemma2": 4096, "gemma3": 0}  # llama.cpp's defaults; 0: all layers see all tokens
_MAVERICK_EXPERTS = 128  # of the one model of Llama 4 without norms of queries and keys


def gemma_settings(metadata: Metadata, attention_cap: float | None, logits_cap: float) -> Settings:
    """Return the fields of Gemma 2 and 3."""
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    scalar = metadata.count("attention.key_length", hidden // heads)
    if metadata.num_layers == _GEMMA_27B_LAYERS[metadata.architecture]:
        scalar = hidden // heads
    return {
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": attention_cap and metadata.number("attn_logit_softcapping", attention_cap),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", logits_cap) or None,
    }


def phi3_settings(metadata: Metadata) -> Settings:
    """Return the fields of Phi-3."""
    trained = metadata.count("context_length")
    return {
        "sliding_window": metadata.number("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length", trained),
    }


def scale(metadata: Metadata, name: str) -> float:
    """Return a factor of which 0 means none, as in llama.cpp."""
    return float(metadata.number(name, 0.0)) or 1.0


def norm_eps(metadata: Metadata) -> float:
    """Return the epsilon of norms; Nemotron-H's files may have it by another name alone."""
    name = "attention.layer_norm_rms_epsilon"
    if metadata.architecture == "nemotron_h" and not metadata.has(name):
        name = "attention.layer_norm_epsilon"
    return float(metadata.number(name))


def rotates(metadata: Metadata) -> bool:
    """Return whether Granite's attention has a rotary embedding: the field says that, and no more."""
    return bool(metadata.whole(f"{metadata.architecture}.rope.scaling.finetuned", bool, True))


def granite_settings(metadata: Metadata) -> Settings:
    """Return Granite's multipliers."""
    if metadata.architecture == "granite" and not rotates(metadata):
        raise UnsupportedModelError("granite.rope.scaling.finetuned False is not supported; supported is True")
    if metadata.architecture == "granite" and metadata.number("logit_scale", 1.0) == 0:  # llama.cpp divides by it
        raise UnsupportedModelError("granite.logit_scale must not be 0")
    channels = metadata.count("embedding_length") // metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", channels)
    return {
        "attention_multiplier": metadata.number("attention.scale", 0.0) or head_dim**-0.5,
        "embedding_multiplier": scale(metadata, "embedding_scale"),
        "residual_multiplier": scale(metadata, "residual_scale"),
        "logits_scaling": scale(metadata, "logit_scale"),
    }


def is_bamba(metadata: Metadata) -> bool:
    """Whether a hybrid Granite has a rotary embedding and no multipliers."""
    scales = [scale(metadata, f"{name}_scale") for name in ("embedding", "residual", "logit")]
    return rotates(metadata) and set(scales) == {1.0} and metadata.number("attention.scale", 0.0) == 0


def expert_widths(metadata: Metadata) -> Settings:
    """Return the widths of Qwen's experts, which a file need not state."""
    width = metadata.most("feed_forward_length", 0)
    defaults = {"moe_intermediate_size": ("expert", width // metadata.count("expert_used_count"))}
    if metadata.architecture != "qwen3moe":
        defaults["shared_expert_intermediate_size"] = ("expert_shared", width)
    widths = {}
    for name, (kind, default) in defaults.items():
        field = f"{kind}_feed_forward_length"
        is_stated = metadata.has(field) and metadata.number(field) != 0
        widths[name] = metadata.count(field) if is_stated else default
    return widths


def _kinds(metadata: Metadata, recurrent: str) -> list[str]:
    """Return the kinds of layers: those that have no heads of keys are recurrent."""
    heads = metadata.layers("attention.head_count_kv") or [0] * metadata.num_layers
    return ["full_attention" if count else recurrent for count in heads]


def granite_hybrid_settings(metadata: Metadata) -> Settings:
    """Return the fields of Granite 4."""
    return granite_settings(metadata) | {
        "layer_types": _kinds(metadata, "mamba"),
        "position_embedding_type": "rope" if rotates(metadata) else "nope",
        "shared_intermediate_size": metadata.most("feed_forward_length"),
    }


def bamba_settings(metadata: Metadata) -> Settings:
    """Return the layers of Bamba that attend."""
    kinds = _kinds(metadata, "mamba")
    return {"attn_layer_indices": [layer for layer, kind in enumerate(kinds) if kind != "mamba"]}


def nemotron_h_settings(metadata: Metadata) -> Settings:
    """Return the kinds of Nemotron-H's layers, the channels of a head of Mamba2, and the norms' epsilon."""
    kinds = _kinds(metadata, "mamba")
    widths = metadata.layers("feed_forward_length") or [0] * len(kinds)
    kinds = ["mlp" if width else kind for kind, width in zip(kinds, widths, strict=False)]
    head_dim = metadata.count("ssm.inner_size") // metadata.count("ssm.time_step_rank")
    return {"layers_block_type": kinds, "mamba_head_dim": head_dim, "layer_norm_epsilon": norm_eps(metadata)}


def lfm2_settings(metadata: Metadata) -> Settings:
    """Return the kinds of LFM2's layers."""
    if window := metadata.number("attention.sliding_window", 0):
        raise UnsupportedModelError(f"lfm2.attention.sliding_window {window} is not supported; supported is 0")
    return {"layer_types": _kinds(metadata, "conv")}


def qwen35_settings(metadata: Metadata) -> Settings:
    """Return the fields of delta nets, and those of Qwen3-Next's experts."""
    recurrent = metadata.layers("attention.recurrent_layers")
    kinds = ["linear_attention" if each else "full_attention" for each in recurrent]
    of_experts = expert_widths(metadata) if metadata.architecture == "qwen3next" else {}
    return (
        ({"layer_types": kinds} if kinds else {})
        | of_experts
        | {
            "full_attention_interval": metadata.count("full_attention_interval", 4),
            "linear_value_head_dim": metadata.count("ssm.inner_size") // metadata.count("ssm.time_step_rank"),
        }
    )


def gemma4_settings(metadata: Metadata) -> Settings:
    """Return the fields of Gemma 4."""
    kinds = windows(metadata, period=6)["layer_types"]
    heads = metadata.layers("attention.head_count_kv") or [metadata.count("attention.head_count_kv")] * len(kinds)
    of_kind = dict(zip(kinds, heads, strict=False))
    widths = metadata.layers("feed_forward_length") or [metadata.count("feed_forward_length")]
    of_experts: Settings = {"enable_moe_block": metadata.most("expert_count", 0) > 0}
    if of_experts["enable_moe_block"]:
        of_experts |= {
            "num_experts": metadata.count("expert_count"),
            "top_k_experts": metadata.count("expert_used_count"),
            "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        }
    return {
        **of_experts,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": metadata.most("embedding_length_per_layer_input", 0),
        "intermediate_size": min(widths),
        "num_global_key_value_heads": of_kind.get("full_attention"),
        "num_key_value_heads": of_kind.get("sliding_attention", heads[0]),
        "num_kv_shared_layers": metadata.most("attention.shared_kv_layers", 0),
        "use_double_wide_mlp": len(set(widths)) > 1,
    }


def llama4_settings(metadata: Metadata) -> Settings:
    """Return whether queries and keys are normed; a file does not say that, nor chunks and temperatures.

    A window of 0 means neither chunks nor temperatures, and positions in all layers.
    """
    layers = metadata.num_layers
    full_attention: Settings = {
        "attention_chunk_size": None,
        "attn_temperature_tuning": False,
        "layer_types": ["full_attention"] * layers,
        "no_rope_layers": [1] * layers,
    }
    is_full = metadata.has("attention.sliding_window") and metadata.number("attention.sliding_window") == 0
    return (full_attention if is_full else {}) | {"use_qk_norm": metadata.count("expert_count") != _MAVERICK_EXPERTS}


def deepseek_settings(metadata: Metadata) -> Settings:
    """Return sizes of latent attention and of experts; older files have the keys' own sizes in place of the latent."""
    key_dim, value_dim = (
        metadata.count(f"attention.{kind}_length_mla", metadata.count(f"attention.{kind}_length"))
        for kind in ("key", "value")
    )
    groups = metadata.most("expert_group_count", 1)
    return {
        "routed_scaling_factor": scale(metadata, "expert_weights_scale"),
        "first_k_dense_replace": metadata.most("leading_dense_block_count", 0),
        "n_group": groups,
        "n_shared_experts": metadata.most("expert_shared_count", 0),
        "norm_topk_prob": metadata.whole(f"{metadata.architecture}.expert_weights_norm", bool, False),
        "q_lora_rank": metadata.most("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": key_dim - metadata.count("rope.dimension_count"),
        "topk_group": metadata.most("expert_group_used_count", 1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "v_head_dim": value_dim,
    }


def windows(metadata: Metadata, period: int) -> Settings:
    """Return which layers see a window: those that the file names, else all but the last of each period."""
    layers = metadata.num_layers
    stated = metadata.layers("attention.sliding_window_pattern")
    if not stated:
        period = metadata.count("attention.sliding_window_pattern", period)
        stated = [(layer + 1) % period != 0 for layer in range(layers)]
    size = metadata.number("attention.sliding_window", _WINDOWS.get(metadata.architecture))
    if not size:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    return {
        "sliding_window": size,
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in stated],
    }
