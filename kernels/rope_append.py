"""Between the QKV product and attention: norm of queries and keys, rotary embedding, append to the cache. One operator.

Rotary embedding (Su et al., 2021) in its half-split form: of each head's first `rot` channels, channel i and channel
`i + rot/2` are rotated by the angle of the token's position. Queries and keys may be RMS-normed per head before.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .registration import operator
from .rms_norm import rms_norm_torch

_MOST_SINGLE_COPIES = 3  # from here on one indexed copy is faster than a copy for each token


@dataclass(frozen=True)
class _Rotation:
    """Views and memory for the rotation of one number of tokens; rotating runs over the same memory every time."""

    positions: Tensor
    angles: Tensor  # float32 [t, 2, rot / 2]
    cos: Tensor
    sin: Tensor
    source: Tensor  # queries and keys as the product left them
    wide: Tensor  # float32, the same; the very same where they are float32 already
    first: Tensor
    second: Tensor
    rotated: Tensor  # float32
    rotated_first: Tensor
    rotated_second: Tensor

    @classmethod
    def of(cls, count: int, positions: Tensor, joined: Tensor, heads: int, half: int) -> "_Rotation":
        source = joined[:count, :heads]
        wide = source if source.dtype == torch.float32 else torch.empty(source.shape, dtype=torch.float32)
        rotated = torch.empty(source.shape, dtype=torch.float32)
        angles = torch.empty(count, 2, half)
        low, high = slice(0, half), slice(half, 2 * half)
        return cls(
            positions[:count],
            angles,
            angles[:, :1],
            angles[:, 1:],
            source,
            wide,
            wide[..., low],
            wide[..., high],
            rotated,
            rotated[..., low],
            rotated[..., high],
        )


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
    rotations: dict[int, _Rotation] = {}

    def append() -> None:
        count = min(int(live_count[0]), capacity)
        if count == 0:
            return
        if count not in rotations:
            rotations[count] = _Rotation.of(count, positions, joined, heads, half)
        memory = rotations[count]
        if memory.wide is not memory.source:
            memory.wide.copy_(memory.source)
        if q_norm is not None and k_norm is not None:
            rms_norm_torch(memory.rotated[:, :qo_heads], memory.wide[:, :qo_heads], q_norm, eps)
            rms_norm_torch(memory.rotated[:, qo_heads:], memory.wide[:, qo_heads:], k_norm, eps)
            memory.wide.copy_(memory.rotated)
        elif 2 * half < head_dim:
            memory.rotated.copy_(memory.wide)
        torch.index_select(cos_sin, 0, memory.positions, out=memory.angles)
        torch.mul(memory.first, memory.cos, out=memory.rotated_first).addcmul_(memory.second, memory.sin, value=-1)
        torch.mul(memory.second, memory.cos, out=memory.rotated_second).addcmul_(memory.first, memory.sin)
        q_out[:count].copy_(memory.rotated[:, :qo_heads])
        keys, values = memory.rotated[:, qo_heads:], joined[:count, heads:]
        if count <= _MOST_SINGLE_COPIES:
            for token in range(count):
                page, place = divmod(int(position_of[token]), page_size)
                place += int(pages_of[row_of[token], page]) * page_size
                key_places[place].copy_(keys[token])
                value_places[place].copy_(values[token])
        else:
            pages = pages_of[row_of[:count], position_of[:count] // page_size]
            places = torch.from_numpy(pages.astype(np.int64) * page_size + position_of[:count] % page_size)
            key_places.index_copy_(0, places, keys.to(k_cache.dtype))
            value_places.index_copy_(0, places, values.to(v_cache.dtype))

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
