"""From a checkpoint to a decoder: each tensor straight to its place, no second copy of the model."""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from graphdecode.errors import ArgumentError
from graphdecode.kernels.native import library as native
from graphdecode.linear.choice_cache import ChoiceCache
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.linear_weight import LinearWeight, prepare_linear
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.models.config import ModelConfig
from graphdecode.models.decoder import Decoder, LayerWeights
from graphdecode.models.rope import cos_sin_table
from graphdecode.models.shapes import PREFIX, RandomWeights, shape_config
from graphdecode.models.source import resolve_model_path

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Weights(Protocol):
    def check(self, expected: dict[str, tuple[int, ...]], optional: set[str]) -> None: ...

    def read(self, *names: str) -> Tensor: ...


def resolve_dtype(dtype: str | torch.dtype, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: `"auto"` is the checkpoint's, and float32 where a CPU has no fast unit for it.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        slow = device.type == "cpu" and not (checkpoint == torch.bfloat16 and _cpu_has_bf16())
        return torch.float32 if slow else checkpoint
    if dtype not in _DTYPES:
        raise ArgumentError(f"dtype must be auto, {', '.join(_DTYPES)}, got {dtype!r}")
    return _DTYPES[dtype]


def _cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 itself; oneDNN also calls it supported where AVX-512 only imitates it."""
    if platform.machine() in ("x86_64", "AMD64"):
        asked = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    else:
        asked = [getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)]
    return any(has is not None and has() for has in asked)


def describe_model(model: str | Path) -> ModelConfig:
    """Return what a model looks like, without its weights; names as for `load_model`.

    Raises:
        ValueError: there is no such model, or its configuration cannot be used.
    """
    return shape_config(str(model)) if str(model).startswith(PREFIX) else ModelConfig.load(resolve_model_path(model))


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the memory that all tensors of a model take, each of them once."""
    return sum(math.prod(shape) for shape in _expected_shapes(config).values()) * dtype.itemsize


def load_model(
    model: str | Path,
    *,
    device: torch.device | str,
    dtype: str | torch.dtype = "auto",
    max_sequence_length: int | None = None,
    batch_sizes: tuple[int, ...] = (1, 8),
    quantize: str | None = None,
    batch_invariant: bool = False,
    progress: bool = False,
) -> Decoder:
    """Load a decoder.

    Args:
        model: a checkpoint folder, a repository id, `"demo"`, or a shape such as `"shape:llama-3.1-8b"` with random
            weights.
        device: where the weights go.
        dtype: of weights and activations; see `resolve_dtype`.
        max_sequence_length: positions to make rotary angles for; None means all that the model has.
        batch_sizes: of the decode steps, for the choice of linear paths.
        quantize: None, or `"int8"` for 8-bit weights on a CPU.
        batch_invariant: take paths whose result for a row has the same bits whatever the number of rows.
        progress: show a bar on standard error.

    Raises:
        ValueError: the model, its configuration, its tensors or the options cannot be used; nothing stays loaded.
    """
    device = torch.device(device)
    if quantize not in (None, "int8"):
        raise ArgumentError(f"quantize must be None or 'int8', got {quantize!r}")
    if quantize is not None and device.type != "cpu":
        raise ArgumentError(f"quantize={quantize!r} works on a CPU alone, the device is {device.type}")
    weights: _Weights
    if str(model).startswith(PREFIX):
        config = shape_config(str(model))
        chosen = resolve_dtype(dtype, config.dtype, device)
        weights = RandomWeights(device, chosen)
    else:
        folder = resolve_model_path(model)
        config = ModelConfig.load(folder)
        chosen = resolve_dtype(dtype, config.dtype, device)
        weights = Checkpoint(folder, device, chosen)
    if batch_invariant:
        _check_invariance(config, chosen, device)
    optional = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights.check(_expected_shapes(config), optional)
    positions = min(max_sequence_length or config.max_position_embeddings, config.max_position_embeddings)
    return _Loader(config, weights, chosen, device, batch_sizes, quantize, batch_invariant).load(positions, progress)


def _check_invariance(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cuda":
        return
    if native.library() is None:
        raise ArgumentError(f"batch_invariant=True needs compiled kernels on a CPU: {native.why_not()}")
    if dtype not in native.ELEMENTS:
        raise ArgumentError(f"batch_invariant=True works with float32 and bfloat16 on a CPU, the dtype is {dtype}")
    if config.head_dim % native.LANES:
        multiple = f"a head_dim that is a multiple of {native.LANES}"
        raise ArgumentError(f"batch_invariant=True needs {multiple} on a CPU, got {config.head_dim}")


def _return_free_memory() -> None:
    """Give the system back what was freed: the holes that packing leaves in the heap grow to a fifth of the model."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)


def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, ff = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        products = {
            "self_attn.q_proj": (q, hidden, config.qkv_bias),
            "self_attn.k_proj": (kv, hidden, config.qkv_bias),
            "self_attn.v_proj": (kv, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, q, config.o_bias),
            "mlp.gate_proj": (ff, hidden, config.mlp_bias),
            "mlp.up_proj": (ff, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, ff, config.mlp_bias),
        }
        for name, (rows, columns, has_bias) in products.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


class _Loader:
    def __init__(
        self,
        config: ModelConfig,
        weights: _Weights,
        dtype: torch.dtype,
        device: torch.device,
        batch_sizes: tuple[int, ...],
        quantize: str | None,
        batch_invariant: bool,
    ) -> None:
        self._config = config
        self._weights = weights
        self._device = device
        self._shapes = _expected_shapes(config)
        # on a CPU one form of the weight serves all buckets, and the smallest and the largest stand for them
        self._batch_sizes = (
            batch_sizes if device.type == "cuda" else tuple(sorted({min(batch_sizes), max(batch_sizes)}))
        )
        self._options: dict[str, Any] = {"quantize": quantize, "batch_invariant": batch_invariant}
        elements = sum(shape[0] * shape[1] for shape in self._shapes.values() if len(shape) == 2)
        self._tuner = LinearTuner(elements * dtype.itemsize, ChoiceCache())

    def load(self, positions: int, progress: bool) -> Decoder:
        config = self._config
        embedding_weight = self._weights.read("model.embed_tokens.weight")
        layers = []
        for index in tqdm(
            range(config.num_hidden_layers), desc="loading", unit="layer", disable=not progress, leave=False
        ):
            layers.append(self._layer(f"model.layers.{index}."))
            _return_free_memory()
        decoder = Decoder(
            config,
            embedding_weight,
            layers,
            self._weights.read("model.norm.weight"),
            self._prepare(embedding_weight, None) if config.tie_word_embeddings else self._linear("", "lm_head"),
            cos_sin_table(config.rope, config.head_dim, positions, self._device),
        )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the cache is sized by what is free, and the choice of products used much
        return decoder

    def _layer(self, prefix: str) -> LayerWeights:
        qk_norm = self._config.qk_norm
        return LayerWeights(
            input_norm=self._weights.read(f"{prefix}input_layernorm.weight"),
            qkv=self._linear(prefix, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            q_norm=self._weights.read(f"{prefix}self_attn.q_norm.weight") if qk_norm else None,
            k_norm=self._weights.read(f"{prefix}self_attn.k_norm.weight") if qk_norm else None,
            o=self._linear(prefix, "self_attn.o_proj"),
            post_norm=self._weights.read(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear(prefix, "mlp.gate_proj", "mlp.up_proj"),
            down=self._linear(prefix, "mlp.down_proj"),
        )

    def _linear(self, prefix: str, *names: str) -> LinearWeight:
        weight = self._weights.read(*(f"{prefix}{name}.weight" for name in names))
        biases = [f"{prefix}{name}.bias" for name in names]
        return self._prepare(weight, self._weights.read(*biases) if biases[0] in self._shapes else None)

    def _prepare(self, weight: Tensor, bias: Tensor | None) -> LinearWeight:
        return prepare_linear(weight, bias, tuner=self._tuner, batch_sizes=self._batch_sizes, **self._options)
