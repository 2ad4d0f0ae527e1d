"""Attention of several new tokens a row over pages: chunks of prompts.

Ragged and causal from the bottom right: of a row with n keys and m queries, query i sees the first n - m + i + 1 keys,
with a window only the last `window_left + 1` of these.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .page_rows import row_tokens
from .registration import operator


def extend_attention_torch(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    page_table: Tensor,
    sm_scale: float,
    window_left: int,
    logits_soft_cap: float,
) -> None:
    """Attend row by row, over each row's own pages; see `extend_attention`."""
    q_ends, kv_ends = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
    tables = page_table.numpy()
    group = q.shape[1] // k_cache.shape[2]
    for row in range(len(q_ends) - 1):
        queries = q[q_ends[row] : q_ends[row + 1]].transpose(0, 1)
        count, length = queries.shape[1], kv_ends[row + 1] - kv_ends[row]
        if count == 0:
            continue
        pages = tables[row, : -(-length // k_cache.shape[1])].tolist()
        keys = row_tokens(k_cache, pages, length).transpose(0, 1)
        values = row_tokens(v_cache, pages, length).transpose(0, 1)
        positions = torch.arange(length - count, length).unsqueeze(1)
        places = torch.arange(length).unsqueeze(0)
        mask = places <= positions
        if window_left >= 0:
            mask &= places >= positions - window_left
        if logits_soft_cap > 0:
            wide = keys.float().repeat_interleave(group, 0)
            logits = queries.float() @ wide.transpose(1, 2) * sm_scale
            logits = (logits_soft_cap * torch.tanh(logits / logits_soft_cap)).masked_fill(~mask, float("-inf"))
            result = torch.softmax(logits, -1) @ values.float().repeat_interleave(group, 0)
        else:
            result = scaled_dot_product_attention(
                queries.unsqueeze(0),
                keys.unsqueeze(0),
                values.unsqueeze(0),
                attn_mask=mask,
                scale=sm_scale,
                enable_gqa=group > 1,
            ).squeeze(0)
        out[q_ends[row] : q_ends[row + 1]].copy_(result.transpose(0, 1))


_extend_attention = operator(
    "extend_attention(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_kv, Tensor page_table, float sm_scale, int window_left, float logits_soft_cap) -> ()",
    torch_version=extend_attention_torch,
)


def extend_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    page_table: Tensor,
    *,
    sm_scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> None:
    """Write the attention of each row's new tokens into `out`; their keys are in the cache already.

    Args:
        out: [t, num_qo_heads, head_dim_v], contiguous.
        q: [t, num_qo_heads, head_dim], the rows one after another.
        k_cache: [pages, page_size, num_kv_heads, head_dim].
        v_cache: [pages, page_size, num_kv_heads, head_dim_v].
        cu_seqlens_q: int32 [b + 1], where each row's queries begin.
        cu_seqlens_kv: int32 [b + 1], cumulative keys, the new tokens' included.
        page_table: int32 [b, pages of a row].
        sm_scale: factor of the logits.
        window_left: keys before a query's own that it sees; -1 is all.
        logits_soft_cap: 0 is off.
    """
    _extend_attention(
        out, q, k_cache, v_cache, cu_seqlens_q, cu_seqlens_kv, page_table, sm_scale, window_left, logits_soft_cap
    )
