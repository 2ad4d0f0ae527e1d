"""FlashInfer's attention over latent keys without a plan: page tables and lengths on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from graphdecode.attention.paged_decode import plan_rows
from graphdecode.cache.errors import (
    require_choice,
    require_fit,
    require_positive,
    require_range,
    require_tensors,
)

from .decode_problem import (
    MAX_TOKENS,
    OUT_DTYPES,
    device_scales,
    lse_for,
    planned_dtypes,
    require_neutral,
    result_for,
    sinks_of,
)
from .latent_attention import LN_2, LatentProblem, attend_to_latents
from .mla_rows import MLAPlanMetadata, MLARows

_BACKENDS = ("auto", "xqa", "cake", "trtllm-gen", "cute-dsl", "sparse")  # all mean the same here
_CUTE_DSL = ("auto", "modular", "monolithic")


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Tensor | list[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from each row's newest tokens to its latent keys, as its row of `block_tables` names their pages.

    Nothing is read on the host: captured once, it is right at any later tables, lengths, scales and sinks.

    Args:
        query: [b, q_len, num_heads, kv_lora_rank + qk_rope_head_dim], absorbed queries of latent vectors and those of
            rotated channels; with cum_seq_lens_q [tokens, num_heads, ...]. fp16, bf16, fp32, fp8 e4m3 or e5m2.
        kv_cache: [pages, page_size, kv_lora_rank + qk_rope_head_dim], or with 1 after the first dimension.
        workspace_buffer: part of the surface; partial results are in tensors of their own.
        qk_nope_head_dim: part of the surface: the queries are absorbed.
        kv_lora_rank: channels of latent vectors, 16..512.
        qk_rope_head_dim: rotated channels, 0..256.
        block_tables: int32 [b, max_pages], each row's pages; what is behind its length is not read.
        seq_lens: int32 or uint32 [b], tokens of each row with the new ones; 0: the row is empty.
        max_seq_len: no row is longer; a row has no more tokens than its pages in `block_tables` hold.
        out: where to write, [b, q_len, num_heads, kv_lora_rank] (like the query), contiguous, bf16, fp16 or fp32;
            None: a new tensor of bf16, or of the queries' dtype where that is fp16 or fp32.
        bmm1_scale: multiplies the logits, all else included; a number, or one float32 on the device.
        bmm2_scale: multiplies the output; likewise.
        sinks: float32 [num_heads], a logit of each head that takes weight and has no value.
        lse: where to write the log-sum-exps, fp32 [b * q_len, num_heads] or [b, q_len, num_heads], contiguous.
        return_lse: whether to return them.
        cum_seq_lens_q: int32 [b + 1], where each row's queries begin; None: each has `q_len`.
        return_lse_base: `basee` or `base2`; None: base 2.
        enable_pdl, backend, is_var_seq, cute_dsl_impl, kv_scale_format, max_q_len, multi_ctas_kv_counter_buffer and
            use_fp16_softmax: hints, without effect.
        others: of sparse attention, caches split among ranks and keys and values with tables of their own; what is not
            neutral is refused.

    Returns:
        The output, 0 for queries without keys; with return_lse also the log-sum-exps, -inf for these. A query sees no
        later token than its own.

    Raises:
        ValueError: an argument does not fit, or is not supported at this value.
    """
    require_choice("backend", backend, _BACKENDS)
    require_choice("cute_dsl_impl", cute_dsl_impl, _CUTE_DSL)
    if return_lse_base is not None:
        require_choice("return_lse_base", return_lse_base, ("basee", "base2"))
    require_neutral(
        sparse_mla_top_k=(sparse_mla_top_k, 0),
        skip_softmax_threshold_scale_factor=(skip_softmax_threshold_scale_factor or None, None),
        uses_shared_paged_kv_idx=(bool(uses_shared_paged_kv_idx), True),
        sparse_mla_top_k_lens=(sparse_mla_top_k_lens, None),
        enable_dcp=(bool(enable_dcp), False),
        cp_world=(cp_world, 1),
        cp_rank=(cp_rank, 0),
        causal_seqlens_kv_global=(causal_seqlens_kv_global, None),
    )
    require_tensors(query=query, block_tables=block_tables, seq_lens=seq_lens)
    require_range(1, MAX_TOKENS, max_seq_len=max_seq_len)
    assert seq_lens is not None
    packed = query
    if cum_seq_lens_q is None:
        if query.dim() != 4 or not query.shape[0] or not query.shape[1]:
            raise ValueError(f"query must be [rows, q_len, num_heads, channels], got {list(query.shape)}")
        packed = query.flatten(0, 1)
    problem, caches = _problem_of(packed, kv_cache, kv_lora_rank, qk_rope_head_dim)
    device, heads, rank = query.device, problem.num_heads, kv_lora_rank
    rows = _rows_of(query, block_tables, seq_lens, cum_seq_lens_q)
    rows.check_numbers(problem.page_size, len(caches[0]))
    scales = device_scales(device, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale)
    sinks = sinks_of(sinks, heads, device)
    dtypes = (query.dtype if query.dtype in OUT_DTYPES else torch.bfloat16, *OUT_DTYPES)
    out = result_for("out", out, (*query.shape[:-1], rank), dtypes, device)
    lse_shape = query.shape[:-1] if lse is not None and lse.dim() == 3 else (len(packed), heads)
    lse = lse_for(lse, lse_shape, device, return_lse=return_lse)
    _attend(problem, out.view(len(packed), heads, rank), None if lse is None else lse.view(-1, heads), packed, caches,
            rows, scales, sinks)  # fmt: skip
    if lse is not None and return_lse_base == "basee":
        lse.mul_(LN_2)
    return (out, lse) if return_lse and lse is not None else out


def xqa_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Tensor | list[Tensor] | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """Attend as `trtllm_batch_decode_with_kv_cache_mla` does; arguments of the same names are the same.

    `out` may leave out the dimension of one query a row.
    """
    if out is not None and query.dim() == 4 and query.shape[1] == 1 and out.dim() == 3:
        shape = (query.shape[0], query.shape[2], kv_lora_rank)
        out = result_for("out", out, shape, OUT_DTYPES, query.device).unsqueeze(1)
    result = trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, 0, out, bmm1_scale, bmm2_scale, sinks, enable_pdl=enable_pdl,
    )  # fmt: skip
    assert isinstance(result, Tensor)
    return result


def _problem_of(
    query: Tensor, kv_cache: Tensor, rank: int, rope_dim: int
) -> tuple[LatentProblem, tuple[Tensor, Tensor]]:
    """Return the sizes, and the two parts of keys; raises ValueError if tensors do not fit them."""
    require_tensors(query.device, kv_cache=kv_cache)
    if kv_cache.dim() == 4 and kv_cache.shape[1] == 1:
        kv_cache = kv_cache.squeeze(1)
    require_fit("query", query, ("tokens", "heads", "channels"))
    require_positive(queries=len(query))
    require_fit("kv_cache", kv_cache, ("pages", "page_size", "channels"))
    dtypes = planned_dtypes(query.dtype, kv_cache.dtype, None)
    problem = LatentProblem(query.shape[1], rank, rope_dim, kv_cache.shape[1], *dtypes)
    for name, tensor in (("query", query), ("kv_cache", kv_cache)):
        if tensor.shape[-1] != rank + rope_dim:
            raise ValueError(f"{name} must have kv_lora_rank + qk_rope_head_dim = {rank + rope_dim} channels, "
                             f"got {tensor.shape[-1]}")  # fmt: skip
    return problem, (kv_cache[..., :rank], kv_cache[..., rank:])


def _rows_of(query: Tensor, block_tables: Tensor, seq_lens: Tensor, cum_seq_lens_q: Tensor | None) -> MLARows:
    """Return the rows, with no `q_indptr` of numbers where all have as many queries."""
    require_tensors(query.device, block_tables=block_tables, seq_lens=seq_lens)
    require_fit("seq_lens", seq_lens, ("rows",), torch.int32, torch.uint32)
    require_fit("block_tables", block_tables, (seq_lens.shape[0], "pages"), torch.int32)
    lens = seq_lens.view(torch.int32)
    if cum_seq_lens_q is not None:
        require_tensors(query.device, cum_seq_lens_q=cum_seq_lens_q)
        rows = MLARows.of(MLAPlanMetadata.dense(cum_seq_lens_q, block_tables, lens), {}, query.device)
        if rows.queries not in (None, len(query)):
            raise ValueError(f"cum_seq_lens_q must end at the {len(query)} queries, got {rows.queries}")
        return rows
    require_fit("seq_lens", seq_lens, (query.shape[0],))
    return MLARows(torch.empty(0, dtype=torch.int32, device=query.device), None, block_tables, lens)


def _attend(
    problem: LatentProblem,
    out: Tensor,
    lse: Tensor | None,
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    rows: MLARows,
    scales: list[float | Tensor],
    sinks: Tensor | None,
) -> None:
    device, heads, rank = query.device, problem.num_heads, problem.head_dim_ckv
    is_ragged = rows.q_indptr.shape[0] > 0
    count, table, starts = rows.rows, rows.pages, None
    q_len = 1 if is_ragged else len(query) // count
    if is_ragged:  # each query is a row
        count, table = len(query), rows.pages.reshape(-1)
        starts, before = torch.empty(2, count, dtype=torch.int32, device=device)
        rows.as_single_queries(starts, before, problem.page_size, causal=True)
    else:
        before = rows.kv_lens.clamp(max=table.shape[1] * problem.page_size)
    work, items = plan_rows(before - 1, problem.wave_items(device, q_len), heads, rank, q_len=q_len)
    sm_scale, out_scale = scales
    latent, rotated = query[..., :rank], query[..., rank:]
    if isinstance(sm_scale, Tensor):  # it is not read on the host; float32 keeps what it makes of the queries
        latent, rotated, sm_scale = latent.float() * sm_scale, rotated.float() * sm_scale, 1.0
    result = torch.empty(out.shape, device=device) if isinstance(out_scale, Tensor) else out
    attend_to_latents(
        result, lse, (latent, rotated), caches, table, starts, work, q_len=q_len, max_items=items, sm_scale=sm_scale,
        sinks=sinks, out_scale=1.0 if isinstance(out_scale, Tensor) else out_scale,
    )  # fmt: skip
    if isinstance(out_scale, Tensor):
        out.copy_(result * out_scale)
