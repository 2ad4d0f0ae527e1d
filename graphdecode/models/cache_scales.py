"""Scales of cached keys and values, which some checkpoints of quantized models have."""

import math
from collections.abc import Mapping

import torch

from graphdecode.linear.weight_form import Stored, TensorSource
from graphdecode.models.weight_map import CheckpointError

_SCALES = (  # names of the scales of keys and values, after the prefix of a layer's attention
    ("k_scale", "v_scale"),  # compressed-tensors, llm-compressor
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),  # ModelOpt
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),  # older compressed-tensors
    ("k_cache.scale", "v_cache.scale"),
    ("kv_scale", "kv_scale"),  # AutoFP8: one for both
)


def cache_scale_names(tensors: Mapping[str, Stored], num_layers: int) -> list[tuple[str, str] | None]:
    """Return for each layer the names of its key and value scales, if any."""
    of_layers = [f"model.layers.{layer}.self_attn." for layer in range(num_layers)]
    pairs = [[(at + key, at + value) for key, value in _SCALES] for at in of_layers]
    return [next((pair for pair in of_layer if tensors.keys() >= set(pair)), None) for of_layer in pairs]


def read_cache_scales(source: TensorSource, num_layers: int, num_kv_heads: int) -> list[tuple[float, float]]:
    """Return the key and value scales of each layer; 1.0 by default."""
    names = cache_scale_names(source.tensors, num_layers)
    pairs = [[1.0, 1.0] if pair is None else [_scale(source, name, num_kv_heads) for name in pair] for pair in names]
    return [(key, value) for key, value in pairs]


def _scale(source: TensorSource, name: str, num_kv_heads: int) -> float:
    shape = source.tensors[name].shape
    if math.prod(shape) not in (1, num_kv_heads):
        raise CheckpointError(
            f"{name} is {list(shape)} and should be one number, or one for each of {num_kv_heads} heads"
        )
    values = torch.empty(shape, dtype=torch.float32)
    source.read(name, values)
    largest = float(values.max())
    if not 0.0 < largest < math.inf:
        raise CheckpointError(f"{name} divides cached keys or values and must be positive, it is {largest}")
    return largest
