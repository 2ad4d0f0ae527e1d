"""Split-KV decode attention on a GPU: what the plan dealt out, attended, and merged where a row was split.

See `decode_attention` for what it computes. The kernels have been run in Triton's interpreter and compiled ahead of
time by the tests.
"""

from torch import Tensor

from ..cache.page_scales import PageScales
from ..native.optional_triton import tl, triton
from .attention_tile import (
    PLAN_TILE,
    alibi_slope,
    attend_span,
    cache_bytes,
    compute_dtype,
    decode_tile,
    logit_arguments,
    pages_of,
    rotate,
    to_compute,
    with_sinks,
)
from .work_item import PLAN_HEADER, clear_row, deliver, merge_sizes, span_of


# One program takes one work item (a row's split) of one kv head, and up to BLOCK_M of its queries times group heads. It
# reads the split's keys and values once, split * (HEAD_DIM + VALUE_DIM) * itemsize bytes, and delivers the queries'
# outputs. The heads of an item are neighbours in the grid, for a token's heads are neighbours in memory. Programs past
# the last item, and others, clear the row of their number if it has no keys.
@triton.jit(do_not_specialize=["rows"])
def _decode_attention_kernel(
    out,
    lse,
    partial,
    partial_lse,
    counters,
    sinks,
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    table,
    indptr,
    kv_lens,
    plan,
    rows,
    q_len,
    group,
    kv_heads,
    table_stride,
    q_token_stride,
    q_head_stride,
    q_dim_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    k_dim_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    v_dim_stride,
    scales_page_stride,
    scales_head_stride,
    scale,
    v_scale,
    window_left,
    soft_cap,
    rope_step,
    rope_scale,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
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
    HAS_INDPTR: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MODE: tl.constexpr,
    ALIBI_POWER: tl.constexpr,
):
    item = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    found = plan + HEADER + item * 4
    items = tl.load(plan)
    row = tl.load(found)
    split = tl.load(found + 1)
    splits = tl.load(found + 2)
    kv_len = tl.load(found + 3)
    if tl.load(kv_lens + item, mask=item < rows, other=1) <= 0:
        clear_row(out, lse, item, kv_head, kv_heads, q_len, group, VALUE_DIM, BLOCK_M, BLOCK_V, HAS_LSE)
    if item >= items or row >= rows:  # planned for more rows than there are queries
        return
    begin, end = span_of(kv_len, split, splits, q_len, window_left, TILE, HAS_WINDOW)
    pages = table + row.to(tl.int64) * table_stride
    if HAS_INDPTR:
        pages = table + tl.load(indptr + row)
    page = pages_of(pages, begin, end, PAGE_SIZE, BLOCK_N)

    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = m // group
    head = kv_head * group + m % group
    held = query < q_len
    q_at = kv_len - q_len + query
    token = (row * q_len + query).to(tl.int64)
    q_from = q + token * q_token_stride + head * q_head_stride
    dims = tl.arange(0, BLOCK_D)
    if MODE == "ROPE_LLAMA":
        HALF: tl.constexpr = HEAD_DIM // 2
        there = held[:, None] & (dims < HALF)[None, :]
        low = tl.load(q_from[:, None] + dims[None, :] * q_dim_stride, mask=there, other=0.0).to(tl.float32)
        high = tl.load(q_from[:, None] + (dims + HALF)[None, :] * q_dim_stride, mask=there, other=0.0).to(tl.float32)
        low, high = rotate(low, high, q_at[:, None], dims[None, :], rope_step, rope_scale)
        queries = to_compute(low, COMPUTE)
        queries_high = to_compute(high, COMPUTE)
    else:
        there = held[:, None] & (dims < HEAD_DIM)[None, :]
        queries = tl.load(q_from[:, None] + dims[None, :] * q_dim_stride, mask=there, other=0.0)
        queries = to_compute(queries, COMPUTE)
        queries_high = queries
    if KV_BITS == "int8":
        k_scales += kv_head.to(tl.int64) * scales_head_stride
        v_scales += kv_head.to(tl.int64) * scales_head_stride
    acc, total, top, _ = attend_span(
        tl.zeros([BLOCK_M, BLOCK_V], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], -float("inf"), tl.float32),
        page,
        queries,
        queries_high,
        q_at,
        alibi_slope(head, ALIBI_POWER),
        k_cache + kv_head.to(tl.int64) * k_head_stride,
        v_cache + kv_head.to(tl.int64) * v_head_stride,
        k_scales,
        v_scales,
        pages,
        begin,
        end,
        end,
        k_page_stride,
        k_token_stride,
        k_dim_stride,
        v_page_stride,
        v_token_stride,
        v_dim_stride,
        scales_page_stride,
        scale,
        window_left,
        soft_cap,
        rope_step,
        rope_scale,
        HEAD_DIM,
        VALUE_DIM,
        PAGE_SIZE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        BLOCK_V,
        COMPUTE,
        KV_BITS,
        True,
        CAUSAL,
        HAS_WINDOW,
        HAS_CAP,
        MODE,
    )
    if HAS_SINKS:
        is_first = split + tl.zeros([BLOCK_M], tl.int32) == 0
        acc, total, top = with_sinks(acc, total, top, sinks, head, held & is_first)
    deliver(
        out,
        lse,
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
        q_len,
        group,
        v_scale,
        VALUE_DIM,
        BLOCK_M,
        MERGE_M,
        MERGE_S,
        BLOCK_V,
        HAS_LSE,
    )


def decode_attention_triton(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    indptr: Tensor | None,
    kv_lens: Tensor,
    plan: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    counters: Tensor,
    q_len: int,
    max_items: int,
    sm_scale: float,
    v_scale: float,
    window_left: int,
    soft_cap: float,
    position_mode: str,
    rope_scale: float,
    rope_theta: float,
    sinks: Tensor | None,
    scales: PageScales | None = None,
) -> None:
    """Launch the kernel; see `decode_attention` for the arguments."""
    rows = q.shape[0] // q_len
    _, page_size, kv_heads, head_dim = k_cache.shape
    value_dim = v_cache.shape[-1]
    heads = q.shape[1]
    group = heads // kv_heads
    keys, kv_bits = cache_bytes(k_cache)
    values, _ = cache_bytes(v_cache)
    tile = decode_tile(group * q_len, head_dim, value_dim, q.dtype, k_cache.dtype)
    tile |= merge_sizes(group * q_len, tile)
    if position_mode == "ROPE_LLAMA":
        tile["BLOCK_D"] = max(tile["BLOCK_D"] // 2, 16)
    _decode_attention_kernel[(max_items * kv_heads, triton.cdiv(group * q_len, tile["BLOCK_M"]))](
        out,
        lse,
        partial,
        partial_lse,
        counters,
        sinks,
        q,
        keys,
        values,
        *(scales or (None, None)),
        table,
        indptr,
        kv_lens,
        plan,
        rows,
        q_len,
        group,
        kv_heads,
        0 if indptr is not None else table.stride(0),
        *q.stride(),
        *keys.stride(),
        *values.stride(),
        *((0, 0) if scales is None else scales.k_scales.stride()[:2]),
        v_scale=v_scale,
        window_left=window_left,
        **logit_arguments(head_dim, heads, sm_scale, soft_cap, position_mode, rope_scale, rope_theta),
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        PAGE_SIZE=0 if table.shape[-1] == 1 and indptr is None else page_size,
        HEADER=PLAN_HEADER,
        TILE=PLAN_TILE,
        COMPUTE=compute_dtype(q.dtype, k_cache.dtype),
        KV_BITS=kv_bits,
        HAS_INDPTR=indptr is not None,
        HAS_LSE=lse is not None,
        HAS_SINKS=sinks is not None,
        CAUSAL=q_len > 1,
        HAS_WINDOW=window_left >= 0,
        **tile,
    )
