"""The layouts and names of the FlashInfer surface, brought down to what the kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

from graphdecode.kernels.attention.decode_attention import POSITION_MODES

KV_LAYOUTS = ("NHD", "HND")
Q_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KV_DTYPES = (*Q_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 512
PagedCache = Tensor | tuple[Tensor, Tensor]


def check_layout(kv_layout: str) -> None:
    """Raise ValueError for an unknown layout."""
    if kv_layout not in KV_LAYOUTS:
        raise ValueError(f"kv_layout must be one of {', '.join(KV_LAYOUTS)}, got {kv_layout!r}")


def check_heads(num_qo_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError for heads that do not divide."""
    for name, count in (("num_qo_heads", num_qo_heads), ("num_kv_heads", num_kv_heads)):
        if count < 1:
            raise ValueError(f"{name} must be >= 1, got {count}")
    if num_qo_heads % num_kv_heads:
        raise ValueError(f"num_qo_heads={num_qo_heads} must be a multiple of num_kv_heads={num_kv_heads}")


def check_head_dim(head_dim: int, position_mode: str) -> None:
    """Raise ValueError for a head_dim that the kernels do not take, or a position mode that there is not."""
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be in {MIN_HEAD_DIM}..{MAX_HEAD_DIM}, got {head_dim}")
    if position_mode not in POSITION_MODES:
        raise ValueError(f"pos_encoding_mode must be one of {', '.join(POSITION_MODES)}, got {position_mode!r}")
    if position_mode == "ROPE_LLAMA" and head_dim % 2:
        raise ValueError(f"ROPE_LLAMA rotates pairs and needs an even head_dim, got {head_dim}")


def check_options(window_left: int, soft_cap: float, rope_scale: float, rope_theta: float) -> None:
    """Raise ValueError for options outside their ranges."""
    if window_left < -1:
        raise ValueError(f"window_left must be >= -1 (-1: no window), got {window_left}")
    if soft_cap < 0:
        raise ValueError(f"logits_soft_cap must be >= 0 (0: no cap), got {soft_cap}")
    if rope_scale <= 0 or rope_theta <= 0:
        raise ValueError(f"rope_scale and rope_theta must be > 0, got {rope_scale} and {rope_theta}")


def dtype_of(name: str, value: str | torch.dtype, allowed: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return the dtype that a name or a dtype stands for.

    Raises:
        ValueError: it is not one of those allowed.
    """
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if found not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(str(dtype)[6:] for dtype in allowed)}, got {value!r}")
    return found


def paged_caches(paged_kv_cache: PagedCache, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Return views of the keys and values, [pages, page_size, heads, dim], whatever the layout.

    Args:
        paged_kv_cache: (k, v) of 4 dimensions each, or one tensor of 5 with keys and values at dimension 1.
        kv_layout: `NHD` [pages, page_size, heads, dim] or `HND` [pages, heads, page_size, dim].

    Raises:
        ValueError: it is neither.
    """
    if isinstance(paged_kv_cache, Tensor):
        if paged_kv_cache.dim() != 5 or paged_kv_cache.shape[1] != 2:
            raise ValueError(f"one paged_kv_cache must be [pages, 2, ...] of 5 dimensions, got {paged_kv_cache.shape}")
        k_cache, v_cache = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    else:
        k_cache, v_cache = paged_kv_cache
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "key and value caches must have 4 dimensions, the first three the same, "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(f"key and value caches must have one dtype, got {k_cache.dtype} and {v_cache.dtype}")
    if kv_layout == "HND":
        return k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    return k_cache, v_cache
