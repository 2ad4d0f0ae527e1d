"""Extend attention: many new tokens a row over the row's cache, causal and bottom-right aligned, rows ragged.

Row i has `cu_seqlens_q[i + 1] - cu_seqlens_q[i]` queries, which are the newest of its
`cu_seqlens_kv[i + 1] - cu_seqlens_kv[i]` tokens. It serves prefill, chunks of prefill and speculation.
"""

import numpy as np
from torch import Tensor

from .attention_torch import LOG2_E, LogitOptions, attend_row, row_entries
from .registration import operator


def extend_attention_torch(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    page_table: Tensor | None,
    sm_scale: float,
    window_left: int,
    soft_cap: float,
) -> None:
    """Attend row by row on the host's threads, each over its own pages; see `extend_attention`."""
    kv_heads = k_cache.shape[2]
    options = LogitOptions(sm_scale, 1.0, window_left, soft_cap)
    q_ends = cu_seqlens_q.tolist()
    kv_ends = cu_seqlens_kv.tolist()
    pages = None if page_table is None else page_table.numpy()
    for row in range(len(q_ends) - 1):
        begin, queries = q_ends[row], q_ends[row + 1] - q_ends[row]
        if queries <= 0:
            continue
        kv_len = kv_ends[row + 1] - kv_ends[row]
        chosen = (row, slice(0, queries)) if q.dim() == 4 else slice(begin, begin + queries)
        row_out = out[chosen]  # [queries, hq, dv]
        if kv_len <= 0:
            row_out.zero_()
            if lse is not None:
                lse[chosen].fill_(-float("inf"))
            continue
        first = max(kv_len - queries - window_left, 0) if window_left >= 0 else 0
        own = np.array([row], dtype=np.int32) if pages is None else pages[row]
        row_q = q[chosen].unflatten(1, (kv_heads, -1)).transpose(0, 1).unsqueeze(0)  # [1, hkv, queries, group, d]
        k, v = row_entries(k_cache, v_cache, own, first, kv_len)
        result, row_lse = attend_row(row_q, k, v, kv_len, options)
        row_out.unflatten(1, (kv_heads, -1)).copy_(result[0].transpose(0, 1))
        if lse is not None:
            lse[chosen].unflatten(1, (kv_heads, -1)).copy_(row_lse[0].transpose(0, 1) * LOG2_E)


_extend_attention = operator(
    "extend_attention(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k_cache, Tensor v_cache, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_kv, Tensor? page_table, float sm_scale, int window_left, "
    "float soft_cap) -> ()",
    torch_version=extend_attention_torch,
)


def extend_attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    page_table: Tensor | None,
    *,
    sm_scale: float,
    window_left: int = -1,
    soft_cap: float = 0.0,
) -> None:
    """Write the causal attention of each row's newest tokens over the row's own pages into `out`.

    Args:
        out: like q with dv, any strides but the last. What belongs to no query is left alone.
        lse: fp32, like out without its last dimension, base 2; or None.
        q: [tokens, hq, d] packed, or [rows, width, hq, d] with each row's queries at its beginning.
        k_cache: [pages, page_size, hkv, d], any strides.
        v_cache: [pages, page_size, hkv, dv].
        cu_seqlens_q: int32 [rows + 1], queries of each row, cumulative.
        cu_seqlens_kv: int32 [rows + 1], tokens of each row, queries included, cumulative.
        page_table: int32 [rows, max_pages]; None where page i of the cache is row i.
        sm_scale: multiplies the logits.
        window_left: keeps the newest `window_left + 1` keys of each query where it is >= 0.
        soft_cap: caps the logits where it is > 0.
    """
    _extend_attention(
        out, lse, q, k_cache, v_cache, cu_seqlens_q, cu_seqlens_kv, page_table, sm_scale, window_left, soft_cap
    )
