"""Attention of a decode step behind the QKV product, in one launch: norm of queries and keys, rotary embedding, append
of the new token to the cache, and attention over the row, split over the chip.

The formulas are those of `rope_append` and `decode_attention`. Over an int8 cache a GPU launches these two instead.

On a GPU the program that owns a row's last key of a kv head norms, rotates and appends it, and takes it from registers;
the others read older keys alone, so none waits for another.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.kv_format import PageScales, format_of
from ..cache.rope_append import heads_scale, rope_append
from ..cuda import decode_attention as by_clusters
from ..native.optional_triton import early_start_options, prefetch, tl, triton, wait_and_trigger
from ..native.registration import AnyElement, Int32, Wide, Written, operator
from .attention_records import (
    AttentionOptions,
    Pages,
    QKNormRope,
    RopeMeta,
    can_compile,
    launch_options,
    logits_of,
    meta_of,
)
from .attention_tile import (
    PROGRAM_REGISTERS,
    altered,
    attend_span,
    decode_tile,
    dequantize,
    head_pages,
    pages_of,
    quantize,
    registers,
    to_compute,
)
from .decode_attention import decode_attention
from .work_item import Heads, Results, SplitPlan, clear_row, deliver, item_of, merge_sizes, span_of

_LINE = 128  # bytes that come from memory at a time


class Angles(NamedTuple):
    """Channels, those that they are rotated with, which of them exist, cosines and sines of a position."""

    dims: Any
    other: Any
    valid: Any
    cos: Any
    sin: Any


@triton.jit
def _normed_and_rotated(x, y, gain, other_gain, scale, cos, sin):
    """Return channels `x` after norm and rotation, `y` being those that they are rotated with."""
    return x * scale * gain * cos + y * scale * other_gain * sin


@triton.jit
def _inverse_root(squares, count, eps):
    return 1.0 / tl.sqrt(squares / count + eps)


@triton.jit
def _prefetch(head_cache, cache, page, at, in_bounds, ROPE: tl.constexpr):
    """Prefetch some keys and values into the L2 cache."""
    line = tl.arange(0, 2 * ROPE.LINES)[None, :]
    at = at.to(tl.int64)
    keys = head_cache.k_at + (page * cache.k_page_stride + at * cache.k_token_stride)[:, None]
    values = head_cache.v_at + (page * cache.v_page_stride + at * cache.v_token_stride)[:, None]
    line_in = line % ROPE.LINES * ROPE.VALUES_OF_LINE
    prefetch(tl.where(line < ROPE.LINES, keys + line_in, values + line_in), in_bounds[:, None])


@triton.jit
def _angles(rope, position, META: tl.constexpr, ROPE: tl.constexpr):
    """Return the angles of a position."""
    HALF: tl.constexpr = ROPE.HALF
    dims = tl.arange(0, META.BLOCK_D)
    other = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    at = rope.cos_sin + position.to(tl.int64) * (2 * HALF) + tl.where(dims < HALF, dims, dims - HALF)
    cos = tl.load(at, mask=dims < 2 * HALF, other=1.0)
    sin = tl.load(at + HALF, mask=dims < 2 * HALF, other=0.0)
    return Angles(dims, other, dims < META.HEAD_DIM, cos, tl.where(dims < HALF, -sin, sin))


@triton.jit
def _gains(rope, head, active, kv_head, angles, META: tl.constexpr, ROPE: tl.constexpr):
    """Return the norms' weights of query heads and of the kv head, each with those of the other channels."""
    BLOCK_D: tl.constexpr = META.BLOCK_D
    dims, other, valid = angles.dims, angles.other, angles.valid
    q_gain = tl.full([1, BLOCK_D], 1.0, tl.float32)
    q_other = q_gain
    k_gain = tl.full([BLOCK_D], 1.0, tl.float32)
    k_other = k_gain
    if ROPE.NORMS_ALL:
        of_heads = rope.q_norm + head[:, None] * META.HEAD_DIM
        q_gain = tl.load(of_heads + dims[None, :], mask=active[:, None] & valid[None, :], other=0.0)
        q_other = tl.load(of_heads + other[None, :], mask=active[:, None] & valid[None, :], other=0.0)
        k_gain = tl.load(rope.k_norm + kv_head * META.HEAD_DIM + dims, mask=valid, other=0.0)
        k_other = tl.load(rope.k_norm + kv_head * META.HEAD_DIM + other, mask=valid, other=0.0)
    elif ROPE.HAS_NORM:
        q_gain = tl.load(rope.q_norm + dims, mask=valid, other=0.0)[None, :]
        q_other = tl.load(rope.q_norm + other, mask=valid, other=0.0)[None, :]
        k_gain = tl.load(rope.k_norm + dims, mask=valid, other=0.0)
        k_other = tl.load(rope.k_norm + other, mask=valid, other=0.0)
    return q_gain, q_other, k_gain, k_other


@triton.jit
def _heads_of_row(
    source, head, active, is_last, item, heads, rope, angles, gains, ELEMENT, META: tl.constexpr, ROPE: tl.constexpr
):
    """Return the rotated queries, and the row's rotated new key and its value: 0 in all but the last split."""
    BLOCK_M: tl.constexpr = META.BLOCK_M
    HEAD_DIM: tl.constexpr = META.HEAD_DIM
    q_gain, q_other, k_gain, k_other = gains
    dims, other = angles.dims, angles.other
    count = heads.kv_heads * heads.group
    k_from = source + (count + item.kv_head) * HEAD_DIM
    mine = dims < tl.where(is_last, HEAD_DIM, 0)
    in_bounds = active[:, None] & angles.valid[None, :]
    new_k = tl.load(k_from + dims, mask=mine, other=0.0).to(tl.float32)
    new_y = tl.load(k_from + other, mask=mine, other=0.0).to(tl.float32)
    new_v = tl.load(k_from + heads.kv_heads * HEAD_DIM + dims, mask=mine, other=0.0)
    x = tl.load(source + head[:, None] * HEAD_DIM + dims[None, :], mask=in_bounds, other=0.0)
    y = tl.load(source + head[:, None] * HEAD_DIM + other[None, :], mask=in_bounds, other=0.0)
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    q_scale = tl.full([BLOCK_M, 1], 1.0, tl.float32)
    k_scale = 1.0
    if ROPE.NORMS_ALL:
        of_queries = heads_scale(source, count, rope.eps, HEAD_DIM, ROPE.HEADS, META.BLOCK_D)
        q_scale = of_queries + tl.zeros([BLOCK_M, 1], tl.float32)
        of_keys = source + count * HEAD_DIM
        k_scale = heads_scale(of_keys, heads.kv_heads, rope.eps, HEAD_DIM, ROPE.HEADS, META.BLOCK_D)
    elif ROPE.HAS_NORM:
        q_scale = _inverse_root(tl.sum(x * x, axis=1), HEAD_DIM, rope.eps)[:, None]
        k_scale = _inverse_root(tl.sum(new_k * new_k), HEAD_DIM, rope.eps)
    cos, sin = angles.cos, angles.sin
    queries = _normed_and_rotated(x, y, q_gain, q_other, q_scale, cos[None, :], sin[None, :]).to(ELEMENT)
    return queries, _normed_and_rotated(new_k, new_y, k_gain, k_other, k_scale, cos, sin), new_v.to(tl.float32)


@triton.jit
def _append(key, value, cache, page, page_offset, kv_head, dims, appends, META: tl.constexpr, ROPE: tl.constexpr):
    """Write a row's new key and value into a page, if `appends`, and return them as the cache has them."""
    KV_BITS: tl.constexpr = META.KV_BITS
    wide_head = kv_head.to(tl.int64)
    if ROPE.IS_FP8:
        key = key / cache.k_unit
        value = value / cache.v_unit
    key = quantize(key, KV_BITS, cache.k_cache.dtype.element_ty)
    value = quantize(value, KV_BITS, cache.v_cache.dtype.element_ty)
    appended = dims < tl.where(appends, META.HEAD_DIM, 0)
    k_at = cache.k_cache + wide_head * cache.k_head_stride + page * cache.k_page_stride
    v_at = cache.v_cache + wide_head * cache.v_head_stride + page * cache.v_page_stride
    tl.store(k_at + page_offset * cache.k_token_stride + dims, key, mask=appended)
    tl.store(v_at + page_offset * cache.v_token_stride + dims, value, mask=appended)
    return dequantize(key, KV_BITS, tl.float32), dequantize(value, KV_BITS, tl.float32)


# One program takes one work item (a row's split) of one kv head, and up to BLOCK_M heads of its group, as in
# `decode_attention`. Beside the split's keys and values it reads its heads of the product, (group + 2) * HEAD_DIM *
# itemsize bytes, and the angles of one position; the row's last split appends a key and a value. What was written two
# or more launches before is read before the wait: the plan, the pages, the older keys.
@triton.jit(do_not_specialize=["rows"])
def _append_attention_kernel(
    results,
    qkv,
    qkv_stride,
    cache,
    rope,
    kv_lens,
    plan,
    rows,
    heads,
    logits,
    META: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    item = item_of(plan, heads.kv_heads, META)
    row_len = tl.load(kv_lens + item.item, mask=item.item < rows, other=1)
    is_planned = (item.item < item.items) & (item.row < rows)
    row = tl.where(is_planned, item.row, 0)  # a plan of before may have stood there
    kv_len = tl.where(is_planned, item.kv_len, 0)
    newest = tl.maximum(kv_len - 1, 0)
    begin, end = span_of(kv_len, item.split, item.splits, 1, logits.options.window_left, META)
    is_last = (begin < kv_len) & (end == kv_len)
    end = tl.minimum(end, newest)
    pages = cache.table + row.to(tl.int64) * cache.table_stride
    page = pages_of(pages, begin, end, META.PAGE_SIZE, META.BLOCK_N)
    new_page = tl.load(pages + newest // META.PAGE_SIZE, mask=is_planned & is_last, other=0).to(tl.int64)
    head_cache = head_pages(cache, pages, item.kv_head, META)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = item.kv_head * heads.group + m
    active = m < heads.group
    angles = _angles(rope, newest, META, ROPE)
    gains = _gains(rope, head, active, item.kv_head, angles, META, ROPE)
    if PDL:
        if begin < end:
            at = begin + tl.arange(0, META.BLOCK_N)
            _prefetch(head_cache, cache, page, at % META.PAGE_SIZE, at < end, ROPE)
        wait_and_trigger()
    if row_len <= 0:
        clear_row(results, item.item, item.kv_head, heads, META)
    if not is_planned:
        return

    source = qkv + row.to(tl.int64) * qkv_stride
    element = results.out.dtype.element_ty
    queries, new_k, new_v = _heads_of_row(
        source, head, active, is_last, item, heads, rope, angles, gains, element, META, ROPE
    )
    queries = to_compute(queries, META.COMPUTE)
    appends = is_last & (tl.program_id(1) == 0)
    page_offset = (newest % META.PAGE_SIZE).to(tl.int64)
    new_k, new_v = _append(new_k, new_v, cache, new_page, page_offset, item.kv_head, angles.dims, appends, META, ROPE)
    score = tl.sum(queries.to(tl.float32) * new_k[None, :], axis=1) * logits.options.sm_scale
    score = altered(score, logits, META)
    none = tl.zeros([BLOCK_M], tl.float32)
    new_total = none + tl.where(is_last, 1.0, 0.0)
    acc, total, top, _ = attend_span(
        new_v[None, :] + none[:, None], new_total, tl.where(new_total > 0.0, score, -float("inf")), page,
        queries, queries, m, m, head_cache, begin, end, end, cache, logits, META,
        True, False, False,  # a split begins where the window does
    )  # fmt: skip
    v_unit = cache.v_unit if ROPE.IS_FP8 else 1.0
    deliver(results, acc, total, top, item, row, heads, logits.options.sinks, v_unit, META)


def step_tile(group: int, head_dim: int, q: torch.dtype, cache: torch.dtype) -> dict[str, int]:
    """Return the tile of a step's attention over the query heads of a group.

    Of 16-bit keys and values a program has 32 KiB in flight, half of what `decode_tile` has, so that more programs fit:
    on an H200 steps of 64 rows take 7 to 17% less time.
    """
    tile = decode_tile(group, head_dim, head_dim, q, cache)
    if tile["BLOCK_M"] == 16 and (q.itemsize, cache.itemsize) == (2, 2) and tile["BLOCK_D"] <= 128:
        tile |= {"num_stages": 2} if tile["BLOCK_D"] <= 64 else {"BLOCK_N": 32}
    return tile


def append_attention_triton(
    out, k_cache, v_cache, qkv, page_table, work, rope, max_items, options, k_scale=1.0, v_scale=1.0, scales=None
) -> None:
    """Launch the kernel, or that of CUDA C++ where it is chosen; see `append_attention`.

    Raises:
        ValueError: the cache is int8: `rope_append` mixes its keys, and `decode_attention` reads them.
    """
    if format_of(k_cache.dtype).is_mixed:
        raise ValueError("keys of an int8 cache are appended by rope_append, not in the launch that attends to them")
    if (
        by_clusters.is_chosen(out.device)
        and by_clusters.served_sizes(out, k_cache, v_cache, qkv, rope, by_clusters.limits_of(out.device)) is not None
    ):
        by_clusters.launch_decode_attention(
            out, k_cache, v_cache, qkv, page_table, work.kv_lens, rope, options, k_scale, v_scale
        )  # fmt: skip
        return
    rows, query_heads, head_dim = out.shape
    heads = Heads(1, query_heads // k_cache.shape[2], k_cache.shape[2])
    tile = step_tile(heads.group, head_dim, out.dtype, k_cache.dtype)
    tile |= merge_sizes(heads.group, tile)
    values_of_line = _LINE // k_cache.itemsize
    meta = RopeMeta.of(rope, k_cache, LINES=max(tile["BLOCK_D"] // values_of_line, 1), VALUES_OF_LINE=values_of_line)
    limit = registers(PROGRAM_REGISTERS) if meta.NORMS_ALL and head_dim <= 128 else {}  # or Triton 3.6 spills
    _append_attention_kernel[(max_items * heads.kv_heads, triton.cdiv(heads.group, tile["BLOCK_M"]))](
        Results(out, None, *work[2:]), qkv, qkv.stride(0),
        Pages.of(k_cache, v_cache, scales, page_table, k_unit=k_scale, v_unit=v_scale),
        rope, work.kv_lens, work.plan, rows, heads, logits_of(head_dim, options, k_scale),
        META=meta_of(out, k_cache, v_cache, tile, options), ROPE=meta,
        **launch_options(tile), **limit, **early_start_options(out.device),
    )  # fmt: skip


def _is_served(out, k_cache, v_cache, qkv, page_table) -> bool:
    return k_cache.shape == v_cache.shape and can_compile(out, k_cache, v_cache, qkv, page_table)


@operator(triton_version=append_attention_triton, is_compiled=_is_served)
def append_attention(
    out: Written[Tensor],
    k_cache: Written[AnyElement],
    v_cache: Written[AnyElement],
    qkv: Wide,
    page_table: Int32,
    work: SplitPlan,
    rope: QKNormRope,
    *,
    max_items: int,
    options: AttentionOptions,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scales: Written[PageScales] | None = None,
) -> None:
    """Append each row's new token to the cache, and write the attention of its queries over the row into `out`.

    Args:
        out: [rows, num_qo_heads, head_dim], contiguous; 0 for rows without a token.
        k_cache: [pages, page_size, num_kv_heads, head_dim], channels side by side, of out's type, fp8, or int8 with
            `scales`, which a GPU refuses; the last page is the null page.
        v_cache: the same shape.
        qkv: [rows, (num_qo_heads + 2 num_kv_heads) head_dim], rows may be strided: queries, keys, values, of out's
            dtype, or fp32.
        page_table: int32 [rows, pages of a row]. On a GPU it, the plan and all older keys were written at least two
            launches before this one.
        work: the plan of the rows, the new tokens included, and its workspace.
        rope: norm and rotation of queries and keys.
        max_items: what the plan was sized for (`work_items`).
        options: options of the logits.
        k_scale: divides keys before fp8 holds them, and multiplies them afterwards.
        v_scale: the same of values.
        scales: written and read with the entries of an int8 cache.
    """
    rows = out.shape[0]
    lengths = work.kv_lens[:rows]
    count = (lengths > 0).sum().to(torch.int32)
    q = torch.empty_like(out)
    at = torch.arange(rows, dtype=torch.int32)
    rope_append.__wrapped__(  # type: ignore[attr-defined]
        q, k_cache, v_cache, qkv.contiguous(), at, lengths - 1, count, page_table, rope,
        k_scale=k_scale, v_scale=v_scale, scales=scales,
    )  # fmt: skip
    decode_attention.__wrapped__(  # type: ignore[attr-defined]
        out, None, q, k_cache, v_cache, page_table, None, work,
        max_items=max_items, options=options.scaled(out.shape[2], k_scale), v_scale=v_scale, scales=scales,
    )  # fmt: skip
