"""Decode attention of one request over contiguous keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from graphdecode.attention.append import KV_LAYOUTS
from graphdecode.attention.paged_decode import plan_rows
from graphdecode.cache.errors import require_choice, require_tensors
from graphdecode.kernels.attention.decode_attention import decode_attention

from .decode_problem import DecodeProblem, exact_queries, planned_dtypes


def single_decode_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: float | None = None, k_scale: float | None = None,
    v_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
    sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attend from the newest token of one request to all of its keys.

    Args:
        q: [num_qo_heads, head_dim], fp16, bf16, fp32, fp8 e4m3 or e5m2.
        k: [kv_len, num_kv_heads, head_dim] (NHD) or [num_kv_heads, kv_len, head_dim] (HND), any strides; likewise.
        v: the same, with head_dim_v.
        others: see `BatchDecodeWithPagedKVCacheWrapper.plan` and `run`.

    Returns:
        The output [num_qo_heads, head_dim_v] in q's dtype; with return_lse also the base-2 log-sum-exp of the logits,
        fp32 [num_qo_heads].
    """
    require_choice("kv_layout", kv_layout, KV_LAYOUTS)
    require_tensors(q=q)
    require_tensors(q.device, k=k, v=v)
    if q.dim() != 2 or k.dim() != 3 or v.dim() != 3:
        raise ValueError(f"q must have 2 dimensions, k and v 3, got {q.dim()}, {k.dim()} and {v.dim()}")
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[:2]
    if k.shape[:2] != v.shape[:2] or k.shape[-1] != head_dim:
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)} (NHD) do not fit q {list(q.shape)}")
    q_dtype, kv_dtype = planned_dtypes(q.dtype, k.dtype, None)
    logits = (logits_soft_cap, sm_scale, rope_scale, rope_theta)
    problem = DecodeProblem(heads, kv_heads, head_dim, q_dtype, kv_dtype, pos_encoding_mode, window_left, *logits)
    if v.dtype != k.dtype:
        raise ValueError(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")
    kwargs = problem.attention_kwargs(q_scale, k_scale, v_scale)

    device, dtype = q.device, q.dtype
    q = exact_queries(q, q.dtype)
    before = torch.full((1,), kv_len - 1, dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)  # all keys are one page
    wave_items = problem.wave_items(device, v.shape[-1])
    work, items = plan_rows(before, wave_items, heads, v.shape[-1], window_left=window_left)
    out = torch.empty(1, heads, v.shape[-1], dtype=q.dtype, device=device)
    lse = torch.empty(1, heads, dtype=torch.float32, device=device) if return_lse else None
    q, k, v = (each.unsqueeze(0) for each in (q, k, v))
    decode_attention(out, lse, q, k, v, table, None, work, max_items=items, **kwargs)
    out = out[0].to(dtype)
    return (out, lse[0]) if lse is not None else out
