"""The sizes of twelve models that many people run, from their published configurations, with four layers of each."""

from __future__ import annotations

from typing import Any

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def sizes(
    architecture: str, vocab: int, hidden: int, feed_forward: int, heads: int, kv_heads: int, **others: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
        **others,
    }


_TIED = {"tie_word_embeddings": True}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, **_TIED, **_SLIDING}
_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_GPT_OSS = {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0}

KNOWN_MODELS = {
    "Llama-3.2-1B": sizes("LlamaForCausalLM", 128256, 2048, 8192, 32, 8, head_dim=64, rope_parameters=_LLAMA3, **_TIED),
    "Llama-3.1-8B": sizes("LlamaForCausalLM", 128256, 4096, 14336, 32, 8, rope_parameters=_LLAMA3),
    "Llama-3.1-70B": sizes("LlamaForCausalLM", 128256, 8192, 28672, 64, 8, rope_parameters=_LLAMA3),
    "Mistral-7B-v0.3": sizes("MistralForCausalLM", 32768, 4096, 14336, 32, 8, rope_theta=1e6),
    "Mixtral-8x7B": sizes(
        "MixtralForCausalLM", 32000, 4096, 14336, 32, 8, num_local_experts=8, num_experts_per_tok=2, rope_theta=1e6
    ),
    "Qwen2.5-7B": sizes("Qwen2ForCausalLM", 152064, 3584, 18944, 28, 4, rope_theta=1e6),
    "Qwen3-0.6B": sizes("Qwen3ForCausalLM", 151936, 1024, 3072, 16, 8, head_dim=128, rope_theta=1e6, **_TIED),
    "Qwen3-30B-A3B": sizes(
        "Qwen3MoeForCausalLM", 151936, 2048, 6144, 32, 4, head_dim=128, rope_theta=1e6, **_QWEN3_EXPERTS
    ),
    "gemma-2-9b": sizes(
        "Gemma2ForCausalLM", 256000, 3584, 14336, 16, 8, head_dim=256, query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, **_GEMMA,
    ),
    "gemma-3-27b": sizes(
        "Gemma3ForCausalLM", 262208, 5376, 21504, 32, 16, head_dim=128, query_pre_attn_scalar=168, rope_theta=1e6,
        rope_local_base_freq=1e4, **_GEMMA,
    ),
    "Phi-3-mini": sizes("Phi3ForCausalLM", 32064, 3072, 8192, 32, 32),
    "gpt-oss-20b": sizes(
        "GptOssForCausalLM", 201088, 2880, 2880, 64, 8, head_dim=64, rope_theta=150000.0, attention_bias=True,
        **_GPT_OSS, **_SLIDING,
    ),
}  # fmt: skip
