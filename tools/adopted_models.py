"""Random checkpoints of architectures without a family in graphdecode, for tests and benchmarks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Exaone4Config,
    FalconMambaConfig,
    Gemma3nTextConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    JambaConfig,
    Lfm2MoeConfig,
    MambaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    StableLmConfig,
    Starcoder2Config,
    Zamba2Config,
    ZambaConfig,
)

from graphdecode.models import resolve_model_path


class Sizes(NamedTuple):
    """The sizes of a checkpoint; each architecture has its own names for them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int

    def fields(self, **others: Any) -> dict[str, Any]:
        return self._asdict() | {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None} | others

    def grouped(self, **others: Any) -> dict[str, Any]:
        return self.fields(num_key_value_heads=self.num_attention_heads // 2, **others)

    def windowed(self, **others: Any) -> dict[str, Any]:
        """Return the fields of a model whose layers alternate between a window of 20 tokens and full attention."""
        kinds = ("sliding_attention", "full_attention")
        layer_types = [kinds[layer % 2] for layer in range(self.num_hidden_layers)]
        return self.grouped(sliding_window=20, layer_types=layer_types, **others)


def _gemma3n(sizes: Sizes) -> PreTrainedConfig:
    sparsity = [0.5, *[0.0] * (sizes.num_hidden_layers - 1)]
    fields = sizes.windowed(head_dim=16, laurel_rank=8, num_kv_shared_layers=0, activation_sparsity_pattern=sparsity)
    return Gemma3nTextConfig(hidden_size_per_layer_input=16, vocab_size_per_layer_input=sizes.vocab_size, **fields)


def _mamba(kind: type[PreTrainedConfig]) -> Callable[[Sizes], PreTrainedConfig]:
    def config(sizes: Sizes) -> PreTrainedConfig:
        fields = sizes.fields(state_size=8, time_step_rank=8)
        return kind(**fields | {"intermediate_size": 2 * sizes.hidden_size})

    return config


def _experts(sizes: Sizes, linear: str, **others: Any) -> dict[str, Any]:
    """Return the fields of a model with experts, whose even layers are of a linear kind, the odd ones attention."""
    kinds = [(linear, "full_attention")[layer % 2] for layer in range(sizes.num_hidden_layers)]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": sizes.intermediate_size // 2}
    return sizes.grouped(layer_types=kinds, **experts, **others)


TINY = Sizes(259, 64, 96, 2, 4, 256)
SMALL = Sizes(8192, 384, 1536, 6, 6, 1024)  # about 20 million parameters
ADOPTED: dict[str, Callable[[Sizes], PreTrainedConfig]] = {
    "stablelm": lambda sizes: StableLmConfig(**sizes.grouped(use_qkv_bias=True, qk_layernorm=True)),
    "gpt-neox": lambda sizes: GPTNeoXConfig(**sizes.fields()),
    "starcoder2": lambda sizes: Starcoder2Config(**sizes.grouped(sliding_window=20)),
    "cohere": lambda sizes: CohereConfig(**sizes.grouped(use_qk_norm=True, logit_scale=0.5)),
    "cohere2": lambda sizes: Cohere2Config(**sizes.windowed()),
    "glm4": lambda sizes: Glm4Config(**sizes.grouped(head_dim=32)),
    "exaone4": lambda sizes: Exaone4Config(**sizes.windowed()),
    "gemma3n": _gemma3n,
    "opt": lambda sizes: OPTConfig(
        **sizes.fields(ffn_dim=sizes.intermediate_size, word_embed_proj_dim=sizes.hidden_size // 2)
    ),
    "gpt2": lambda sizes: GPT2Config(**sizes.fields(n_inner=sizes.intermediate_size)),
}

STATEFUL: dict[str, Callable[[Sizes], PreTrainedConfig]] = {  # with recurrent states
    "mamba": _mamba(MambaConfig),
    "falcon-mamba": _mamba(FalconMambaConfig),
    "jamba": lambda sizes: JambaConfig(
        **sizes.grouped(num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1),
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
    ),
    "zamba": lambda sizes: ZambaConfig(
        **sizes._replace(num_hidden_layers=6).fields(num_key_value_heads=sizes.num_attention_heads),
        attn_layer_period=3,
        attn_layer_offset=1,
        n_mamba_heads=2,
        mamba_d_state=8,
        mamba_dt_rank=8,
    ),
    "zamba2": lambda sizes: Zamba2Config(
        **sizes._replace(num_hidden_layers=4).fields(num_key_value_heads=sizes.num_attention_heads),
        layers_block_type=["mamba", "hybrid"] * 2,
        num_mem_blocks=2,
        mamba_d_state=16,
        n_mamba_heads=8,
        mamba_ngroups=2,
        adapter_rank=8,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
    ),
    "lfm2-moe": lambda sizes: Lfm2MoeConfig(**_experts(sizes, "conv", num_dense_layers=1)),
    "qwen3.5-moe": lambda sizes: Qwen3_5MoeTextConfig(
        **_experts(sizes, "linear_attention", head_dim=16, shared_expert_intermediate_size=32),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
}


def save_random(config: PreTrainedConfig, folder: Path) -> Path:
    """Write a random checkpoint with the demo's tokenizer; its weights are large enough that outputs vary."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    spread = 0.15 * (64 / config.hidden_size) ** 0.5
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.1)
        else:
            torch.nn.init.normal_(parameter, 0.0, spread)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model_path("demo") / name, folder / name)
    return folder
