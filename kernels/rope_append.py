"""Between the QKV product and attention: norm of queries and keys, rotary embedding, append to the cache. One operator.

Rotary embedding (Su et al., 2021) in its half-split form: of each head's first `rot` channels, channel i and channel
`i + rot/2` are rotated by the angle of the token's position. Queries and keys may be RMS-normed per head before.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .registration import operator
from .rms_norm import rms_norm_torch

_MOST_SINGLE_COPIES = 3  # from here on one indexed copy is faster than a copy for each token


def bind_rope_append(
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
) -> Callable[[], None]:
    """Return rotation and append of fixed tensors in host memory; see `rope_append`."""
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    capacity, qo_heads = q_out.shape[:2]
    heads = qo_heads + kv_heads
    half = cos_sin.shape[-1]
    key_places, value_places = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    joined = qkv.view(capacity, heads + kv_heads, head_dim)
    live_count, row_of, position_of, pages_of = live.numpy(), rows.numpy(), positions.numpy(), page_table.numpy()

    def append() -> None:
        count = min(int(live_count[0]), capacity)
        if count == 0:
            return
        wide = joined[:count, :heads].float()
        if q_norm is not None and k_norm is not None:
            normed = torch.empty_like(wide)
            rms_norm_torch(normed[:, :qo_heads], wide[:, :qo_heads], q_norm, eps)
            rms_norm_torch(normed[:, qo_heads:], wide[:, qo_heads:], k_norm, eps)
            wide = normed
        cos, sin = cos_sin.index_select(0, positions[:count]).unsqueeze(1).unbind(2)
        rotated = torch.empty_like(wide) if 2 * half == head_dim else wide.clone()
        first, second = wide[..., :half], wide[..., half : 2 * half]
        torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=rotated[..., half : 2 * half]).addcmul_(first, sin)
        q_out[:count].copy_(rotated[:, :qo_heads])
        pages = pages_of[row_of[:count], position_of[:count] // page_size]
        places = pages.astype(np.int64) * page_size + position_of[:count] % page_size
        if count <= _MOST_SINGLE_COPIES:
            for token, place in enumerate(places.tolist()):
                key_places[place].copy_(rotated[token, qo_heads:])
                value_places[place].copy_(joined[token, heads:])
        else:
            index = torch.from_numpy(places)
            key_places.index_copy_(0, index, rotated[:, qo_heads:].to(k_cache.dtype))
            value_places.index_copy_(0, index, joined[:count, heads:].to(v_cache.dtype))

    return append


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
    bind_rope_append(q_out, k_cache, v_cache, qkv, rows, positions, live, page_table, cos_sin, q_norm, k_norm, eps)()


_rope_append = operator(
    "rope_append(Tensor(a!) q_out, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor qkv, Tensor rows, Tensor positions, "
    "Tensor live, Tensor page_table, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, float eps) -> ()",
    torch_version=rope_append_torch,
    bound_version=bind_rope_append,
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
