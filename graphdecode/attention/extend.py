"""Attention of many new tokens a row over the cache: prefill, and chunks of it."""

from __future__ import annotations

from torch import Tensor

from graphdecode.cache import CacheScales, LayerCache
from graphdecode.kernels.attention import extend_attention as kernel
from graphdecode.kernels.attention.attention_records import AttentionOptions


def extend_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    page_table: Tensor | None,
    *,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008 (immutable)
    scales: CacheScales = CacheScales(),  # noqa: B008
) -> None:
    """Write the causal attention of each row's newest tokens over the row's cache into `out`.

    Row i has `cu_seqlens_q[i + 1] - cu_seqlens_q[i]` queries, the newest of its
    `cu_seqlens_kv[i + 1] - cu_seqlens_kv[i]` tokens, which are in the cache already.

    Args:
        out: [tokens, num_qo_heads, head_dim_v]; tokens that belong to no row are left alone.
        q: [tokens, num_qo_heads, head_dim].
        k_cache: [pages, page_size, num_kv_heads, head_dim], or [rows, max_seq, ...] without a page table.
        v_cache: the same with head_dim_v.
        cu_seqlens_q: int32 [rows + 1].
        cu_seqlens_kv: int32 [rows + 1].
        page_table: int32 [rows, max_pages]; None where the cache is contiguous: entry i holds row i.
        options: what happens to the logits.
        scales: of the cache's entries, where they have 8 bits.
    """
    kernel.extend_attention(
        out,
        None,
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        cu_seqlens_kv,
        page_table,
        options=options.scaled(q.shape[-1], scales.key),
        v_scale=scales.value,
        scales=scales.pages,
    )


def extend_over(
    cache: LayerCache,
    out: Tensor,
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    page_table: Tensor,
    options: AttentionOptions,
) -> None:
    """Do what `extend_attention` does over a layer's cache, whose scales it knows."""
    extend_attention(
        out,
        q,
        cache.keys,
        cache.values,
        cu_seqlens_q,
        cu_seqlens_kv,
        page_table,
        options=options,
        scales=cache.scales,
    )
