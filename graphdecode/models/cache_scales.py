"""What a checkpoint says of an fp8 cache: numbers that keys and values are divided by before they are stored.

Writers call them differently; the names are those that vLLM 0.32 reads. A checkpoint with a number for each head gives
the largest: what fits under each head's own fits under it, and a floating point code loses no digit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from graphdecode.linear.weight_form import Stored, TensorSource
from graphdecode.models.weight_map import CheckpointError

_ATTENTION = "model.layers.{}.self_attn."
_NAMES = (  # of keys and of values, behind the attention's own
    ("k_scale", "v_scale"),  # compressed-tensors, llm-compressor
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),  # ModelOpt
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),  # compressed-tensors of before
    ("k_cache.scale", "v_cache.scale"),
    ("kv_scale", "kv_scale"),  # AutoFP8: one for both
)


def cache_scale_names(tensors: Mapping[str, Stored], num_layers: int) -> list[tuple[str, str] | None]:
    """Return the names of each layer's scales, of keys and of values; None where a layer has none.

    Args:
        tensors: of a source.
        num_layers: of its model.
    """
    found: list[tuple[str, str] | None] = []
    for layer in range(num_layers):
        prefix = _ATTENTION.format(layer)
        pairs = ((prefix + key, prefix + value) for key, value in _NAMES)
        found.append(next((pair for pair in pairs if all(name in tensors for name in pair)), None))
    return found


def read_cache_scales(source: TensorSource, num_layers: int, num_kv_heads: int) -> list[tuple[float, float]]:
    """Return the scales of keys and of values of each layer; 1.0 where the source says nothing.

    Raises:
        CheckpointError: a scale is not a positive number, or neither one of the layer nor one for each head.
    """
    found = cache_scale_names(source.tensors, num_layers)
    return [
        (1.0, 1.0) if pair is None else (_read(source, pair[0], num_kv_heads), _read(source, pair[1], num_kv_heads))
        for pair in found
    ]


def _read(source: TensorSource, name: str, num_kv_heads: int) -> float:
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
