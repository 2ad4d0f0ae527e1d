"""Between the QKV product and attention: norm of queries and keys, rotary embedding, append to the cache. One operator.

Rotary embedding (Su et al., 2021) in its half-split form: of each head's first `rot` channels, channel i and channel
`i + rot/2` are rotated by the angle of the token's position. Queries and keys may be RMS-normed per head before.
"""

import torch
from torch import Tensor

from .registration import operator
from .rms_norm import rms_norm_torch


def rope_append_torch(
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv: Tensor,
    rows: Tensor,
    positions: Tensor,
    live: Tensor,
    page_table: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """Rotate and append in host memory; see `rope_append`."""
    count = min(int(live.item()), q_out.shape[0])
    if count == 0:
        return
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    qo_heads = q_out.shape[1]
    heads = qo_heads + kv_heads
    tokens = positions[:count]
    joined = qkv[:count].view(count, -1, head_dim)
    wide = joined[:, :heads].float()
    if q_norm is not None and k_norm is not None:
        rms_norm_torch(wide[:, :qo_heads], wide[:, :qo_heads], q_norm, eps)
        rms_norm_torch(wide[:, qo_heads:], wide[:, qo_heads:], k_norm, eps)
    angles = cos_sin.index_select(0, tokens)
    cos, sin = angles[:, 0].unsqueeze(1), angles[:, 1].unsqueeze(1)
    half = cos.shape[-1]
    first, second = wide[..., :half], wide[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < head_dim:
        parts.append(wide[..., 2 * half :])
    rotated = torch.cat(parts, -1)
    q_out[:count].copy_(rotated[:, :qo_heads])
    if count == 1:
        row, position = int(rows[0]), int(tokens[0])
        page, place = int(page_table[row, position // page_size]), position % page_size
        k_cache[page, place].copy_(rotated[0, qo_heads:])
        v_cache[page, place].copy_(joined[0, heads:])
        return
    pages = page_table[rows[:count], tokens // page_size]
    places = (pages * page_size + tokens % page_size).long()
    k_cache.flatten(0, 1).index_copy_(0, places, rotated[:, qo_heads:].to(k_cache.dtype))
    v_cache.flatten(0, 1).index_copy_(0, places, joined[:, heads:].to(v_cache.dtype))


_rope_append = operator(
    "rope_append(Tensor(a!) q_out, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor qkv, Tensor rows, Tensor positions, "
    "Tensor live, Tensor page_table, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, float eps) -> ()",
    torch_version=rope_append_torch,
)


def rope_append(
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv: Tensor,
    rows: Tensor,
    positions: Tensor,
    live: Tensor,
    page_table: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Write rotated queries into `q_out`, and rotated keys and values into the cache.

    Args:
        q_out: [t, num_qo_heads, head_dim], contiguous.
        k_cache: [pages, page_size, num_kv_heads, head_dim]; the last page is the trash page.
        v_cache: the same shape.
        qkv: [t, (num_qo_heads + 2 num_kv_heads) head_dim], contiguous: queries, keys, values.
        rows: int32 [t], the page-table row of each token.
        positions: int32 [t], its position in its sequence.
        live: int32 [1]; tokens from there on are padding and reach at most the trash page.
        page_table: int32 [b, pages of a row].
        cos_sin: float32 [max positions, 2, rot/2], cosines and sines by position.
        q_norm: [head_dim] or None, weight of the queries' RMSNorm.
        k_norm: [head_dim] or None, weight of the keys' RMSNorm.
        eps: of these norms.
    """
    _rope_append(q_out, k_cache, v_cache, qkv, rows, positions, live, page_table, cos_sin, q_norm, k_norm, eps)
