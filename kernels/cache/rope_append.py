"""Norm of queries and keys, rotary embedding, and append to the cache, in one operator.

Rotary embedding (Su et al., 2021) in its half-split form: of each head's first `rot` channels, channel i and channel `i
+ rot/2` are rotated by the angle of the token's position; layers without positions have `rot` 0. Queries and keys may
be RMS-normed before, per head or over all heads.
"""

import torch
from torch import Tensor

from ..attention.attention_records import Pages, QKNormRope, RopeMeta
from ..attention.attention_tile import cache_bytes, int8_codes, int8_scale, mixed_tile, quantize, to_compute
from ..native.library import CODES
from ..native.optional_triton import tl, triton
from ..native.registration import AnyElement, Int32, Wide, Written, operator
from ..norm.rms_norm import normed
from .kv_format import PageScales, format_of, mixed, within


@triton.jit
def heads_scale(x, heads, eps, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return 1 / rms of `heads` adjacent heads."""
    dims = tl.arange(0, BLOCK_D)
    squares = tl.zeros([HEADS, BLOCK_D], tl.float32)
    for begin in range(0, heads, HEADS):
        head = begin + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(x + head[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += values * values
    return 1.0 / tl.sqrt(tl.sum(squares) / (heads * HEAD_DIM) + eps)


@triton.jit
def _keep(x, to, inside, unit, scales, scales_at, is_head, KV_BITS: tl.constexpr, IS_FP8: tl.constexpr):
    """Write heads [HEADS, BLOCK_D] to a cache, with their scales if it has any."""
    element = to.dtype.element_ty
    if KV_BITS == "int8":
        of_heads = int8_scale(x, 1)
        tl.store(scales + scales_at, of_heads, mask=is_head)
        tl.store(to, int8_codes(x, of_heads.to(tl.float32)[:, None]), mask=inside)
    elif IS_FP8:
        tl.store(to, quantize(x / unit, KV_BITS, element), mask=inside)
    else:
        tl.store(to, quantize(x, KV_BITS, element), mask=inside)


# One program takes one token and HEADS of its heads: it reads them (queries and keys twice, the second time from L1,
# for the other half of each pair), their position's cosines and sines, and writes queries to `q_out`, keys and values
# to the cache: 2 * HEADS * HEAD_DIM * itemsize bytes. Padding tokens read and write nothing.
@triton.jit
def _rope_append_kernel(
    q_out,
    cache,
    rope,
    qkv,
    rows,
    positions,
    live,
    qo_heads,
    kv_heads,
    value_heads,
    qkv_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_BITS: tl.constexpr,
    ROPE: tl.constexpr,
):
    HALF: tl.constexpr = ROPE.HALF
    HEADS: tl.constexpr = ROPE.HEADS
    token = tl.program_id(0)
    if token >= tl.load(live):
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK_D)
    source = qkv + token.to(tl.int64) * qkv_stride
    position = tl.load(positions + token)
    row = tl.load(rows + token).to(tl.int64)
    page = tl.load(cache.table + row * cache.table_stride + position // PAGE_SIZE).to(tl.int64)
    slot = position % PAGE_SIZE

    is_query = head < qo_heads
    is_key = (head >= qo_heads) & (head < qo_heads + kv_heads)
    is_rotated = (is_query | is_key)[:, None] & (dims < HEAD_DIM)[None, :]
    other = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    x = tl.load(source + head[:, None] * HEAD_DIM + dims[None, :], mask=is_rotated, other=0.0).to(tl.float32)
    y = tl.load(source + head[:, None] * HEAD_DIM + other[None, :], mask=is_rotated, other=0.0).to(tl.float32)
    if ROPE.NORMS_ALL:
        q_scale = heads_scale(source, qo_heads, rope.eps, HEAD_DIM, HEADS, BLOCK_D)
        k_scale = heads_scale(source + qo_heads * HEAD_DIM, kv_heads, rope.eps, HEAD_DIM, HEADS, BLOCK_D)
        scale = tl.where(is_query, q_scale, k_scale)[:, None]
        q_at = rope.q_norm + head[:, None] * HEAD_DIM
        k_at = rope.k_norm + (head - qo_heads)[:, None] * HEAD_DIM
        for_q = is_query[:, None] & is_rotated
        for_k = is_key[:, None] & is_rotated
        gain = tl.load(q_at + dims[None, :], mask=for_q, other=0.0) + tl.load(
            k_at + dims[None, :], mask=for_k, other=0.0
        )
        x = x * scale * gain
        gain = tl.load(q_at + other[None, :], mask=for_q, other=0.0) + tl.load(
            k_at + other[None, :], mask=for_k, other=0.0
        )
        y = y * scale * gain
    elif ROPE.HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + rope.eps)
        valid = dims < HEAD_DIM
        q_gain = tl.load(rope.q_norm + dims, mask=valid, other=0.0).to(tl.float32)
        k_gain = tl.load(rope.k_norm + dims, mask=valid, other=0.0).to(tl.float32)
        x = x * scale[:, None] * tl.where(is_query[:, None], q_gain[None, :], k_gain[None, :])
        q_gain = tl.load(rope.q_norm + other, mask=valid, other=0.0).to(tl.float32)
        k_gain = tl.load(rope.k_norm + other, mask=valid, other=0.0).to(tl.float32)
        y = y * scale[:, None] * tl.where(is_query[:, None], q_gain[None, :], k_gain[None, :])
    pair = tl.where(dims < HALF, dims, dims - HALF)
    paired = dims < 2 * HALF
    angles = rope.cos_sin + position.to(tl.int64) * (2 * HALF)
    cos = tl.load(angles + pair, mask=paired, other=1.0)
    sin = tl.load(angles + HALF + pair, mask=paired, other=0.0)
    rotated = x * cos[None, :] + y * tl.where(dims < HALF, -sin, sin)[None, :]
    if KV_BITS == "int8":
        rotated = mixed_tile(rotated, HEADS, BLOCK_D, HEAD_DIM)
    element: tl.constexpr = q_out.dtype.element_ty
    tl.store(
        q_out + (token.to(tl.int64) * qo_heads + head)[:, None] * HEAD_DIM + dims[None, :],
        to_compute(rotated, element) if KV_BITS == "int8" else rotated.to(element),
        mask=is_query[:, None] & is_rotated,
    )
    scales_at = page * cache.scales_page_stride + slot
    k_at = cache.k_cache + page * cache.k_page_stride + slot * cache.k_token_stride
    key_head = head - qo_heads
    inside = is_key[:, None] & is_rotated
    k_at = k_at + (key_head * cache.k_head_stride)[:, None] + dims[None, :]
    k_scales = scales_at + key_head * cache.scales_head_stride
    _keep(rotated, k_at, inside, cache.k_unit, cache.k_scales, k_scales, is_key, KV_BITS, ROPE.IS_FP8)

    value_head = head - qo_heads - kv_heads
    is_value = (value_head >= 0) & (value_head < value_heads)
    inside = is_value[:, None] & (dims < HEAD_DIM)[None, :]
    value = tl.load(source + head[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    v_at = cache.v_cache + page * cache.v_page_stride + slot * cache.v_token_stride
    v_at = v_at + (value_head * cache.v_head_stride)[:, None] + dims[None, :]
    v_scales = scales_at + value_head * cache.scales_head_stride
    _keep(value, v_at, inside, cache.v_unit, cache.v_scales, v_scales, is_value, KV_BITS, ROPE.IS_FP8)


def rope_append_triton(
    q_out, k_cache, v_cache, qkv, rows, positions, live, page_table, rope, k_scale=1.0, v_scale=1.0, scales=None
) -> None:
    """Launch the kernel; see `rope_append`."""
    tokens, qo_heads, head_dim = q_out.shape
    page_size, kv_heads = k_cache.shape[1:3]
    value_heads = v_cache.shape[2]
    meta = RopeMeta.of(rope, k_cache)
    if format_of(k_cache.dtype).is_mixed and head_dim > 128:
        meta = meta._replace(HEADS=2)  # mixing four heads in a program spills registers
    elif head_dim > 512:  # latent keys
        meta = meta._replace(HEADS=1)
    _rope_append_kernel[(tokens, triton.cdiv(qo_heads + kv_heads + value_heads, meta.HEADS))](
        q_out, Pages.of(k_cache, v_cache, scales, page_table, k_unit=k_scale, v_unit=v_scale), rope, qkv,
        rows, positions, live, qo_heads, kv_heads, value_heads, qkv.stride(0),
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), PAGE_SIZE=page_size,
        KV_BITS=cache_bytes(k_cache)[1], ROPE=meta, num_warps=2,
    )  # fmt: skip


def _is_served(q_out, k_cache, v_cache, qkv, page_table, rope) -> bool:
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q_out.dtype, *CODES):
        return False
    return all(tensor.is_contiguous() for tensor in (q_out, k_cache, v_cache, qkv, page_table, rope.cos_sin))


@operator(triton_version=rope_append_triton, is_compiled=_is_served)
def rope_append(
    q_out: Written[Tensor],
    k_cache: Written[AnyElement],
    v_cache: Written[AnyElement],
    qkv: Wide,
    rows: Int32,
    positions: Int32,
    live: Int32,
    page_table: Int32,
    rope: QKNormRope,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scales: Written[PageScales] | None = None,
) -> None:
    """Write rotated queries into `q_out`, and rotated keys and values into the cache.

    For an int8 cache, queries and keys are `mixed` after the rotation, which does not change their products.

    Args:
        q_out: [t, num_qo_heads, head_dim], contiguous.
        k_cache: [pages, page_size, num_kv_heads, head_dim], of any float type, or int8 with `scales`; the last page is
            the null page. fp8 e4m3 saturates.
        v_cache: the same shape; or of no heads, where only keys are kept.
        qkv: [t, (num_qo_heads + 2 num_kv_heads) head_dim], contiguous: queries, keys, values, if those are kept, of
            q_out's dtype, or fp32.
        rows: int32 [t], the page-table row of each token.
        positions: int32 [t], position of each token in its sequence.
        live: int32 [1]; tokens from there on are padding and write at most the null page.
        page_table: int32 [b, pages per row].
        rope: norm and rotation of queries and keys.
        k_scale: divides keys before they become fp8.
        v_scale: the same for values.
        scales: scales of an int8 cache, written with the entries.
    """
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    capacity, qo_heads = q_out.shape[:2]
    count, half = min(int(live), capacity), rope.cos_sin.shape[-1]
    if count <= 0:
        return
    position, row = positions[:count].long(), rows[:count].long()
    joined = qkv.view(capacity, -1, head_dim)[:count]
    queries, keys, values = joined.split((qo_heads, kv_heads, v_cache.shape[2]), dim=1)
    if rope.q_norm is not None and rope.k_norm is not None:
        queries, keys = _normed_heads(queries, rope.q_norm, rope.eps), _normed_heads(keys, rope.k_norm, rope.eps)
    cos, sin = rope.cos_sin[position].unsqueeze(2).unbind(1)  # [t, 1, rot / 2] each
    wide = torch.cat((queries, keys), dim=1).float()
    first, second = wide[..., :half], wide[..., half : 2 * half]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, wide[..., 2 * half :]), dim=-1)
    if format_of(k_cache.dtype).is_mixed:
        rotated = mixed(rotated)
        q_out[:count] = within(rotated[:, :qo_heads], q_out.dtype)
    else:
        q_out[:count] = rotated[:, :qo_heads]
    pages, slots = page_table[row, position // page_size].long(), position % page_size
    units, of_pages = (k_scale, v_scale), scales or (None, None)
    for cache, new, unit, cache_scales in zip(
        (k_cache, v_cache), (rotated[:, qo_heads:], values), units, of_pages, strict=True
    ):
        format_of(cache.dtype).write(cache, (pages, slots), new, unit, cache_scales)


def _normed_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [t, heads, head_dim], per head or over all, in fp32."""
    if weight.shape[0] == x.shape[2]:
        return normed(x, weight, eps)
    return normed(x.flatten(1), weight, eps).view(x.shape)
