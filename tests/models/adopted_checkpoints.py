"""Small random checkpoints of architectures that have no family here, as transformers writes them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Exaone4Config,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    OPTConfig,
    PreTrainedConfig,
    StableLmConfig,
    Starcoder2Config,
)

from graphdecode.models import resolve_model_path

NO_TOKENS: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = NO_TOKENS | {
    "vocab_size": 259,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GROUPED = SIZES | {"intermediate_size": 96, "num_key_value_heads": 2}
ADOPTED: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "stablelm": (StableLmConfig, GROUPED | {"use_qkv_bias": True, "qk_layernorm": True}),
    "gpt-neox": (GPTNeoXConfig, SIZES | {"intermediate_size": 96}),
    "starcoder2": (Starcoder2Config, GROUPED | {"sliding_window": 20}),
    "cohere": (CohereConfig, GROUPED | {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": (
        Cohere2Config,
        GROUPED | {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "glm4": (Glm4Config, GROUPED | {"head_dim": 32}),
    "exaone4": (
        Exaone4Config,
        GROUPED | {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "opt": (OPTConfig, SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    "gpt2": (GPT2Config, NO_TOKENS | {"vocab_size": 259, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
}


def save_adopted(name: str, folder: Path, **changes: Any) -> Path:
    """Write an architecture's random checkpoint, with the demo's tokenizer beside it."""
    config_class, settings = ADOPTED[name]
    return save_module(config_class(**(settings | changes)), folder)


def save_module(config: PreTrainedConfig, folder: Path) -> Path:
    """Write a random checkpoint of a configuration; its numbers are so large that greedy answers vary."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        is_gain = parameter.dim() == 1
        torch.nn.init.normal_(parameter, parameter.mean().item() if is_gain else 0.0, 0.1 if is_gain else 0.15)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model_path("demo") / file, folder / file)
    return folder
