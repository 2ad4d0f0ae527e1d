"""Decode attention over pages: one query token a row, all keys up to it.

`out = softmax(cap(sm_scale * q k^T)) v` with `cap(x) = c tanh(x / c)` where a soft cap c is set, over the keys of the
row's own pages; with a window, over the last `window_left + 1` of them.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .page_rows import row_tokens
from .registration import operator


def decode_attention_torch(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    sm_scale: float,
    window_left: int,
    logits_soft_cap: float,
) -> None:
    """Attend row by row, over each row's own pages; see `decode_attention`."""
    heads = k_cache.shape[2]
    group = q.shape[1] // heads
    tables = page_table.numpy()
    for row, length in enumerate(kv_lens.tolist()):
        if length == 0:
            out[row].zero_()
            continue
        pages = tables[row, : -(-length // k_cache.shape[1])].tolist()
        keys, values = row_tokens(k_cache, pages, length), row_tokens(v_cache, pages, length)
        if 0 <= window_left < length - 1:
            keys, values = keys[length - 1 - window_left :], values[length - 1 - window_left :]
        # the heads of a group are queries of the same keys
        queries = q[row].view(heads, group, -1)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        if logits_soft_cap > 0:
            logits = queries.float() @ keys.float().transpose(1, 2) * sm_scale
            weights = torch.softmax(logits_soft_cap * torch.tanh(logits / logits_soft_cap), -1)
            result = weights @ values.float()
        else:
            result = scaled_dot_product_attention(
                queries.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scale=sm_scale
            )
        out[row].view(heads, group, -1).copy_(result.view(heads, group, -1))


_decode_attention = operator(
    "decode_attention(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor kv_lens, "
    "float sm_scale, int window_left, float logits_soft_cap) -> ()",
    torch_version=decode_attention_torch,
)


def decode_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    sm_scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> None:
    """Write the attention of each row's query into `out`; rows of length 0 get 0.

    Args:
        out: [b, num_qo_heads, head_dim_v], contiguous.
        q: [b, num_qo_heads, head_dim], contiguous.
        k_cache: [pages, page_size, num_kv_heads, head_dim].
        v_cache: [pages, page_size, num_kv_heads, head_dim_v].
        page_table: int32 [b, pages of a row].
        kv_lens: int32 [b], from `plan_decode`.
        sm_scale: factor of the logits.
        window_left: keys before the last one that are seen; -1 is all.
        logits_soft_cap: 0 is off.
    """
    _decode_attention(out, q, k_cache, v_cache, page_table, kv_lens, sm_scale, window_left, logits_soft_cap)
