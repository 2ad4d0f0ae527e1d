"""Split-KV decode attention on a GPU: what the plan dealt out, attended, and merged where a row was split.

See `decode_attention` for what it computes. The kernels have been run in Triton's interpreter and compiled ahead of
time by the tests.
"""

from torch import Tensor

from ..native.early_start import has_early_start
from ..native.optional_triton import tl, triton
from .attention_tile import (
    alibi_slope,
    attend_span,
    cache_bytes,
    compute_dtype,
    logit_arguments,
    rotate,
    tile_sizes,
    with_sinks,
)

SPLITS_AT_ONCE = 8  # partials that one merging program holds


# One program takes one work item (a row's split) of one kv head, and up to BLOCK_M of its queries times group heads. It
# reads the split's keys and values once, split * (HEAD_DIM + VALUE_DIM) * itemsize bytes, and writes the queries'
# outputs: straight out where the row has one split, else fp32 partials with their log-sum-exps.
@triton.jit(do_not_specialize=["rows"])
def _decode_attention_kernel(
    out,
    lse,
    partial,
    partial_lse,
    sinks,
    q,
    k_cache,
    v_cache,
    table,
    indptr,
    kv_lens,
    plan,
    rows,
    max_rows,
    q_len,
    group,
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
    scale,
    v_scale,
    window_left,
    soft_cap,
    rope_step,
    rope_scale,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
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
    item = tl.program_id(0)
    if item >= tl.load(plan):
        return
    kv_head = tl.program_id(1)
    row = tl.load(plan + 1 + 2 * max_rows + item)
    if row >= rows:  # planned for more rows than there are queries
        return
    split = item - tl.load(plan + 1 + row)
    splits = tl.load(plan + 1 + max_rows + row)
    kv_len = tl.load(kv_lens + row)
    lowest = 0
    if HAS_WINDOW:
        lowest = tl.maximum(kv_len - q_len - window_left, 0)
    chunk = tl.cdiv(tl.cdiv(kv_len - lowest, splits), BLOCK_N) * BLOCK_N
    begin = lowest + split * chunk
    end = tl.minimum(begin + chunk, kv_len)

    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
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
        queries = low.to(COMPUTE)
        queries_high = high.to(COMPUTE)
    else:
        there = held[:, None] & (dims < HEAD_DIM)[None, :]
        queries = tl.load(q_from[:, None] + dims[None, :] * q_dim_stride, mask=there, other=0.0).to(COMPUTE)
        queries_high = queries
    slopes = alibi_slope(head, ALIBI_POWER)
    pages = table + row.to(tl.int64) * table_stride
    if HAS_INDPTR:
        pages = table + tl.load(indptr + row)
    acc, total, top = attend_span(
        queries,
        queries_high,
        q_at,
        slopes,
        k_cache + kv_head.to(tl.int64) * k_head_stride,
        v_cache + kv_head.to(tl.int64) * v_head_stride,
        pages,
        begin,
        end,
        k_page_stride,
        k_token_stride,
        k_dim_stride,
        v_page_stride,
        v_token_stride,
        v_dim_stride,
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
        CAUSAL,
        HAS_WINDOW,
        HAS_CAP,
        MODE,
    )
    if HAS_SINKS:
        is_first = split + tl.zeros([BLOCK_M], tl.int32) == 0
        acc, total, top = with_sinks(acc, total, top, sinks, head, held & is_first)
    norm = tl.where(total > 0.0, total, 1.0)
    acc = acc / norm[:, None]
    log_sum = top + tl.log2(norm)
    values = tl.arange(0, BLOCK_V)
    heads = tl.num_programs(1) * group
    kept = held[:, None] & (values < VALUE_DIM)[None, :]
    if splits == 1:
        place = token * heads + head
        result = (acc * v_scale).to(out.dtype.element_ty)
        tl.store(out + place[:, None] * VALUE_DIM + values[None, :], result, mask=kept)
        if HAS_LSE:
            tl.store(lse + place, log_sum, mask=held)
    else:
        place = (item.to(tl.int64) * q_len + query) * heads + head
        tl.store(partial + place[:, None] * VALUE_DIM + values[None, :], acc, mask=kept)
        tl.store(partial_lse + place, log_sum, mask=held)


# One program merges one head of one query: it reads splits * (VALUE_DIM + 1) * 4 bytes. Rows of one split are out
# already; rows of none get 0 and -inf.
@triton.jit
def _merge_splits_kernel(
    out,
    lse,
    partial,
    partial_lse,
    plan,
    max_rows,
    q_len,
    v_scale,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:  # the product behind it may begin to load its weights
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    splits = tl.load(plan + 1 + max_rows + row)
    if splits == 1:
        return
    first = tl.load(plan + 1 + row)
    query = tl.program_id(1)
    head = tl.program_id(2)
    heads = tl.num_programs(2)
    values = tl.arange(0, BLOCK_V)
    kept = values < VALUE_DIM
    acc = tl.zeros([BLOCK_V], tl.float32)
    total = 0.0
    top = -float("inf")
    for begin in range(0, splits, BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        inside = split < splits
        place = ((first + split).to(tl.int64) * q_len + query) * heads + head
        sums = tl.load(partial_lse + place, mask=inside, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(sums))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(sums - base)
        shrink = tl.exp2(top - base)
        parts = tl.load(
            partial + place[:, None] * VALUE_DIM + values[None, :], mask=inside[:, None] & kept[None, :], other=0.0
        )
        acc = acc * shrink + tl.sum(weights[:, None] * parts, axis=0)
        total = total * shrink + tl.sum(weights)
        top = new_top
    norm = tl.where(total > 0.0, total, 1.0)
    token = row.to(tl.int64) * q_len + query
    result = (acc / norm * v_scale).to(out.dtype.element_ty)
    tl.store(out + (token * heads + head) * VALUE_DIM + values, result, mask=kept)
    if HAS_LSE:
        tl.store(lse + token * heads + head, top + tl.log2(norm))


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
) -> None:
    """Launch the two kernels; see `decode_attention` for the arguments."""
    rows = q.shape[0] // q_len
    _, page_size, kv_heads, head_dim = k_cache.shape
    value_dim = v_cache.shape[-1]
    heads = q.shape[1]
    group = heads // kv_heads
    max_rows = kv_lens.shape[0]
    keys, kv_bits = cache_bytes(k_cache)
    values, _ = cache_bytes(v_cache)
    compute = compute_dtype(q, k_cache)
    tile = tile_sizes(group * q_len, head_dim, value_dim, k_cache.dtype.itemsize, compute.primitive_bitwidth // 8)
    if position_mode == "ROPE_LLAMA":
        tile["BLOCK_D"] = max(tile["BLOCK_D"] // 2, 16)
    grid = (max_items, kv_heads, triton.cdiv(group * q_len, tile["BLOCK_M"]))
    _decode_attention_kernel[grid](
        out,
        lse,
        partial,
        partial_lse,
        sinks,
        q,
        keys,
        values,
        table,
        indptr,
        kv_lens,
        plan,
        rows,
        max_rows,
        q_len,
        group,
        0 if indptr is not None else table.stride(0),
        *q.stride(),
        *keys.stride(),
        *values.stride(),
        v_scale=v_scale,
        window_left=window_left,
        **logit_arguments(head_dim, heads, sm_scale, soft_cap, position_mode, rope_scale, rope_theta),
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        PAGE_SIZE=0 if table.shape[-1] == 1 and indptr is None else page_size,
        COMPUTE=compute,
        KV_BITS=kv_bits,
        HAS_INDPTR=indptr is not None,
        HAS_LSE=lse is not None,
        HAS_SINKS=sinks is not None,
        CAUSAL=q_len > 1,
        HAS_WINDOW=window_left >= 0,
        **tile,
    )
    merge_splits_triton(out, lse, partial, partial_lse, plan, max_rows, q_len, v_scale)


def merge_splits_triton(
    out: Tensor,
    lse: Tensor | None,
    partial: Tensor,
    partial_lse: Tensor,
    plan: Tensor,
    max_rows: int,
    q_len: int,
    v_scale: float,
) -> None:
    """Launch the second kernel alone: partial results of split rows to `out`."""
    value_dim = out.shape[-1]
    _merge_splits_kernel[(out.shape[0] // q_len, q_len, out.shape[1])](
        out,
        lse,
        partial,
        partial_lse,
        plan,
        max_rows,
        q_len,
        v_scale,
        VALUE_DIM=value_dim,
        BLOCK_V=triton.next_power_of_2(value_dim),
        BLOCK_S=SPLITS_AT_ONCE,
        HAS_LSE=lse is not None,
        PDL=has_early_start(out.device),
        num_warps=2,
    )
