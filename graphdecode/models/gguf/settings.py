"""The fields of a config.json that each architecture of GGUF states in its own words."""

from collections.abc import Mapping
from typing import Any

from graphdecode.models.gguf.container import GgufTensor, Metadata

Settings = dict[str, Any]
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # these alone scale queries by other than their heads' channels
_MAVERICK_EXPERTS = 128  # of the one model of Llama 4 without norms of queries and keys


def mixtral_settings(metadata: Metadata) -> Settings:
    """Return the fields of Mixtral."""
    return {
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "sliding_window": None,
    }


def qwen3_moe_settings(metadata: Metadata) -> Settings:
    """Return the fields of Qwen3 with experts."""
    return {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def qwen2_moe_settings(metadata: Metadata) -> Settings:
    """Return the fields of Qwen2 with experts."""
    shared = {"shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length")}
    return qwen3_moe_settings(metadata) | {"norm_topk_prob": False} | shared


def gemma_settings(metadata: Metadata, period: int, attention_cap: float | None, logits_cap: float) -> Settings:
    """Return the fields of Gemma 2 and 3."""
    heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
    scalar = metadata.count("attention.key_length", hidden // heads)
    if metadata.count("block_count") == _GEMMA_27B_LAYERS[metadata.architecture]:
        scalar = hidden // heads
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        **windows(metadata, period),
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


def smollm3_settings(metadata: Metadata) -> Settings:
    """Return the fields of SmolLM3."""
    layers = metadata.count("block_count")
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)], "use_sliding_window": False}


def granite_settings(metadata: Metadata) -> Settings:
    """Return the fields of Granite."""
    head_dim = metadata.count("embedding_length") / metadata.count("attention.head_count")
    return {
        "attention_multiplier": metadata.number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def gpt_oss_settings(metadata: Metadata) -> Settings:
    """Return the fields of gpt-oss."""
    return {**mixtral_settings(metadata), **windows(metadata, period=2), "swiglu_limit": 7.0}


def mamba2_settings(metadata: Metadata) -> Settings:
    """Return the sizes of Mamba2's mixers."""
    heads, channels = metadata.count("ssm.time_step_rank"), metadata.count("ssm.inner_size")
    return {
        "mamba_d_conv": metadata.count("ssm.conv_kernel"),
        "mamba_d_head": channels // heads,
        "mamba_d_ssm": channels,
        "mamba_d_state": metadata.count("ssm.state_size"),
        "mamba_expand": 1,
        "mamba_n_groups": metadata.count("ssm.group_count"),
        "mamba_n_heads": heads,
    }


def _kinds(metadata: Metadata, recurrent: str) -> list[str]:
    """Return the kinds of layers: those that have no heads of keys are recurrent."""
    heads = metadata.layers("attention.head_count_kv") or [0] * metadata.count("block_count")
    return ["full_attention" if count else recurrent for count in heads]


def mamba2_alone_settings(metadata: Metadata) -> Settings:
    """Return the fields of Mamba2 models."""
    sizes, eps = mamba2_settings(metadata), metadata.number("attention.layer_norm_rms_epsilon")
    names = {"conv_kernel": "d_conv", "head_dim": "d_head", "n_groups": "n_groups", "state_size": "d_state"}
    renamed = {theirs: sizes[f"mamba_{ours}"] for theirs, ours in names.items()}
    own = {"mamba_d_ssm": sizes["mamba_d_ssm"], "num_heads": sizes["mamba_n_heads"]}
    return renamed | own | {"layer_norm_epsilon": eps, "num_key_value_heads": 1, "num_attention_heads": 1}


def falcon_h1_settings(metadata: Metadata) -> Settings:
    """Return its sizes; its multipliers are part of the weights."""
    return mamba2_settings(metadata) | {"mamba_norm_before_gate": False}


def granite_hybrid_settings(metadata: Metadata) -> Settings:
    """Return the fields of Granite 4."""
    sizes = mamba2_settings(metadata) | {"layer_types": _kinds(metadata, "mamba"), "num_local_experts": 0}
    return granite_settings(metadata) | sizes | {"shared_intermediate_size": metadata.most("feed_forward_length")}


def bamba_settings(metadata: Metadata) -> Settings:
    """Return the fields of Bamba."""
    kinds = _kinds(metadata, "mamba")
    return mamba2_settings(metadata) | {
        "attn_layer_indices": [layer for layer, kind in enumerate(kinds) if kind != "mamba"]
    }


def nemotron_h_settings(metadata: Metadata) -> Settings:
    """Return the fields of Nemotron-H."""
    sizes, kinds = mamba2_settings(metadata), _kinds(metadata, "mamba")
    widths = metadata.layers("feed_forward_length") or [0] * len(kinds)
    kinds = ["mlp" if width else kind for kind, width in zip(kinds, widths, strict=False)]
    return {
        "conv_kernel": sizes["mamba_d_conv"],
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "layers_block_type": kinds,
        "mamba_head_dim": sizes["mamba_d_head"],
        "mamba_num_heads": sizes["mamba_n_heads"],
        "n_groups": sizes["mamba_n_groups"],
        "ssm_state_size": sizes["mamba_d_state"],
    }


def lfm2_settings(metadata: Metadata) -> Settings:
    """Return the fields of LFM2."""
    return {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.count("shortconv.l_cache"),
        "layer_types": _kinds(metadata, "conv"),
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
    }


def qwen35_settings(metadata: Metadata) -> Settings:
    """Return the fields of Qwen3.5."""
    heads = metadata.count("ssm.time_step_rank")
    return {
        "full_attention_interval": metadata.count("full_attention_interval", 4),
        "linear_conv_kernel_dim": metadata.count("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.count("ssm.state_size"),
        "linear_num_key_heads": metadata.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": metadata.count("ssm.inner_size") // heads,
    }


def qwen3_next_settings(metadata: Metadata) -> Settings:
    """Return the fields of Qwen3-Next."""
    shared = {"shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length")}
    return qwen3_moe_settings(metadata) | qwen35_settings(metadata) | shared


def gemma4_settings(metadata: Metadata) -> Settings:
    """Return the fields of Gemma 4."""
    of_windows = windows(metadata, period=6)
    kinds = of_windows["layer_types"]
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
        **of_windows,
        **of_experts,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        "global_head_dim": metadata.count("attention.key_length"),
        "head_dim": metadata.count("attention.key_length_swa"),
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": metadata.most("embedding_length_per_layer_input", 0),
        "intermediate_size": min(widths),
        "num_global_key_value_heads": of_kind.get("full_attention"),
        "num_key_value_heads": of_kind.get("sliding_attention", heads[0]),
        "num_kv_shared_layers": metadata.most("attention.shared_kv_layers", 0),
        "use_double_wide_mlp": len(set(widths)) > 1,
    }


def gemma4_of_tensors(stored: Mapping[str, GgufTensor]) -> Settings:
    """Return the fields of Gemma 4 that tensors state."""
    keys = [name for name in stored if name.endswith(".attn_k.weight")]
    inputs = stored.get("per_layer_token_embd.weight", stored["token_embd.weight"])
    return {
        "attention_k_eq_v": any(name.replace("attn_k", "attn_v") not in stored for name in keys),
        "vocab_size_per_layer_input": inputs.shape[0],
    }


def llama4_settings(metadata: Metadata) -> Settings:
    """Return its settings; a file does not say those of chunks and temperatures, which all models have."""
    experts = metadata.count("expert_count")
    return {
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "interleave_moe_layer_step": metadata.count("interleave_moe_layer_step"),
        "intermediate_size": metadata.count("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.count("feed_forward_length"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "num_local_experts": experts,
        "use_qk_norm": experts != _MAVERICK_EXPERTS,
    }


def deepseek_settings(metadata: Metadata) -> Settings:
    """Return sizes of latent attention and of experts; older files have the keys' own sizes in place of the latent."""
    heads, rotated = metadata.count("attention.head_count"), metadata.count("rope.dimension_count")
    key_dim, value_dim = (
        metadata.count(f"attention.{kind}_length_mla", metadata.count(f"attention.{kind}_length"))
        for kind in ("key", "value")
    )
    groups = metadata.most("expert_group_count", 1)
    return {
        "first_k_dense_replace": metadata.most("leading_dense_block_count", 0),
        "kv_lora_rank": metadata.count("attention.kv_lora_rank"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "n_group": groups,
        "n_routed_experts": metadata.count("expert_count"),
        "n_shared_experts": metadata.most("expert_shared_count", 0),
        "norm_topk_prob": metadata.whole(f"{metadata.architecture}.expert_weights_norm", bool, False),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "num_key_value_heads": heads,
        "q_lora_rank": metadata.most("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": key_dim - rotated,
        "qk_rope_head_dim": rotated,
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "topk_group": metadata.most("expert_group_used_count", 1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "v_head_dim": value_dim,
    }


def windows(metadata: Metadata, period: int) -> Settings:
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
