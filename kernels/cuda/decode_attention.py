"""Attention of a step by clusters of blocks, `decode_attention.cu`: which steps it serves, and its launch.

It has not run on a GPU yet; `append_attention` has the formulas, and the tensors.
"""

import functools
import os
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.attention_records import AttentionOptions, QKNormRope, logits_of
from . import nvrtc
from .launch import loaded

SWITCH = "GRAPHDECODE_CLUSTER_ATTENTION"
CONSUMER_WARPS, KEYS_OF_WARP, QUERIES = 4, 16, 16  # as in `decode_attention.cuh`
_THREADS = 32 * (CONSUMER_WARPS + 1)
_MOST_BLOCKS = 8  # of a cluster, on every GPU that has them
_MOST_STAGES = 3  # tiles of keys and values in flight
_MOST_HEAD_DIM = 256  # registers hold a warp's sums


class Limits(NamedTuple):
    """What a device has: multiprocessors, and shared memory of a block."""

    processors: int
    shared_bytes: int


class Sizes(NamedTuple):
    """Sizes of a launch."""

    cluster: int  # blocks
    stages: int  # tiles in flight
    shared_bytes: int


@functools.cache
def limits_of(device: torch.device) -> Limits:
    """Return the limits of a GPU."""
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = getattr(properties, "shared_memory_per_block_optin")  # noqa: B009 (not in torch's types)
    return Limits(properties.multi_processor_count, shared_bytes)


@functools.cache
def has_clusters(device: torch.device) -> bool:
    """Return whether a device is a GPU with clusters (sm_90 on) for which CUDA C++ can be compiled."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    capability = torch.cuda.get_device_capability(device)
    if missing := nvrtc.unavailable_reason() or nvrtc.unknown_reason(capability):
        nvrtc.say(f"Triton's attention serves without that by clusters: {missing}")
    return missing is None and capability[0] >= 9


def is_chosen(device: torch.device) -> bool:
    """Return whether the environment asks for this kernel, and the device has what it takes.

    Until a GPU has timed both, Triton's serves.
    """
    return os.environ.get(SWITCH, "").lower() in ("1", "yes", "on", "true") and has_clusters(device)


def shared_bytes(head_dim: int, group: int, entry_bytes: int, stages: int) -> int:
    """Return the shared memory of a block: barriers, ring of tiles, decoded rows, queries and partial results."""
    stage = 2 * CONSUMER_WARPS * KEYS_OF_WARP * (head_dim * entry_bytes + 16)
    wide_row = head_dim * 2 + 16
    decoded = CONSUMER_WARPS * 2 * KEYS_OF_WARP * wide_row if entry_bytes == 1 else 0
    return 128 + stages * stage + decoded + QUERIES * wide_row + (CONSUMER_WARPS + 1) * 4 * group * (head_dim + 2)


def sizes_of(out: Tensor, k_cache: Tensor, limits: Limits) -> Sizes | None:
    """Return the sizes of a launch: as many blocks as multiprocessors, and tiles as shared memory holds; or None."""
    rows, heads, head_dim = out.shape
    kv_heads = k_cache.shape[2]
    cluster = 1
    while cluster < _MOST_BLOCKS and rows * kv_heads * 2 * cluster <= limits.processors:
        cluster *= 2
    for stages in range(_MOST_STAGES, 0, -1):
        needed = shared_bytes(head_dim, heads // kv_heads, k_cache.itemsize, stages)
        if needed <= limits.shared_bytes:
            return Sizes(cluster, stages, needed)
    return None


def served_sizes(
    out: Tensor, k_cache: Tensor, v_cache: Tensor, qkv: Tensor, rope: QKNormRope, limits: Limits
) -> Sizes | None:
    """Return the sizes of a launch over such tensors on a device with these limits; None if it does not serve them."""
    head_dim = k_cache.shape[3]
    is_known = out.dtype in (torch.float16, torch.bfloat16) and k_cache.dtype in (out.dtype, torch.float8_e4m3fn)
    is_known = is_known and k_cache.shape == v_cache.shape and k_cache.dtype == v_cache.dtype
    is_adjacent = all(tensor.is_contiguous() for tensor in (out, k_cache, v_cache)) and qkv.stride(-1) == 1
    is_adjacent = is_adjacent and not any(cache.data_ptr() % 16 for cache in (k_cache, v_cache))
    fits = head_dim % 16 == 0 and head_dim <= _MOST_HEAD_DIM and out.shape[1] // k_cache.shape[2] <= QUERIES
    norms_heads = rope.q_norm is None or rope.q_norm.shape[0] == head_dim  # each by itself
    return sizes_of(out, k_cache, limits) if is_known and is_adjacent and fits and norms_heads else None


def macros_of(
    out: Tensor, k_cache: Tensor, qkv: Tensor, rope: QKNormRope, options: AttentionOptions, stages: int
) -> dict[str, int]:
    """Return what `decode_attention.cu` is compiled for."""
    _, page_size, kv_heads, head_dim = k_cache.shape
    return {
        "SET_HEAD_DIM": head_dim,
        "SET_GROUP": out.shape[1] // kv_heads,
        "SET_KV_HEADS": kv_heads,
        "SET_PAGE_SIZE": page_size,
        "SET_HALF": rope.cos_sin.shape[-1],
        "SET_STAGES": stages,
        "SET_IS_BFLOAT": int(out.dtype == torch.bfloat16),
        "SET_IS_WIDE": int(qkv.dtype == torch.float32),
        "SET_IS_E4M3": int(k_cache.itemsize == 1),
        "SET_HAS_NORM": int(rope.q_norm is not None),
        "SET_HAS_SINKS": int(options.sinks is not None),
        "SET_IS_CHUNKED": int(options.is_chunked),
    }


def launch_decode_attention(
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    rope: QKNormRope,
    options: AttentionOptions,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Launch the kernel over tensors that it serves; see `append_attention` for the arguments.

    Args:
        out: [rows, num_qo_heads, head_dim].
        k_cache: written, as is `v_cache`.
        v_cache: the same shape.
        qkv: the product.
        page_table: int32 [rows, pages of a row]. It, `kv_lens` and the older keys are read before the kernel waits:
            between their writers and this launch there is a kernel that waits before it allows the next one.
        kv_lens: int32 [rows], tokens of each row, the new one included; 0 for padding.
        rope: norm and rotation.
        options: what becomes of the logits.
        k_scale: divides keys before fp8 holds them.
        v_scale: the same of values.

    Raises:
        ValueError: the kernel does not serve such tensors.
    """
    rows, _, head_dim = out.shape
    sizes = served_sizes(out, k_cache, v_cache, qkv, rope, limits_of(out.device))
    if sizes is None:
        raise ValueError(f"a kernel by clusters does not attend with out={out.shape} over k_cache={k_cache.shape}")
    logits = logits_of(head_dim, options, k_scale).options
    macros = macros_of(out, k_cache, qkv, rope, options, sizes.stages)
    kernel = loaded("decode_attention.cu", "decode_attention", tuple(macros.items()), out.device.index or 0)
    kernel.launch(
        (k_cache.shape[2] * sizes.cluster, rows), _THREADS,
        (
            out, k_cache, v_cache, qkv, page_table, kv_lens, rope.cos_sin, rope.q_norm, rope.k_norm, options.sinks,
            qkv.stride(0), page_table.stride(0), options.window_left,
            logits.scale_of(head_dim), logits.logits_soft_cap, rope.eps, float(k_scale), float(v_scale),
        ),
        shared_bytes=sizes.shared_bytes, starts_early=True, cluster=sizes.cluster,
    )  # fmt: skip
