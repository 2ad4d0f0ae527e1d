"""From a checkpoint to a decoder: each tensor straight to its place, no second copy of the model."""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from graphdecode.errors import ArgumentError
from graphdecode.kernels.native import library as native
from graphdecode.linear.choice_cache import ChoiceCache
from graphdecode.linear.forms import check_options
from graphdecode.linear.linear_choice import LinearTuner
from graphdecode.linear.weight_form import FormOptions
from graphdecode.models.config import DTYPES, ModelConfig
from graphdecode.models.decoder import Decoder
from graphdecode.models.family import family_of
from graphdecode.models.sources import Source, open_source
from graphdecode.models.weight_map import check, parts
from graphdecode.models.weights import Weights


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
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


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
    return open_source(model).config()


def check_model(model: str | Path) -> ModelConfig:
    """Look at a model's configuration and at what weights there are, and read none of them.

    Args:
        model: as for `load_model`.

    Raises:
        ValueError: there is no such model, its configuration cannot be used, or tensors are missing or of wrong shapes.
    """
    source = open_source(model)
    config = source.config()
    _check_weights(source, config)
    return config


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the memory that all tensors of a model take, each of them once."""
    weight_map = family_of(config.architecture).weights(config)
    return sum(math.prod(part.shape) for part in parts(weight_map)) * dtype.itemsize


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
    source = open_source(model)
    # on a CPU one form of the weight serves all buckets, and the smallest and the largest stand for them
    sizes = batch_sizes if device.type == "cuda" else tuple(sorted({min(batch_sizes), max(batch_sizes)}))
    config = source.config()
    chosen = resolve_dtype(dtype, config.dtype, device)
    weight_map = family_of(config.architecture).weights_in(config, source.tensors)
    products = sum(math.prod(part.shape) for part in parts(weight_map) if len(part.shape) >= 2)
    tuner = LinearTuner(products * chosen.itemsize, ChoiceCache())
    options = FormOptions(device, chosen, tuner, sizes, quantize, batch_invariant)
    check_options(options)
    if batch_invariant:
        _check_invariance(config, chosen, device)
    _check_weights(source, config)
    positions = min(max_sequence_length or config.max_position_embeddings, config.max_position_embeddings)
    return _build(config, Weights(source, weight_map, options, positions), progress)


def _check_weights(source: Source, config: ModelConfig) -> None:
    weight_map = family_of(config.architecture).weights_in(config, source.tensors)
    unused = frozenset({"lm_head.weight"} if config.tie_word_embeddings else ())
    check(source.name, source.tensors, weight_map, unused)


def _build(config: ModelConfig, weights: Weights, progress: bool) -> Decoder:
    family = family_of(config.architecture)
    stem = family.stem(config, weights)
    layers = []
    for index in tqdm(
        range(config.num_hidden_layers), desc="loading", unit="layer", disable=None if progress else True, leave=False
    ):
        layers.append(family.layer(config, weights, index))
        _return_free_memory()
    decoder = Decoder(config, stem, layers, family.head(config, weights, stem))
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()  # the cache is sized by what is free, and the choice of products used much
    return decoder


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
