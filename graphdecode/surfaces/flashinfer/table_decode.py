"""FlashInfer's decode attention without a plan: page tables and lengths on the device, a launch or two a call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from graphdecode.attention.append import KV_LAYOUTS, PagedCache, paged_caches
from graphdecode.attention.paged_decode import plan_rows
from graphdecode.cache.errors import require_choice, require_fit, require_range, require_tensors
from graphdecode.kernels.attention.decode_attention import decode_attention
from graphdecode.kernels.attention.page_numbers import check_page_numbers

from .decode_problem import (
    MAX_TOKENS,
    OUT_DTYPES,
    DecodeProblem,
    device_scales,
    exact_queries,
    lse_for,
    planned_dtypes,
    require_neutral,
    result_for,
    sinks_of,
)

_BACKENDS = ("auto", "xqa", "trtllm-gen", "cake")  # all mean the same here
_LN_2 = math.log(2.0)


def trtllm_batch_decode_with_kv_cache(
    query: Tensor, kv_cache: PagedCache, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
    max_seq_len: int, bmm1_scale: float | Tensor = 1.0, bmm2_scale: float | Tensor = 1.0, window_left: int = -1,
    out: Tensor | None = None, out_dtype: torch.dtype | str | None = None, o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None, sinks: Tensor | list[Tensor] | None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, backend: str = "auto", q_len_per_req: int | None = 1, o_scale: float | None = 1.0,
    mask: Tensor | None = None, max_q_len: int | None = None, cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True, lse: Tensor | None = None, return_lse: bool = False,
    bmm1_scale_log2: Tensor | None = None, multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False, cp_world: int = 1, cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None, bf16q_fp8kv_transform_mode: str | None = None,
    request_order: Tensor | None = None, request_order_plan: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attend from each row's newest tokens to its pages, as its row of `block_tables` names them.

    Nothing is read on the host: captured once, it is right at any later tables, lengths, scales and sinks.

    Args:
        query: [b * q_len_per_req, num_qo_heads, head_dim], fp16, bf16, fp32, fp8 e4m3 or e5m2, any strides.
        kv_cache: (k, v), each [pages, num_kv_heads, page_size, head_dim] (HND) or [pages, page_size, num_kv_heads,
            head_dim] (NHD), or one tensor of 5 dimensions with 2 at dimension 1, or 1: the values are the keys.
        workspace_buffer: part of the surface; partial results are in tensors of their own.
        block_tables: int32 [b, max_pages], each row's pages; what is behind its length is not read.
        seq_lens: int32 or uint32 [b], tokens of each row with the new ones; 0: the row is empty.
        max_seq_len: no row is longer; a row has no more tokens than its pages in `block_tables` hold.
        bmm1_scale: multiplies the logits, 1 / sqrt(head_dim) included; a number, or one float32 on the device.
        bmm2_scale: multiplies the output; likewise.
        window_left: keys before a query's own that it sees; -1: all.
        out: where to write, [b * q_len_per_req, num_qo_heads, head_dim_v], contiguous.
        out_dtype: fp16, bf16, fp32, or the queries'; None: as `out`, else the queries'.
        sinks: float32 [num_qo_heads], a logit of each head that takes weight and has no value.
        kv_layout: `HND` or `NHD`.
        q_len_per_req: queries a row, causal among themselves.
        lse: where to write the log-sum-exps, fp32 [b * q_len_per_req, num_qo_heads], contiguous.
        return_lse: whether to return them.
        bmm1_scale_log2: one float32 on the device, bmm1_scale * log2(e); takes precedence over `bmm1_scale`.
        enable_pdl, backend, multi_ctas_kv_counter_buffer, bf16q_fp8kv_transform_mode: hints, without effect.
        request_order, request_order_plan: likewise.
        others: of fp4 results, tree masks, rows of several numbers of queries, sparse attention, scales of fp4 caches
            and caches split among ranks; what is not neutral is refused.

    Returns:
        The output, 0 for empty rows; with return_lse also the base-2 log-sum-exps of the logits, -inf for empty rows.

    Raises:
        ValueError: an argument does not fit, or is not supported at this value.
    """
    require_choice("backend", backend, _BACKENDS)
    require_neutral(
        o_sf_scale=(o_sf_scale, None),
        o_sf_vec_size=(o_sf_vec_size, None),
        max_q_len=(max_q_len, None),
        cum_seq_lens_q=(cum_seq_lens_q, None),
        skip_softmax_threshold_scale_factor=(skip_softmax_threshold_scale_factor or None, None),
        uses_shared_paged_kv_idx=(bool(uses_shared_paged_kv_idx), True),
        enable_block_sparse_attention=(bool(enable_block_sparse_attention), False),
        o_scale=(1.0 if o_scale is None else o_scale, 1.0),
        mask=(mask, None),
        kv_cache_sf=(kv_cache_sf, None),
        cp_world=(cp_world, 1),
        cp_rank=(cp_rank, 0),
        causal_seqlens_kv_global=(causal_seqlens_kv_global, None),
    )
    if bmm1_scale_log2 is not None:
        require_tensors(query.device, bmm1_scale_log2=bmm1_scale_log2)
        require_fit("bmm1_scale_log2", bmm1_scale_log2.reshape(-1), (1,), torch.float32)
        bmm1_scale = bmm1_scale_log2 * _LN_2
    return _attend(
        query, kv_cache, block_tables, seq_lens, max_seq_len, (bmm1_scale, bmm2_scale), window_left, sinks, kv_layout,
        q_len_per_req or 1, out, out_dtype, lse, return_lse,
    )  # fmt: skip


def xqa_batch_decode_with_kv_cache(
    query: Tensor, kv_cache: PagedCache, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
    max_seq_len: int, bmm1_scale: float | Tensor = 1.0, bmm2_scale: float | Tensor = 1.0, window_left: int = -1,
    out: Tensor | None = None, sinks: Tensor | list[Tensor] | None = None, kv_layout: str = "NHD",
    enable_pdl: bool | None = None, q_len_per_req: int | None = 1, o_scale: float | None = 1.0,
    mask: Tensor | None = None, kv_cache_sf: Any = None, q_cu_seq_lens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend as `trtllm_batch_decode_with_kv_cache` does; arguments of the same names are the same."""
    require_neutral(q_cu_seq_lens=(q_cu_seq_lens, None))
    result = trtllm_batch_decode_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, window_left,
        out, sinks=sinks, kv_layout=kv_layout, q_len_per_req=q_len_per_req, o_scale=o_scale, mask=mask,
        kv_cache_sf=kv_cache_sf,
    )  # fmt: skip
    assert isinstance(result, Tensor)
    return result


def _attend(
    query: Tensor, kv_cache: PagedCache, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int,
    scales: tuple[float | Tensor, float | Tensor], window_left: int, sinks: Tensor | list[Tensor] | None,
    kv_layout: str, q_len: int, out: Tensor | None, out_dtype: torch.dtype | str | None, lse: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    require_tensors(query=query, block_tables=block_tables, seq_lens=seq_lens)
    require_choice("kv_layout", kv_layout, KV_LAYOUTS)
    if isinstance(kv_cache, Tensor) and kv_cache.dim() == 5 and kv_cache.shape[1] == 1:
        kv_cache = (kv_cache[:, 0], kv_cache[:, 0])
    k_cache, v_cache = paged_caches(kv_cache, kv_layout)
    device, value_dim = query.device, v_cache.shape[-1]
    require_fit("query", query, ("tokens", "heads", "head_dim"))
    (tokens, heads, head_dim), (page_size, kv_heads) = query.shape, k_cache.shape[1:3]
    require_range(1, MAX_TOKENS, max_seq_len=max_seq_len)
    first_scale, last_scale = device_scales(device, bmm1_scale=scales[0], bmm2_scale=scales[1])
    problem = DecodeProblem(
        heads, kv_heads, head_dim, *planned_dtypes(query.dtype, k_cache.dtype, None), window_left=window_left,
        sm_scale=1.0 if isinstance(first_scale, Tensor) else first_scale, page_size=page_size, q_len=q_len,
    )  # fmt: skip
    problem.check_tensors(query, k_cache, device)
    rows, remainder = divmod(tokens, q_len)
    if remainder or not rows:
        raise ValueError(f"query must have q_len_per_req={q_len} queries for each row, got {tokens}")
    require_tensors(device, block_tables=block_tables, seq_lens=seq_lens)
    require_fit("block_tables", block_tables, (rows, "pages"), torch.int32)
    require_fit("seq_lens", seq_lens, (rows,), torch.int32, torch.uint32)
    out, lse = _results(query, value_dim, out, out_dtype, lse, return_lse)

    queries = exact_queries(query, out.dtype)
    if isinstance(first_scale, Tensor):  # it is not read on the host; float32 keeps what it makes of the queries
        queries = queries.float() * first_scale
    lens = seq_lens.view(torch.int32)
    before = lens.clamp(max=block_tables.shape[1] * page_size) - 1  # at most what a row's pages hold
    wave_items = problem.wave_items(device, value_dim)
    work, items = plan_rows(before, wave_items, heads, value_dim, q_len=q_len, window_left=window_left)
    kwargs = problem.attention_kwargs(None, None, None)
    kwargs["options"] = kwargs["options"]._replace(sinks=sinks_of(sinks, heads, device))
    if block_tables.is_cpu:
        check_page_numbers(block_tables, None, lens, page_size, k_cache.shape[0], problem.window_of(kwargs["options"]))
    if not isinstance(last_scale, Tensor):
        kwargs["v_scale"] = last_scale
    is_result = out.dtype in OUT_DTYPES and not isinstance(last_scale, Tensor)
    wide = torch.float32 if isinstance(last_scale, Tensor) else queries.dtype
    result = out if is_result else torch.empty(out.shape, dtype=wide, device=device)
    decode_attention(
        result, lse, queries, k_cache, v_cache, block_tables, None, work, q_len=q_len, max_items=items, **kwargs
    )
    if not is_result:
        out.copy_(result * last_scale if isinstance(last_scale, Tensor) else result)
    return (out, lse) if return_lse and lse is not None else out


def _results(
    query: Tensor,
    value_dim: int,
    out: Tensor | None,
    out_dtype: torch.dtype | str | None,
    lse: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return where to write the outputs and the log-sum-exps; raises ValueError if those given do not fit."""
    dtype = getattr(torch, out_dtype, None) if isinstance(out_dtype, str) else out_dtype
    allowed = (query.dtype, *OUT_DTYPES)
    if out_dtype is not None and dtype not in allowed:
        raise ValueError(f"out_dtype must be one of {', '.join(map(str, allowed))}, got {out_dtype!r}")
    shape = (*query.shape[:2], value_dim)
    out = result_for("out", out, shape, allowed if dtype is None else (dtype,), query.device)
    return out, lse_for(lse, shape[:2], query.device, return_lse=return_lse)
