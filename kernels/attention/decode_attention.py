"""Split-KV decode attention over pages: one or a few queries a row, each row over its own pages.

`out = softmax(cap(s * q k^T) + bias) v`, with the partial results of a split row merged by their log-sum-exps
(Dao et al., Flash-Decoding, 2023). Rows may stand in any pages; rows of length 0 give output 0 and lse -inf.
"""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from ..cache.kv_format import PageScales
from ..native.library import CODES, LANES
from ..native.optional_triton import tl, triton
from ..native.registration import AnyElement, Float32, Int32, OneOf, Written, operator
from .attention_records import AttentionOptions, Pages, form_of, launch_options, logits_of
from .attention_tile import (
    LOG2_E,
    alibi_slope,
    attend_span,
    decode_tile,
    head_pages,
    pages_of,
    rotate,
    to_compute,
    with_sinks,
)
from .attention_torch import Positions, attend_row, first_seen, row_entries
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
    begin, end = span_of(
        kv_len, item.split, item.splits, heads.q_len, logits.options.window_left, FORM.TILE, FORM.HAS_WINDOW
    )
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
        acc, total, top = with_sinks(acc, total, top, logits.options.sinks, head, held & is_first)
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
    options: AttentionOptions,
    v_scale: float,
    position_mode: str,
    rope_scale: float,
    rope_theta: float,
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
        q, k_cache, v_cache, tile, options,
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
        kv_lens,
        plan,
        q.shape[0] // q_len,
        heads,
        logits_of(head_dim, options, rope_scale=rope_scale, rope_theta=rope_theta),
        FORM=form,
        HEADER=PLAN_HEADER,
        **launch_options(tile),
    )


POSITION_MODES = OneOf(("NONE", "ROPE_LLAMA", "ALIBI"))


def _write(out: Tensor, parts: list[Tensor | None], empty: float) -> None:
    """Write the rows' parts, [1, ...] each, into `out` [rows, ...]; rows without one get `empty`."""
    live = [part for part in parts if part is not None]
    if len(live) == len(parts):
        _join(out, live)
    elif all(part is not None for part in parts[: len(live)]):
        if live:
            _join(out[: len(live)], live)
        out[len(live) :].fill_(empty)
    else:
        for row, part in enumerate(parts):
            if part is None:
                out[row].fill_(empty)
            else:
                out[row].copy_(part[0])


def _join(out: Tensor, parts: list[Tensor]) -> None:
    if len(parts) == 1:
        out.copy_(parts[0])
    else:
        torch.cat(parts, out=out)


def _is_served(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    indptr: Tensor | None,
    position_mode: str,
) -> bool:
    dense = (out, q, k_cache, v_cache, table)
    is_bare = position_mode == "NONE" and lse is None and indptr is None
    is_bare = is_bare and k_cache.shape == v_cache.shape and k_cache.shape[3] % LANES == 0
    is_bare = is_bare and k_cache.dtype == v_cache.dtype and k_cache.dtype in (q.dtype, *CODES)
    return is_bare and all(tensor.is_contiguous() for tensor in dense)


@operator(triton_version=decode_attention_triton, is_compiled=_is_served)
def decode_attention(
    out: Written[Tensor],
    lse: Written[Float32] | None,
    q: Tensor,
    k_cache: AnyElement,
    v_cache: AnyElement,
    table: Int32,
    indptr: Int32 | None,
    kv_lens: Int32,
    plan: Int32,
    partial: Written[Float32],
    partial_lse: Written[Float32],
    counters: Written[Int32],
    *,
    q_len: int = 1,
    max_items: int,
    options: AttentionOptions,
    v_scale: float = 1.0,
    position_mode: Annotated[str, POSITION_MODES] = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    scales: PageScales | None = None,
) -> None:
    """Write the attention of each row's newest `q_len` tokens over the row's own pages into `out`.

    Args:
        out: [rows * q_len, hq, dv], contiguous.
        lse: fp32 [rows * q_len, hq], contiguous, base 2; or None.
        q: [rows * q_len, hq, d], any strides but the last; fp16, bf16 or fp32.
        k_cache: [pages, page_size, hkv, d], any strides; fp16, bf16, fp32, fp8 e4m3 or e5m2, or int8
            with `scales`.
        v_cache: [pages, page_size, hkv, dv].
        table: int32, pages of each row: [rows, max_pages], or with `indptr` the concatenation of all rows' pages.
        indptr: int32 [rows + 1], where each row begins in `table`; None for a dense table.
        kv_lens: int32 [>= rows], tokens of each row, the queries' own included, as the plan wrote them.
        plan: int32, what `attention_plan` wrote for at least as many rows.
        partial: fp32 [max_items, q_len, hq, dv], workspace; a CPU reads none of it.
        partial_lse: fp32 [max_items, q_len, hq], workspace.
        counters: int32 [rows * q_len * hq] at least, all 0, and 0 again afterwards; launches that run one after
            another share them.
        q_len: queries a row, causal among themselves.
        max_items: what the plan was sized for (`work_items`).
        options: what becomes of the logits, the scale of fp8 keys included.
        v_scale: multiplies the output.
        position_mode: one of `POSITION_MODES`.
        rope_scale: divides the rotation angles.
        rope_theta: base of the rotation frequencies.
        scales: of the entries of an int8 cache; else None.
    """
    rows = q.shape[0] // q_len
    kv_heads, dim = k_cache.shape[2:]
    group = q.shape[1] // kv_heads
    positions = Positions(position_mode, rope_scale, rope_theta)
    lengths, pages = kv_lens.numpy()[:rows], table.numpy()
    starts = None if indptr is None else indptr.numpy()
    split = (rows, q_len, kv_heads, group)
    row_queries = q.view(*split, dim).transpose(1, 2).unsqueeze(1).unbind(0)
    row_outs = out.view(*split, -1)
    row_lses = None if lse is None else lse.view(split)
    outs: list[Tensor | None] = []
    lses: list[Tensor | None] = []
    for row, kv_len in enumerate(lengths.tolist()):
        if kv_len <= 0:
            outs.append(None)
            lses.append(None)
            continue
        begin = first_seen(kv_len, q_len, options)
        own = pages[row] if starts is None else pages[starts[row] :]
        k, v = row_entries(k_cache, v_cache, own, begin, kv_len, scales)
        result, row_lse = attend_row(row_queries[row], k, v, kv_len, options, v_scale, positions)
        outs.append(result.transpose(1, 2))
        lses.append(row_lse.transpose(1, 2) * LOG2_E)
    _write(row_outs, outs, 0.0)
    if row_lses is not None:
        _write(row_lses, lses, -math.inf)
