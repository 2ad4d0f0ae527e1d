"""What a decoder looks like, read from a checkpoint's config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphdecode.errors import GraphdecodeError
from graphdecode.models.rope import RopeConfig, UnsupportedRopeError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ATTENTION_BIAS = ("LlamaForCausalLM", "Qwen3ForCausalLM")  # those that look at `attention_bias`
_DEFAULTS: dict[str, dict[str, Any]] = {  # what transformers takes where a config.json says nothing
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UnsupportedModelError(GraphdecodeError, ValueError):
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
            UnsupportedModelError: the file cannot be read, or describes no model that is supported.
        """
        settings = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.exists():
            settings["eos_token_id"] = _read_json(generation).get("eos_token_id", settings.get("eos_token_id"))
        try:
            return cls.from_dict(settings)
        except (UnsupportedModelError, UnsupportedRopeError) as error:
            raise UnsupportedModelError(f"{folder / 'config.json'}: {error}") from error

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> ModelConfig:
        """Take the fields of a config.json, in the forms of transformers 4 and 5.

        Raises:
            UnsupportedModelError: a field is missing, has no value that makes sense, or asks for what is not supported.
            UnsupportedRopeError: the same, of the rotary embedding.
        """
        architecture = _architecture(settings)
        if settings.get("quantization_config"):
            method = settings["quantization_config"]
            method = method.get("quant_method") if isinstance(method, dict) else method
            raise UnsupportedModelError(
                f"quantization_config ({method}) is not supported; supported are plain weights of dtype "
                f"{', '.join(_DTYPES)}"
            )
        settings = _DEFAULTS[architecture] | settings
        activation = settings.get("hidden_act", "silu")
        if activation not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"hidden_act {activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
            )
        dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in _DTYPES:
            raise UnsupportedModelError(f"dtype {dtype!r} is not supported; supported are {', '.join(_DTYPES)}")
        hidden, heads = _count(settings, "hidden_size"), _count(settings, "num_attention_heads")
        layers = _count(settings, "num_hidden_layers")
        max_positions = _count(settings, "max_position_embeddings")
        kv_heads = _count(settings, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
            )
        head_dim = _count(settings, "head_dim", hidden // heads)
        if head_dim % 2:
            raise UnsupportedModelError(f"head_dim {head_dim} is odd; a rotary embedding turns pairs of channels")
        attention_bias = bool(settings.get("attention_bias", False)) and architecture in _ATTENTION_BIAS
        return cls(
            architecture=architecture,
            vocab_size=_count(settings, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_count(settings, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive(settings, "rms_norm_eps", 1e-6),
            activation=_ACTIVATIONS[activation],
            max_position_embeddings=max_positions,
            rope=RopeConfig.from_dict(settings, max_positions),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(settings.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tie_word_embeddings=bool(settings.get("tie_word_embeddings", False)),
            windows=_windows(settings, architecture, layers),
            eos_token_ids=_token_ids(settings, "eos_token_id"),
            dtype=_DTYPES[dtype],
        )


def _architecture(settings: dict[str, Any]) -> str:
    names = settings.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(f"architecture {name} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return str(name)


def _count(settings: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return a field that is an integer >= 1; `default`, where there is one, for a field that is absent or null."""
    value = settings.get(name)
    if value is None and default is not None:
        value = default
    if value is None:
        raise UnsupportedModelError(f"the field {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"{name} must be an integer >= 1, got {value!r}")
    return value


def _positive(settings: dict[str, Any], name: str, default: float) -> float:
    value = settings.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise UnsupportedModelError(f"{name} must be a number > 0, got {value!r}")
    return float(value)


def _token_ids(settings: dict[str, Any], name: str) -> tuple[int, ...]:
    value = settings.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise UnsupportedModelError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _windows(settings: dict[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Return the window of each layer: Mistral's of all, Qwen's where it is switched on and the layer is one of those.

    transformers keeps the keys with `key > query - sliding_window`: that many less one before the query's own.
    """
    if architecture == "MistralForCausalLM":
        size = settings["sliding_window"]
        return (-1 if size is None else _count(settings, "sliding_window") - 1,) * layers
    if not settings.get("use_sliding_window", False) or settings.get("sliding_window") is None:
        return (-1,) * layers
    size = _count(settings, "sliding_window")
    first = settings.get("max_window_layers", 28)
    kinds = settings.get("layer_types") or [_LAYER_TYPES[layer >= first] for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= set(_LAYER_TYPES):
        raise UnsupportedModelError(
            f"layer_types must name {layers} layers, each one of {', '.join(_LAYER_TYPES)}, got {kinds!r}"
        )
    return tuple(size - 1 if kind == "sliding_attention" else -1 for kind in kinds)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} is no JSON object")
    return content
