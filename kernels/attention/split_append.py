"""Append and split-KV attention on a GPU, in one launch: see `append_attention` for what it computes.

The program that owns a row's last key of a kv head norms, rotates and appends it, and takes it from registers; the
others read older keys alone, so none waits for another.
"""

from torch import Tensor

from ..cache.page_scales import PageScales
from ..cache.rope_append import heads_scale
from ..native.early_start import early_start_options, wait_and_trigger
from ..native.optional_triton import tl, triton
from .attention_tile import (
    LOG2_E,
    PLAN_TILE,
    attend_span,
    cache_bytes,
    capped,
    compute_dtype,
    decode_tile,
    dequantise,
    int8_codes,
    int8_scale,
    pages_of,
    quantise,
    to_compute,
    with_sinks,
)
from .work_item import PLAN_HEADER, clear_row, deliver, merge_sizes, span_of

_HEADS_AT_ONCE = 4  # of those that are normed together
_LINE = 128  # bytes that come from memory at a time


@triton.jit
def _turned(x, y, gain, other_gain, scale, cos, sin):
    """Return channels `x` normed and rotated, `y` being those that they are rotated with."""
    return x * scale * gain * cos + y * scale * other_gain * sin


@triton.jit
def _inverse_root(squares, count, eps):
    return 1.0 / tl.sqrt(squares / count + eps)


@triton.jit
def _prefetch(cache, page, at, page_stride, token_stride, LINES: tl.constexpr, VALUES_OF_LINE: tl.constexpr):
    """Let the entries of some keys come into the L2 cache; nobody waits for them."""
    entry = cache + page * page_stride + at.to(tl.int64) * token_stride
    lines = entry[:, None] + tl.arange(0, LINES)[None, :] * VALUES_OF_LINE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


# One program takes one work item (a row's split) of one kv head, and up to BLOCK_M heads of its group, as in
# `decode_attention`. Beside the split's keys and values it reads its heads of the product, (group + 2) * HEAD_DIM *
# itemsize bytes, and the angles of one position; the row's last split appends a key and a value. What was written two
# or more launches before is read before the wait: the plan, the pages, the older keys.
@triton.jit(do_not_specialize=["rows"])
def _append_attention_kernel(
    out,
    k_cache,
    v_cache,
    qkv,
    page_table,
    kv_lens,
    plan,
    partial,
    partial_lse,
    counters,
    cos_sin,
    q_norm,
    k_norm,
    sinks,
    k_scales,
    v_scales,
    rows,
    group,
    kv_heads,
    eps,
    k_unit,
    v_unit,
    qkv_stride,
    table_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    scales_page_stride,
    scales_head_stride,
    scale,
    window_left,
    soft_cap,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADER: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MERGE_M: tl.constexpr,
    MERGE_S: tl.constexpr,
    COMPUTE: tl.constexpr,
    KV_BITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    LINES: tl.constexpr,
    VALUES_OF_LINE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORMS_ALL: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PDL: tl.constexpr,
):
    item = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    found = plan + HEADER + item * 4
    items = tl.load(plan)
    row = tl.load(found)
    split = tl.load(found + 1)
    splits = tl.load(found + 2)
    kv_len = tl.load(found + 3)
    own_len = tl.load(kv_lens + item, mask=item < rows, other=1)
    is_planned = (item < items) & (row < rows)
    row = tl.where(is_planned, row, 0)  # a plan of before may have stood there
    kv_len = tl.where(is_planned, kv_len, 0)
    newest = tl.maximum(kv_len - 1, 0)
    begin, end = span_of(kv_len, split, splits, 1, window_left, TILE, HAS_WINDOW)
    is_last = (begin < kv_len) & (end == kv_len)
    end = tl.minimum(end, newest)
    pages = page_table + row.to(tl.int64) * table_stride
    page = pages_of(pages, begin, end, PAGE_SIZE, BLOCK_N)
    new_page = tl.load(pages + newest // PAGE_SIZE, mask=is_planned & is_last, other=0).to(tl.int64)
    k_head = k_cache + kv_head.to(tl.int64) * k_head_stride
    v_head = v_cache + kv_head.to(tl.int64) * v_head_stride

    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = kv_head * group + m
    held = m < group
    dims = tl.arange(0, BLOCK_D)
    valid = dims < HEAD_DIM
    other = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    angles = cos_sin + newest.to(tl.int64) * (2 * HALF) + tl.where(dims < HALF, dims, dims - HALF)
    cos = tl.load(angles, mask=dims < 2 * HALF, other=1.0)
    sin = tl.load(angles + HALF, mask=dims < 2 * HALF, other=0.0)
    sin = tl.where(dims < HALF, -sin, sin)
    q_gain = tl.full([1, BLOCK_D], 1.0, tl.float32)
    q_other = q_gain
    k_gain = tl.full([BLOCK_D], 1.0, tl.float32)
    k_other = k_gain
    if NORMS_ALL:
        of_heads = q_norm + head[:, None] * HEAD_DIM
        q_gain = tl.load(of_heads + dims[None, :], mask=held[:, None] & valid[None, :], other=0.0)
        q_other = tl.load(of_heads + other[None, :], mask=held[:, None] & valid[None, :], other=0.0)
        k_gain = tl.load(k_norm + kv_head * HEAD_DIM + dims, mask=valid, other=0.0)
        k_other = tl.load(k_norm + kv_head * HEAD_DIM + other, mask=valid, other=0.0)
    elif HAS_NORM:
        q_gain = tl.load(q_norm + dims, mask=valid, other=0.0)[None, :]
        q_other = tl.load(q_norm + other, mask=valid, other=0.0)[None, :]
        k_gain = tl.load(k_norm + dims, mask=valid, other=0.0)
        k_other = tl.load(k_norm + other, mask=valid, other=0.0)
    if PDL:
        place = (begin + tl.arange(0, BLOCK_N)) % PAGE_SIZE
        _prefetch(k_head, page, place, k_page_stride, k_token_stride, LINES, VALUES_OF_LINE)
        _prefetch(v_head, page, place, v_page_stride, v_token_stride, LINES, VALUES_OF_LINE)
        wait_and_trigger()
    if own_len <= 0:
        clear_row(out, None, item, kv_head, kv_heads, 1, group, HEAD_DIM, BLOCK_M, BLOCK_V, False)
    if not is_planned:
        return

    heads = kv_heads * group
    source = qkv + row.to(tl.int64) * qkv_stride
    k_from = source + (heads + kv_head) * HEAD_DIM
    mine = dims < tl.where(is_last, HEAD_DIM, 0)
    x = tl.load(source + head[:, None] * HEAD_DIM + dims[None, :], mask=held[:, None] & valid[None, :], other=0.0)
    y = tl.load(source + head[:, None] * HEAD_DIM + other[None, :], mask=held[:, None] & valid[None, :], other=0.0)
    new_k = tl.load(k_from + dims, mask=mine, other=0.0).to(tl.float32)
    new_y = tl.load(k_from + other, mask=mine, other=0.0).to(tl.float32)
    new_v = tl.load(k_from + kv_heads * HEAD_DIM + dims, mask=mine, other=0.0)
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    q_scale = tl.full([BLOCK_M, 1], 1.0, tl.float32)
    k_scale = 1.0
    if NORMS_ALL:
        q_scale = heads_scale(source, heads, eps, HEAD_DIM, HEADS, BLOCK_D) + tl.zeros([BLOCK_M, 1], tl.float32)
        k_scale = heads_scale(source + heads * HEAD_DIM, kv_heads, eps, HEAD_DIM, HEADS, BLOCK_D)
    elif HAS_NORM:
        q_scale = _inverse_root(tl.sum(x * x, axis=1), HEAD_DIM, eps)[:, None]
        k_scale = _inverse_root(tl.sum(new_k * new_k), HEAD_DIM, eps)
    queries = _turned(x, y, q_gain, q_other, q_scale, cos[None, :], sin[None, :]).to(out.dtype.element_ty)
    queries = to_compute(queries, COMPUTE)
    new_k = _turned(new_k, new_y, k_gain, k_other, k_scale, cos, sin)
    new_v = new_v.to(tl.float32)
    appends = is_last & (tl.program_id(1) == 0)
    appended = dims < tl.where(appends, HEAD_DIM, 0)
    place = (newest % PAGE_SIZE).to(tl.int64)
    if KV_BITS == "int8":
        k_scales += kv_head.to(tl.int64) * scales_head_stride
        v_scales += kv_head.to(tl.int64) * scales_head_stride
        k_unit = int8_scale(new_k, 0)
        v_unit = int8_scale(new_v, 0)
        scales_at = new_page * scales_page_stride + place
        tl.store(k_scales + scales_at, k_unit, mask=appends)
        tl.store(v_scales + scales_at, v_unit, mask=appends)
        k_unit = k_unit.to(tl.float32)
        v_unit = v_unit.to(tl.float32)
        new_k = int8_codes(new_k, k_unit)
        new_v = int8_codes(new_v, v_unit)
    else:
        if IS_FP8:
            new_k = new_k / k_unit
            new_v = new_v / v_unit
        new_k = quantise(new_k, KV_BITS, k_cache.dtype.element_ty)
        new_v = quantise(new_v, KV_BITS, v_cache.dtype.element_ty)
    tl.store(k_head + new_page * k_page_stride + place * k_token_stride + dims, new_k, mask=appended)
    tl.store(v_head + new_page * v_page_stride + place * v_token_stride + dims, new_v, mask=appended)

    new_k = dequantise(new_k, KV_BITS, tl.float32)
    new_v = dequantise(new_v, KV_BITS, tl.float32)
    if KV_BITS == "int8":
        new_k = new_k * k_unit
        new_v = new_v * v_unit
    score = tl.sum(queries.to(tl.float32) * new_k[None, :], axis=1) * scale
    if HAS_CAP:
        score = capped(score, soft_cap)
    none = tl.zeros([BLOCK_M], tl.float32)
    taken = none + tl.where(is_last, 1.0, 0.0)
    acc, total, top, _ = attend_span(
        new_v[None, :] + none[:, None],
        taken,
        tl.where(taken > 0.0, score, -float("inf")),
        page,
        queries,
        queries,
        m,
        m,
        k_head,
        v_head,
        k_scales,
        v_scales,
        pages,
        begin,
        end,
        end,
        k_page_stride,
        k_token_stride,
        1,
        v_page_stride,
        v_token_stride,
        1,
        scales_page_stride,
        scale,
        window_left,
        soft_cap,
        0.0,
        1.0,
        HEAD_DIM,
        HEAD_DIM,
        PAGE_SIZE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        BLOCK_V,
        COMPUTE,
        KV_BITS,
        True,
        False,
        False,  # a split begins where the window does
        HAS_CAP,
        "NONE",
    )
    if HAS_SINKS:
        is_first = split + tl.zeros([BLOCK_M], tl.int32) == 0
        acc, total, top = with_sinks(acc, total, top, sinks, head, held & is_first)
    deliver(
        out,
        None,
        partial,
        partial_lse,
        counters,
        acc,
        total,
        top,
        item,
        row,
        split,
        splits,
        kv_head,
        kv_heads,
        1,
        group,
        v_unit if IS_FP8 else 1.0,
        HEAD_DIM,
        BLOCK_M,
        MERGE_M,
        MERGE_S,
        BLOCK_V,
        False,
    )


def append_attention_triton(
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    plan: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    counters: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    sinks: Tensor | None,
    eps: float,
    max_items: int,
    sm_scale: float,
    window_left: int,
    soft_cap: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scales: PageScales | None = None,
) -> None:
    """Launch the kernel; see `append_attention`. It has run in Triton's interpreter and been compiled ahead of time."""
    rows, heads, head_dim = out.shape
    page_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    keys, kv_bits = cache_bytes(k_cache)
    values, _ = cache_bytes(v_cache)
    tile = decode_tile(group, head_dim, head_dim, out.dtype, k_cache.dtype)
    tile |= merge_sizes(group, tile)
    values_of_line = _LINE // k_cache.itemsize
    _append_attention_kernel[(max_items * kv_heads, triton.cdiv(group, tile["BLOCK_M"]))](
        out,
        keys,
        values,
        qkv,
        page_table,
        kv_lens,
        plan,
        partial,
        partial_lse,
        counters,
        cos_sin,
        q_norm,
        k_norm,
        sinks,
        *(scales or (None, None)),
        rows,
        group,
        kv_heads,
        eps,
        k_scale,
        v_scale,
        qkv.stride(0),
        page_table.stride(0),
        *keys.stride()[:3],
        *values.stride()[:3],
        *((0, 0) if scales is None else scales.k_scales.stride()[:2]),
        scale=sm_scale * k_scale * LOG2_E,
        window_left=window_left,
        soft_cap=soft_cap,
        HEAD_DIM=head_dim,
        HALF=cos_sin.shape[-1],
        PAGE_SIZE=page_size,
        HEADER=PLAN_HEADER,
        TILE=PLAN_TILE,
        COMPUTE=compute_dtype(out.dtype, k_cache.dtype),
        KV_BITS=kv_bits,
        IS_FP8=k_cache.dtype.is_floating_point and k_cache.itemsize == 1,
        LINES=max(tile["BLOCK_D"] // values_of_line, 1),
        VALUES_OF_LINE=values_of_line,
        HEADS=_HEADS_AT_ONCE,
        HAS_NORM=q_norm is not None,
        NORMS_ALL=q_norm is not None and q_norm.shape[0] > head_dim,
        HAS_SINKS=sinks is not None,
        HAS_WINDOW=window_left >= 0,
        HAS_CAP=soft_cap > 0.0,
        **tile,
        **early_start_options(out.device),
    )
