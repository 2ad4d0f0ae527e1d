"""Appending new keys and values to a paged cache, FlashInfer's way: pages listed one row after another."""

from __future__ import annotations

import torch
from torch import Tensor

from graphdecode.cache.errors import require_choice, require_fit, require_tensors
from graphdecode.kernels.surfaces.cache_append import paged_append

KV_LAYOUTS = ("NHD", "HND")
PagedCache = Tensor | tuple[Tensor, Tensor]


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


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Return the tokens of each row, int32 [b]: `(pages - 1) * page_size + last_page_len`, 0 for rows without pages.

    Args:
        kv_indptr: int32 [b + 1], where each row's pages begin.
        kv_last_page_len: int32 [b], tokens in each row's last page.
        page_size: tokens a page.

    Raises:
        ValueError: the shapes do not fit, or page_size is less than 1.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be >= 1, got {page_size}")
    if kv_indptr.dim() != 1 or kv_last_page_len.shape != (kv_indptr.shape[0] - 1,):
        raise ValueError(
            f"kv_last_page_len must have one entry less than kv_indptr, got {tuple(kv_last_page_len.shape)} and "
            f"{tuple(kv_indptr.shape)}"
        )
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0).to(torch.int32)


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the row and the position of each appended token, both int32 [nnz].

    The tokens of row i are `append_indptr[i]` to `append_indptr[i + 1]`, and are the newest of its `seq_lens[i]`
    tokens. Entries past `append_indptr[-1]` get row -1, which `append_paged_kv_cache` skips. Nothing is read on the
    host.

    Args:
        append_indptr: int32 [b + 1].
        seq_lens: int32 [b], tokens of each row, the appended ones included.
        nnz: how many entries to make.
        batch_indices, positions: int32 [nnz], where to write them; None: new tensors.

    Raises:
        ValueError: the shapes do not fit, or nnz is negative.
    """
    if nnz < 0:
        raise ValueError(f"nnz must be >= 0, got {nnz}")
    if append_indptr.dim() != 1 or seq_lens.shape != (append_indptr.shape[0] - 1,):
        raise ValueError(
            f"seq_lens must have one entry less than append_indptr, got {tuple(seq_lens.shape)} and "
            f"{tuple(append_indptr.shape)}"
        )
    for name, tensor in (("batch_indices", batch_indices), ("positions", positions)):
        if tensor is not None:
            require_tensors(append_indptr.device, **{name: tensor})
            require_fit(name, tensor, (nnz,), torch.int32)
    tokens = torch.arange(nnz, dtype=torch.int32, device=append_indptr.device)
    rows, row_positions = torch.full_like(tokens, -1), torch.zeros_like(tokens)
    if seq_lens.shape[0]:
        row = torch.searchsorted(append_indptr[1:].contiguous(), tokens, right=True).clamp(max=seq_lens.shape[0] - 1)
        inside = tokens < append_indptr[-1]
        rows = torch.where(inside, row, -1).to(torch.int32)
        row_positions = torch.where(inside, seq_lens[row] - append_indptr[row + 1] + tokens, 0).to(torch.int32)
    return (
        rows if batch_indices is None else batch_indices.copy_(rows),
        row_positions if positions is None else positions.copy_(row_positions),
    )


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: PagedCache,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write new keys and values to their places in the pages.

    Args:
        append_key: [nnz, num_kv_heads, head_dim].
        append_value: [nnz, num_kv_heads, head_dim_v].
        batch_indices: int32 [nnz], the row of each token; -1: the token is skipped.
        positions: int32 [nnz], its position in the row. Positions past the row's pages are skipped.
        paged_kv_cache: (k, v), or one tensor of 5 dimensions with keys and values at dimension 1.
        kv_indices: int32, pages of all rows, one row after another.
        kv_indptr: int32 [b + 1], where each row's pages begin.
        kv_last_page_len: int32 [b]; part of the surface, positions say all that is needed.
        kv_layout: `NHD` [pages, page_size, heads, dim] or `HND` [pages, heads, page_size, dim].

    Raises:
        ValueError: shapes, dtypes or the layout do not fit.
    """
    require_choice("kv_layout", kv_layout, KV_LAYOUTS)
    k_cache, v_cache = paged_caches(paged_kv_cache, kv_layout)
    require_tensors(kv_last_page_len=kv_last_page_len)
    require_tensors(k_cache.device, append_key=append_key, append_value=append_value)
    if not (append_key.is_floating_point() and append_value.is_floating_point()):
        raise ValueError(f"keys and values must be floating-point, got {append_key.dtype} and {append_value.dtype}")
    metadata = {
        "batch_indices": batch_indices,
        "positions": positions,
        "kv_indices": kv_indices,
        "kv_indptr": kv_indptr,
    }
    require_tensors(k_cache.device, **metadata)
    require_fit("append_key", append_key, ("tokens", *k_cache.shape[2:]))
    tokens = append_key.shape[0]
    require_fit("append_value", append_value, (tokens, *v_cache.shape[2:]))
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError("the last dimension of the cache must be contiguous")
    for name, tensor in metadata.items():
        require_fit(name, tensor, ("entries" if name.startswith("kv_") else tokens,), torch.int32)
    require_fit("kv_last_page_len", kv_last_page_len, (kv_indptr.shape[0] - 1,))
    paged_append(k_cache, v_cache, append_key, append_value, batch_indices, positions, kv_indices, kv_indptr)


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Write new latent vectors and rotated channels to their places in the pages.

    Args:
        append_ckv: [nnz, head_dim_ckv].
        append_kpe: [nnz, head_dim_kpe].
        batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len: as for `append_paged_kv_cache`.
        ckv_cache: [pages, page_size, head_dim_ckv], strided but for the last dimension; a view of one tensor, too.
        kpe_cache: [pages, page_size, head_dim_kpe].

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    parts = {"append_ckv": append_ckv, "append_kpe": append_kpe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
    require_tensors(ckv_cache.device if isinstance(ckv_cache, Tensor) else None, **parts)
    for name, part in parts.items():
        require_fit(
            name, part, ("tokens", "channels") if name.startswith("append") else ("pages", "page_size", "channels")
        )
    require_fit("kpe_cache", kpe_cache, (*ckv_cache.shape[:2], "channels"), ckv_cache.dtype)
    require_fit("append_ckv", append_ckv, ("tokens", ckv_cache.shape[2]))
    require_fit("append_kpe", append_kpe, (len(append_ckv), kpe_cache.shape[2]))
    append_paged_kv_cache(
        append_ckv.unsqueeze(1), append_kpe.unsqueeze(1), batch_indices, positions,
        (ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2)), kv_indices, kv_indptr, kv_last_page_len,
    )  # fmt: skip
