"""What a decoder looks like, read from a checkpoint's config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphdecode.models.rope import RopeConfig, UnsupportedRopeError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UnsupportedModelError(ValueError):
    """A checkpoint that this runtime cannot run; the message says what it can."""


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and options of a decoder.

    Attributes:
        architecture: Hugging Face's name of it.
        vocab_size: rows of the embedding.
        hidden_size: channels of the residual stream.
        intermediate_size: channels of the gated MLP.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: channels of a head.
        rms_norm_eps: of all norms.
        activation: "silu", "gelu" or "gelu_tanh".
        max_position_embeddings: tokens that a sequence may have.
        rope: the rotary embedding.
        qkv_bias: the QKV product has a bias.
        o_bias: the output product of attention has one.
        mlp_bias: the MLP's products have one.
        qk_norm: queries and keys are normed per head.
        tie_word_embeddings: the output layer is the embedding.
        windows: for each layer, how many keys before a query's own it sees; -1 is all.
        eos_token_ids: tokens that end an answer.
        dtype: of the checkpoint.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: str
    max_position_embeddings: int
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read `config.json`, and the end-of-sequence tokens of `generation_config.json` where there is one.

        Raises:
            UnsupportedModelError: the file cannot be read, a field is missing, or the model is of an unknown kind.
        """
        settings = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.exists():
            settings["eos_token_id"] = _read_json(generation).get("eos_token_id", settings.get("eos_token_id"))
        try:
            return cls.from_dict(settings)
        except KeyError as error:
            raise UnsupportedModelError(f"{folder / 'config.json'} lacks the field {error}") from error
        except (UnsupportedModelError, UnsupportedRopeError) as error:
            raise UnsupportedModelError(f"{folder / 'config.json'}: {error}") from error

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> ModelConfig:
        """Take the fields of a config.json, in the forms of transformers 4 and 5."""
        names = settings.get("architectures") or ["none"]
        architecture = names[0]
        if architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}"
            )
        activation = settings.get("hidden_act", "silu")
        if activation not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"hidden_act {activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
            )
        dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in _DTYPES:
            raise UnsupportedModelError(f"dtype {dtype!r} is not supported; supported are {', '.join(_DTYPES)}")
        heads = settings["num_attention_heads"]
        layers = settings["num_hidden_layers"]
        max_positions = settings["max_position_embeddings"]
        is_qwen2 = architecture == "Qwen2ForCausalLM"
        attention_bias = bool(settings.get("attention_bias", False))
        eos = settings.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=settings["vocab_size"],
            hidden_size=settings["hidden_size"],
            intermediate_size=settings["intermediate_size"],
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=settings.get("num_key_value_heads") or heads,
            head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
            rms_norm_eps=settings.get("rms_norm_eps", 1e-6),
            activation=_ACTIVATIONS[activation],
            max_position_embeddings=max_positions,
            rope=RopeConfig.from_dict(settings, max_positions),
            qkv_bias=is_qwen2 or attention_bias,
            o_bias=attention_bias and not is_qwen2,
            mlp_bias=bool(settings.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tie_word_embeddings=bool(settings.get("tie_word_embeddings", False)),
            windows=_windows(settings, architecture, layers),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            dtype=_DTYPES[dtype],
        )


def _windows(settings: dict[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Return the window of each layer: Mistral's of all, Qwen's where it is switched on, from a layer on."""
    size = settings.get("sliding_window")
    sliding = architecture == "MistralForCausalLM" or (
        architecture.startswith("Qwen") and bool(settings.get("use_sliding_window", False))
    )
    if size is None or not sliding:
        return (-1,) * layers
    first = 0 if architecture == "MistralForCausalLM" else settings.get("max_window_layers", 28)
    kinds = settings.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    return tuple(size - 1 if kind == "sliding_attention" else -1 for kind in kinds)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} is no JSON object")
    return content
