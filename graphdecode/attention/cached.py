"""Attention over the results of `InferenceParams.step`."""

from __future__ import annotations

import torch
from torch import Tensor

from graphdecode.attention.paged_decode import PagedDecodeAttention
from graphdecode.cache.errors import require_choice
from graphdecode.kernels.attention.attention_records import AttentionOptions
from graphdecode.kernels.attention.extend_attention import extend_attention

QKV_FORMATS = ("bshd", "sbhd_2bshd", "thd_2bshd")


def cached_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    *,
    qkv_format: str,
    page_table: Tensor | None = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from a step's new tokens to all cached tokens of their sequences, causally.

    With one token per row, long rows are split over the processors. All lengths are read on the device.

    Args:
        q: the step's queries: `bshd` [b, s, hq, d], `sbhd_2bshd` [s, b, hq, d], `thd_2bshd` [t, hq, d] packed by
            cu_seqlens_q (a trailing pad is allowed).
        k_cache: [rows, max_seq, hkv, d], or with a page table [pages, page_size, hkv, d].
        v_cache: the same with head_dim_v.
        cu_seqlens_q: int32 [max_batch + 1], new tokens, cumulative, as `InferenceParams.step` returns them.
        cu_seqlens_kv: int32 [max_batch + 1], all tokens, cumulative.
        qkv_format: one of `QKV_FORMATS`.
        page_table: int32 [max_batch, max_pages] of a paged cache.
        sm_scale: multiplies the logits; None: 1 / sqrt(d).
        window_left: keeps the newest window_left + 1 keys of each query; -1: all.
        logits_soft_cap: caps the logits; 0: no cap.
        sinks: float32 [hq], a logit of each head that takes weight and has no value.

    Returns:
        The output in q's format and dtype, [..., hq, head_dim_v]; zero for padding.

    Raises:
        ValueError: the format is unknown, or q does not fit it or the cache.
    """
    require_choice("qkv_format", qkv_format, QKV_FORMATS)
    dims = 3 if qkv_format == "thd_2bshd" else 4
    if q.dim() != dims:
        raise ValueError(f"q must have {dims} dimensions in the format {qkv_format}, got the shape {tuple(q.shape)}")
    heads, kv_heads = q.shape[-2], k_cache.shape[2]
    if heads % kv_heads or q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(
            f"q [..., {heads}, {q.shape[-1]}] does not fit a key cache of {kv_heads} heads of {k_cache.shape[-1]}"
        )
    out = torch.zeros(*q.shape[:-1], v_cache.shape[-1], dtype=q.dtype, device=q.device)
    rows = cu_seqlens_q.shape[0] - 1
    q_rows, out_rows = q, out
    if dims == 4:
        if qkv_format == "sbhd_2bshd":
            q_rows, out_rows = q.transpose(0, 1), out.transpose(0, 1)
        if q_rows.shape[0] > rows:
            raise ValueError(f"q has {q_rows.shape[0]} rows, but cu_seqlens_q holds {rows}")
        rows = q_rows.shape[0]
    options = AttentionOptions(sm_scale, window_left, logits_soft_cap, sinks)
    lengths = (cu_seqlens_q[: rows + 1], cu_seqlens_kv[: rows + 1])
    if dims == 4 and q_rows.shape[1] == 1:
        new, kv_lens = (sums.diff() for sums in lengths)
        before = torch.where(new > 0, kv_lens, 0) - 1  # -1: the row attends to nothing
        if page_table is None:  # each row of the cache is one page
            page_table = torch.arange(rows, dtype=torch.int32, device=q.device).unsqueeze(1)
        attend_from_rows(
            out.view(rows, heads, -1), q.reshape(rows, heads, -1), k_cache, v_cache, before, page_table, options
        )
    else:
        options = options.scaled(q.shape[-1])
        extend_attention(out_rows, None, q_rows, k_cache, v_cache, *lengths, page_table, options=options)
    return out


def attend_from_rows(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    before: Tensor,
    page_table: Tensor,
    options: AttentionOptions,
) -> None:
    """Attend from one token a row, [rows, heads, dim], to the keys 0..before of its pages; -1: its output is 0."""
    rows, heads, head_dim = q.shape
    if not rows:
        return
    attention = PagedDecodeAttention(
        max_batch_size=rows, num_qo_heads=heads, num_kv_heads=k_cache.shape[2], head_dim=head_dim,
        head_dim_v=v_cache.shape[-1], page_size=k_cache.shape[1], max_pages_per_row=page_table.shape[1],
        dtype=q.dtype, kv_dtype=k_cache.dtype, windows=(options.window_left,), device=q.device,
    )  # fmt: skip
    attention.plan(before, torch.full((1,), rows, dtype=torch.int32, device=q.device))
    attention.run(out, q, k_cache, v_cache, page_table[:rows], options)
