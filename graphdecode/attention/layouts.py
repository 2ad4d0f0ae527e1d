"""The layouts of a paged cache, as views in the layout of the kernels."""

from __future__ import annotations

from torch import Tensor

from graphdecode.cache import require_choice

KV_LAYOUTS = ("NHD", "HND")
PagedCache = Tensor | tuple[Tensor, Tensor]


def check_layout(kv_layout: str) -> None:
    """Raise ValueError for an unknown layout."""
    require_choice("kv_layout", kv_layout, KV_LAYOUTS)


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
        is_pair = isinstance(paged_kv_cache, tuple | list) and len(paged_kv_cache) == 2
        if not is_pair or not all(isinstance(each, Tensor) for each in paged_kv_cache):
            raise ValueError("paged_kv_cache must be a tensor, or a pair of tensors: keys and values")
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
