"""Split-KV decode attention on a GPU: what the plan dealt out, attended, and merged where a row was split.

See `decode_attention` for what it computes. The kernels have been run in Triton's interpreter and compiled ahead of
time by the tests.
"""

from typing import NamedTuple

from torch import Tensor

from ..cache.kv_format import PageScales
from ..native.optional_triton import tl, triton
from .attention_records import Pages, form_of, launch_options, logits_of
from .attention_tile import (
    alibi_slope,
    attend_span,
    decode_tile,
    head_pages,
    pages_of,
    rotate,
    to_compute,
    with_sinks,
)
from .work_item import PLAN_HEADER, Heads, Results, clear_row, deliver, item_of, merge_sizes, span_of


class _Strides(NamedTuple):
    """Of queries, in elements."""

    token: int
    head: int
    dim: int


@triton.jit
def _queries(q, strides, token, head, held, q_at, logits, FORM: tl.constexpr):
    """Return the queries of a program in the compute type; with rope their low and high halves, rotated."""
    COMPUTE: tl.constexpr = FORM.COMPUTE
    q_from = q + token * strides.token + head * strides.head
    dims = tl.arange(0, FORM.BLOCK_D)
    if FORM.MODE == "ROPE_LLAMA":
        HALF: tl.constexpr = FORM.HEAD_DIM // 2
        there = held[:, None] & (dims < HALF)[None, :]
        low = tl.load(q_from[:, None] + dims[None, :] * strides.dim, mask=there, other=0.0).to(tl.float32)
        high = tl.load(q_from[:, None] + (dims + HALF)[None, :] * strides.dim, mask=there, other=0.0).to(tl.float32)
        low, high = rotate(low, high, q_at[:, None], dims[None, :], logits.rope_step, logits.rope_scale)
        queries = to_compute(low, COMPUTE)
        queries_high = to_compute(high, COMPUTE)
    else:
        there = held[:, None] & (dims < FORM.HEAD_DIM)[None, :]
        queries = tl.load(q_from[:, None] + dims[None, :] * strides.dim, mask=there, other=0.0)
        queries = to_compute(queries, COMPUTE)
        queries_high = queries
    return queries, queries_high


# One program takes one work item (a row's split) of one kv head, and up to BLOCK_M of its queries times group heads. It
# reads the split's keys and values once, split * (HEAD_DIM + VALUE_DIM) * itemsize bytes, and delivers the queries'
# outputs. The heads of an item are neighbours in the grid, for a token's heads are neighbours in memory. Programs past
# the last item, and others, clear the row of their number if it has no keys.
@triton.jit(do_not_specialize=["rows"])
def _decode_attention_kernel(
    results,
    q,
    q_strides,
    cache,
    indptr,
    sinks,
    kv_lens,
    plan,
    rows,
    heads,
    logits,
    FORM: tl.constexpr,
    HEADER: tl.constexpr,
):
    BLOCK_M: tl.constexpr = FORM.BLOCK_M
    BLOCK_V: tl.constexpr = FORM.BLOCK_V
    item = item_of(plan, heads.kv_heads, HEADER)
    row = item.row
    kv_len = item.kv_len
    if tl.load(kv_lens + item.item, mask=item.item < rows, other=1) <= 0:
        clear_row(results, item.item, item.kv_head, heads, FORM)
    if item.item >= item.items or row >= rows:  # planned for more rows than there are queries
        return
    begin, end = span_of(kv_len, item.split, item.splits, heads.q_len, logits.window_left, FORM.TILE, FORM.HAS_WINDOW)
    pages = cache.table + row.to(tl.int64) * cache.table_stride
    if FORM.HAS_INDPTR:
        pages = cache.table + tl.load(indptr + row)
    page = pages_of(pages, begin, end, FORM.PAGE_SIZE, FORM.BLOCK_N)

    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = m // heads.group
    head = item.kv_head * heads.group + m % heads.group
    held = query < heads.q_len
    q_at = kv_len - heads.q_len + query
    token = (row * heads.q_len + query).to(tl.int64)
    queries, queries_high = _queries(q, q_strides, token, head, held, q_at, logits, FORM)
    acc, total, top, _ = attend_span(
        tl.zeros([BLOCK_M, BLOCK_V], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], -float("inf"), tl.float32),
        page,
        queries,
        queries_high,
        q_at,
        alibi_slope(head, FORM.ALIBI_POWER),
        head_pages(cache, pages, item.kv_head, FORM),
        begin,
        end,
        end,
        cache,
        logits,
        FORM,
        True,
        FORM.CAUSAL,
        FORM.HAS_WINDOW,
    )
    if FORM.HAS_SINKS:
        is_first = item.split + tl.zeros([BLOCK_M], tl.int32) == 0
        acc, total, top = with_sinks(acc, total, top, sinks, head, held & is_first)
    deliver(results, acc, total, top, item, row, heads, cache.v_unit, FORM)


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
    heads = Heads(q_len, q.shape[1] // k_cache.shape[2], k_cache.shape[2])
    queries = heads.group * q_len
    head_dim, has_rope = k_cache.shape[-1], position_mode == "ROPE_LLAMA"
    tile = decode_tile(queries, head_dim, v_cache.shape[-1], q.dtype, k_cache.dtype)
    tile |= merge_sizes(queries, tile)
    if has_rope:
        tile["BLOCK_D"] = max(tile["BLOCK_D"] // 2, 16)
    form = form_of(
        q, k_cache, v_cache, tile, window_left=window_left, soft_cap=soft_cap, sinks=sinks,
        PAGE_SIZE=0 if table.shape[-1] == 1 and indptr is None else k_cache.shape[1], HAS_INDPTR=indptr is not None,
        HAS_LSE=lse is not None, CAUSAL=q_len > 1, MODE=position_mode,
        ALIBI_POWER=1 << (q.shape[1].bit_length() - 1),
    )  # fmt: skip
    _decode_attention_kernel[(max_items * heads.kv_heads, triton.cdiv(queries, form.BLOCK_M))](
        Results(out, lse, partial, partial_lse, counters),
        q,
        _Strides(*q.stride()),
        Pages.of(k_cache, v_cache, scales, table, table_stride=None if indptr is None else 0, v_unit=v_scale),
        indptr,
        sinks,
        kv_lens,
        plan,
        q.shape[0] // q_len,
        heads,
        logits_of(head_dim, sm_scale, window_left, soft_cap, rope_scale, rope_theta),
        FORM=form,
        HEADER=PLAN_HEADER,
        **launch_options(tile),
    )
