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
    Gemma3nTextConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    OPTConfig,
    PreTrainedConfig,
    StableLmConfig,
    Starcoder2Config,
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
