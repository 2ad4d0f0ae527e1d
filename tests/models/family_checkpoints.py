"""Small random checkpoints of every supported family and rope type, as transformers writes them."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from graphdecode.models import resolve_model_path

SMALL = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 40}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 20, "hidden_size_per_layer_input": 0}
GEMMA4_INPUTS = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 259,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 20.0,
}
GEMMA4_EXPERTS = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "attention_bias": True,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
    "rope_parameters": TWO_ROPES,
    "tie_word_embeddings": False,
}
LLAMA4 = {
    "head_dim": 16,
    "num_local_experts": 6,
    "intermediate_size_mlp": 80,
    "attention_chunk_size": 24,
    "no_rope_layer_interval": 2,
    "floor_scale": 16,
    "rope_parameters": LLAMA3,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
DEEPSEEK_V2 = {
    "kv_lora_rank": 48,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "n_shared_experts": 2,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 2.0,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
}
LLAMA4_DENSE = {
    "num_hidden_layers": 4,
    "interleave_moe_layer_step": 2,
    "num_experts_per_tok": 2,
    "use_qk_norm": False,
    "attn_temperature_tuning": False,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "chunked_attention"],
}
GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 3.0}
GRANITE_4 = GRANITE | {
    "layer_types": ["full_attention"] * 3,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "mamba_n_heads": 4,
}
RECURRENT_AROUND = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
BAMBA = MAMBA | {"attn_layer_indices": [1]}
FALCON_MULTIPLIERS = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_rms_norm": True,
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.4, 0.25, 0.8, 0.5, 0.35],
    "mlp_multipliers": [0.9, 0.6],
}
NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
}
DELTA_NET = RECURRENT_AROUND | {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 24,
}
OLMO3_ROPES = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}


def longrope(original: int, pairs: int) -> dict[str, Any]:
    """LongRoPE of a model that was first trained for `original` tokens: the short factors are for no more than that."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(pairs)], "long_factor": [1.0 + i for i in range(pairs)]}
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    return {"rope_parameters": scaling, "original_max_position_embeddings": original}


# name: transformers' classes without "ForCausalLM" and "Config", what the configuration has beside SMALL
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("Llama", {"num_key_value_heads": 4}),
    "llama-3": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-3.2": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-factors": (
        "Llama",
        {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}},
    ),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24, "hidden_act": "gelu_pytorch_tanh"}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen2.5-yarn-tied": ("Qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": 20}),
    "qwen2-moe": (
        "Qwen2Moe",
        EXPERTS  # the router, with the shared expert's gate, gives as many numbers as that expert has channels
        | {"num_experts": 15, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]}
        | {"use_sliding_window": True, "sliding_window": 12},
    ),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 20}
        | ({"swiglu_limit": 1.5} if hasattr(transformers.GptOssConfig, "swiglu_limit") else {})  # before it was 7
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 20}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 256, "sliding_window": 20, "rope_parameters": TWO_ROPES, "layer_types": GEMMA3_LAYERS},
    ),
    "gemma3-cap": ("Gemma3", {"head_dim": 16, "final_logit_softcapping": 8.0}),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4-inputs": ("Gemma4", GEMMA4 | GEMMA4_INPUTS),
    "gemma4-experts": ("Gemma4", GEMMA4 | GEMMA4_EXPERTS),
    "llama4": ("Llama4", LLAMA4),
    "llama4-dense": ("Llama4", LLAMA4 | LLAMA4_DENSE),
    "deepseek-v2": ("DeepseekV2", LATENT | DEEPSEEK_V2),
    "deepseek-v3": ("DeepseekV3", LATENT | {"attention_bias": True}),
    "glm-4.7-flash": ("Glm4MoeLite", LATENT | {"n_group": 1, "topk_group": 1, "rope_interleave": False}),
    "phi3": ("Phi3", {"sliding_window": 20}),
    "phi3-longrope-short": ("Phi3", longrope(256, 8)),
    "phi4-longrope-long": ("Phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True, **longrope(8, 6)}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 20, "rope_parameters": OLMO3_ROPES, "num_hidden_layers": 4}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "granite": ("Granite", GRANITE | {"mlp_bias": True}),
    "granite-4": ("GraniteMoeHybrid", GRANITE_4 | {"position_embedding_type": "rope"}),
    "granite-4-nope": ("GraniteMoeHybrid", GRANITE_4),
    "granite-4-mamba": ("GraniteMoeHybrid", GRANITE_4 | MAMBA | RECURRENT_AROUND),
    "granite-4-experts": (
        "GraniteMoeHybrid",
        GRANITE_4
        | MAMBA
        | RECURRENT_AROUND
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 40}
        | {"position_embedding_type": "rope", "attention_bias": True, "tie_word_embeddings": True}
        | {"mamba_n_groups": 1, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True},
    ),
    "falcon-h1": ("FalconH1", MAMBA | {"mamba_d_ssm": None}),
    "falcon-h1-multipliers": ("FalconH1", MAMBA | FALCON_MULTIPLIERS),
    "falcon-h1-biases": (
        "FalconH1",
        MAMBA
        | FALCON_MULTIPLIERS
        | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True}
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False, "mamba_d_conv": 3}
        | {"tie_word_embeddings": True},
    ),
    "nemotron-h": ("NemotronH", NEMOTRON_H),
    "nemotron-h-biases": (
        "NemotronH",
        NEMOTRON_H
        | {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "time_step_min": 0.5}
        | {"layers_block_type": ["mlp", "full_attention", "mlp", "linear_attention"]},
    ),
    "olmo-hybrid": ("OlmoHybrid", {}),
    "olmo-hybrid-nope": (
        "OlmoHybrid",
        DELTA_NET
        | {"linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 3, "attention_bias": True, "head_dim": 16}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "bamba": ("Bamba", BAMBA),
    "bamba-biases": (
        "Bamba",
        BAMBA
        | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False}
        | {"time_step_limit": (0.4, 0.9), "tie_word_embeddings": True},
    ),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}),
    "mamba2-biases": (
        "Mamba2",
        {"num_heads": 4, "head_dim": 16, "expand": 1, "state_size": 16, "n_groups": 1, "conv_kernel": 3}
        | {"use_bias": True, "use_conv_bias": False, "time_step_limit": (0.4, 0.9), "tie_word_embeddings": True},
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 24, "block_ffn_dim_multiplier": 1.3},
    ),
    "lfm2-biases": (
        "Lfm2",
        {"full_attn_idxs": [0], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}
        | {"tie_word_embeddings": False},
    ),
    "qwen3.5": ("Qwen3_5", DELTA_NET),
    "qwen3.5-tied": (
        "Qwen3_5",
        DELTA_NET
        | {
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        }
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    ),
    "qwen3-next": (
        "Qwen3Next",
        DELTA_NET | EXPERTS | {"num_experts": 15, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]},
    ),
}
SCALES = ("scale", "layer_scalar")  # around 1
OFFSET_NORMS = ("gemma2", "gemma3", "qwen3.5", "qwen3-next")  # whose gains are kept as their distance from 1


def save_checkpoint(name: str, folder: Path, **options: Any) -> Path:
    """Write a family's random checkpoint, with the demo's tokenizer beside it."""
    model_name, changes = FAMILIES[name]
    torch.manual_seed(sum(map(ord, name)))
    model_class = getattr(transformers, f"{model_name}ForCausalLM")
    model = model_class(model_class.config_class(**(SMALL | changes)))
    for tensor_name, tensor in model.state_dict().items():
        if tensor_name.endswith(("bias", "norm.weight", "norm_1.weight", "norm_2.weight", "sinks", "A_log", *SCALES)):
            is_gain = ("norm" in tensor_name and not name.startswith(OFFSET_NORMS)) or tensor_name.endswith(SCALES)
            torch.nn.init.normal_(tensor, float(is_gain), 0.2)
    model.save_pretrained(folder, **options)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model_path("demo") / file, folder / file)
    return folder


def edit_config(folder: Path, edit: Callable[[dict], None]) -> None:
    """Change a checkpoint's config.json in place."""
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    edit(settings)
    path.write_text(json.dumps(settings))


@contextmanager
def edited_tensors(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Change a checkpoint's tensors in place, within a `with` block."""
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
