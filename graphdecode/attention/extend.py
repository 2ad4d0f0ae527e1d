"""Attention of several new tokens a row over the cache."""

from __future__ import annotations

from torch import Tensor

from graphdecode.kernels import extend_attention as kernel


def extend_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    page_table: Tensor,
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> None:
    """Write the causal attention of each row's new tokens into `out`; see `kernels.extend_attention` for shapes.

    Args:
        out: [t, num_qo_heads, head_dim_v].
        q: [t, num_qo_heads, head_dim].
        k_cache: of one layer.
        v_cache: of one layer.
        cu_seqlens_q: int32 [b + 1].
        cu_seqlens_kv: int32 [b + 1].
        page_table: int32 [b, pages of a row].
        sm_scale: None means `1 / sqrt(head_dim)`.
        window_left: -1 is all.
        logits_soft_cap: 0 is off.
    """
    kernel.extend_attention(
        out,
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        cu_seqlens_kv,
        page_table,
        sm_scale=q.shape[-1] ** -0.5 if sm_scale is None else sm_scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
    )
