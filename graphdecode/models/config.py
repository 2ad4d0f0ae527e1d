"""The configuration of a decoder, and the fields of config.json that most families share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphdecode.attention import AttentionOptions
from graphdecode.cache import Keys, Recurrent
from graphdecode.errors import shown
from graphdecode.models.fields import UnsupportedModelError, choice, count, eos_token_ids, flag, number
from graphdecode.models.rope import RopeConfig

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_TYPES = ("full_attention", "sliding_attention")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of a model."""

    count: int  # experts of a layer
    top_k: int  # experts per token
    intermediate_size: int  # of an expert
    renormalize: bool  # whether the weights of a token's experts sum to 1
    shared_intermediate_size: int = 0  # of the shared expert; 0: there is none
    layers: tuple[bool, ...]  # per layer, whether it has experts; others have an MLP
    alpha: float = 1.0  # of a clamped gate
    limit: float = 0.0  # of a clamped gate; 0: not clamped


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model."""

    architecture: str  # Hugging Face's name
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int  # query heads
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int  # longest sequence, in tokens
    windows: tuple[int, ...]  # per layer, visible keys before a query's own; -1: all
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype  # of the checkpoint
    # recurrent state of each layer, if any; empty: no layer has one
    recurrent: tuple[Recurrent | None, ...] = ()
    # keys and values of each layer; empty: all have `num_key_value_heads` of `head_dim`
    layer_keys: tuple[Keys, ...] = ()
    integer_quantized: bool = False  # weights are quantized integers

    @property
    def width(self) -> int:
        """Channels of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def cached_keys(self) -> list[Keys | None]:
        """The keys and values that each layer keeps, if any."""
        layers = self.num_hidden_layers
        keys = self.layer_keys or (Keys(self.num_key_value_heads, self.head_dim),) * layers
        with_keys = [state is None or state.beside_keys for state in self.recurrent] or [True] * layers
        return [each if has and each.shared_with is None else None for each, has in zip(keys, with_keys, strict=True)]

    @property
    def value_dim(self) -> int:
        """Channels of a head's values: fewer than of its keys where those are latent."""
        return (self.layer_keys[0].latent_rank if self.layer_keys else 0) or self.head_dim

    def layer_of_keys(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads: itself, or the one that it shares them with."""
        shared_with = self.layer_keys[layer].shared_with if self.layer_keys else None
        return layer if shared_with is None else shared_with


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """Shapes and options of a decoder; families may add more in a subclass."""

    hidden_size: int
    intermediate_size: int  # of the gated MLP
    rms_norm_eps: float
    activation: str  # "silu", "gelu" or "gelu_tanh"
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool
    # rotary embedding of each layer, None: no positions; empty: all have `rope`
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    sm_scale: float | None = None  # softmax scale; None: 1 / sqrt(head_dim)
    is_chunked: bool = False  # windows are chunks; see `AttentionOptions`
    attention_soft_cap: float = 0.0  # 0: none
    experts: ExpertsConfig | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attention and MLP
    logits_scale: float = 1.0
    logits_soft_cap: float = 0.0  # 0: none
    mixer: Any = None  # sizes of the mixer with a recurrent state, a type of the family

    def has_state(self, layer: int) -> bool:
        """Whether a layer has a recurrent state, with or without keys and values."""
        return bool(self.recurrent) and self.recurrent[layer] is not None

    def attention_options(self, layer: int) -> AttentionOptions:
        """Return the options of a layer's attention; sinks are weights and not included."""
        is_chunked = self.is_chunked and self.windows[layer] >= 0
        return AttentionOptions(self.sm_scale, self.windows[layer], self.attention_soft_cap, is_chunked=is_chunked)


def common_fields(settings: dict[str, Any], *, may_be_partial: bool = False) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that all families share, from files of transformers 4 or 5."""
    if settings.get("quantization_config"):
        method = settings["quantization_config"]
        method = shown(method.get("quant_method") if isinstance(method, dict) else method, plain=True)
        raise UnsupportedModelError(
            f"quantization_config ({method}) is not supported; supported are plain weights of dtype {', '.join(DTYPES)}"
        )
    activation = choice(settings, "hidden_act", _ACTIVATIONS)
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"dtype {shown(dtype)} is not supported; supported are {', '.join(DTYPES)}")
    hidden, heads = count(settings, "hidden_size"), count(settings, "num_attention_heads")
    layers = count(settings, "num_hidden_layers")
    max_positions = count(settings, "max_position_embeddings")
    kv_heads = count(settings, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModelError(f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
    head_dim = count(settings, "head_dim", hidden // heads)
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim {head_dim} is odd; a rotary embedding turns pairs of channels")
    return {
        "vocab_size": count(settings, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": count(settings, "intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": number(settings, "rms_norm_eps", 1e-6),
        "activation": _ACTIVATIONS[activation],
        "max_position_embeddings": max_positions,
        "rope": RopeConfig.from_dict(settings, max_positions, may_be_partial=may_be_partial),
        "tie_word_embeddings": flag(settings, "tie_word_embeddings", False),
        "eos_token_ids": eos_token_ids(settings),
        "dtype": DTYPES[dtype],
    }


def is_windowed(settings: dict[str, Any], otherwise: list[bool]) -> list[bool]:
    """Return whether each layer has a window: `layer_types`, or by default `otherwise`."""
    kinds = settings.get("layer_types") or [_LAYER_TYPES[windowed] for windowed in otherwise]
    return [kind == _LAYER_TYPES[True] for kind in layer_kinds(kinds, len(otherwise), _LAYER_TYPES)]


def layer_kinds(kinds: Any, layers: int, known: Sequence[str], field: str = "layer_types") -> list[str]:
    """Return the value of a field; raise UnsupportedModelError unless it names a known kind for each layer."""
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise UnsupportedModelError(
            f"{field} must name {layers} layers, each one of {', '.join(known)}, got {shown(kinds)}"
        )
    return kinds


def layer_windows(settings: dict[str, Any], otherwise: list[bool]) -> tuple[int, ...]:
    """Return `ModelShape.windows`; see `is_windowed`.

    In transformers, keys with `key > query - sliding_window` are visible, including the query's own.
    """
    if settings.get("sliding_window") is None:
        return (-1,) * len(otherwise)
    size = count(settings, "sliding_window")
    return tuple(size - 1 if windowed else -1 for windowed in is_windowed(settings, otherwise))


def switched_windows(settings: dict[str, Any], otherwise: list[bool]) -> tuple[int, ...]:
    """Return `layer_windows` if `use_sliding_window` is true, else no windows."""
    is_on = flag(settings, "use_sliding_window", False)
    return layer_windows(settings, otherwise) if is_on else (-1,) * len(otherwise)


def all_but_every(period: int, layers: int) -> list[bool]:
    """Return False for every `period`-th layer, True for the others."""
    return [(layer + 1) % period != 0 for layer in range(layers)]


def layer_ropes(settings: dict[str, Any], fields: dict[str, Any], otherwise: list[bool]) -> dict[str, Any]:
    """Return the field `layer_ropes` of models whose layers with windows have their own rope."""
    local = RopeConfig.from_dict(settings["sliding_rope"], fields["max_position_embeddings"])
    windowed = is_windowed(settings, otherwise)
    return {"layer_ropes": tuple(local if window else fields["rope"] for window in windowed)}
