"""Split-KV decode attention over pages: one or a few queries a row, each row over its own pages.

`out = softmax(cap(s * q k^T) + bias) v`, with the partial results of a split row merged by their log-sum-exps
(Dao et al., Flash-Decoding, 2023). Rows may stand in any pages; rows of length 0 give output 0 and lse -inf.
"""

import math
from typing import NamedTuple

from torch import Tensor

from ..cache.kv_format import PageScales
from ..native.optional_triton import tl, triton
from ..native.registration import AnyElement, Float32, Int32, Written, operator
from .attention_records import (
    AttentionOptions,
    Pages,
    can_compile,
    is_in_parts,
    launch_options,
    logits_of,
    meta_of,
    rope_dim_of,
)
from .attention_tile import (
    LOG2_E,
    PAIR_REGISTERS,
    alibi_slope,
    attend_span,
    decode_tile,
    head_pages,
    load_queries,
    pages_of,
    registers,
    rotate,
    to_compute,
)
from .attention_torch import Positions, attend_row, first_visible, row_entries
from .work_item import Heads, Results, SplitPlan, clear_row, deliver, item_of, merge_sizes, span_of


class _Strides(NamedTuple):
    """Strides of queries, in elements."""

    token: int
    head: int
    dim: int


@triton.jit
def _queries(q, strides, token, head, active, q_at, logits, META: tl.constexpr):
    """Return the queries of a program in the compute type; with rope their low and high halves, rotated."""
    q_from = q + token * strides.token + head * strides.head
    dims = tl.arange(0, META.BLOCK_D)
    if META.MODE == "ROPE_LLAMA":
        HALF: tl.constexpr = META.HEAD_DIM // 2
        in_bounds = active[:, None] & (dims < HALF)[None, :]
        low = tl.load(q_from[:, None] + dims[None, :] * strides.dim, mask=in_bounds, other=0.0).to(tl.float32)
        high = tl.load(q_from[:, None] + (dims + HALF)[None, :] * strides.dim, mask=in_bounds, other=0.0).to(tl.float32)
        low, high = rotate(low, high, q_at[:, None], dims[None, :], logits.rope_step, logits.rope_scale)
        queries = to_compute(low, META.COMPUTE)
        queries_high = to_compute(high, META.COMPUTE)
    else:
        queries, queries_high = load_queries(q_from, strides.dim, active, META)
    return queries, queries_high


# One program takes one work item (a row's split) of one kv head, and up to BLOCK_M of its queries times group heads. It
# reads the split's keys and values once, split * (HEAD_DIM + VALUE_DIM) * itemsize bytes, and delivers the queries'
# outputs. The heads of an item are neighbours in the grid, for a token's heads are neighbours in memory. Programs past
# the last item, and others, clear the row of their number if it has no keys.
@triton.jit(do_not_specialize=["rows"])
def _decode_attention_kernel(
    results, q, q_strides, cache, indptr, kv_lens, plan, rows, heads, logits, META: tl.constexpr
):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_V: tl.constexpr = META.BLOCK_V
    item = item_of(plan, heads.kv_heads, META)
    row = item.row
    kv_len = item.kv_len
    if tl.load(kv_lens + item.item, mask=item.item < rows, other=1) <= 0:
        clear_row(results, item.item, item.kv_head, heads, META)
    if item.item >= item.items or row >= rows:  # planned for more rows than there are queries
        return
    begin, end = span_of(kv_len, item.split, item.splits, heads.q_len, logits.options.window_left, META)
    pages = cache.table + row.to(tl.int64) * cache.table_stride
    if META.HAS_INDPTR:
        pages = cache.table + tl.load(indptr + row)
    page = pages_of(pages, begin, end, META.PAGE_SIZE, META.BLOCK_N)

    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = m // heads.group
    head = item.kv_head * heads.group + m % heads.group
    active = query < heads.q_len
    q_at = kv_len - heads.q_len + query
    token = (row * heads.q_len + query).to(tl.int64)
    queries, queries_high = _queries(q, q_strides, token, head, active, q_at, logits, META)
    acc, total, top, _ = attend_span(
        tl.zeros([BLOCK_M, BLOCK_V], tl.float32), tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], -float("inf"), tl.float32), page, queries, queries_high, q_at,
        alibi_slope(head, META.ALIBI_POWER), head_pages(cache, pages, item.kv_head, META),
        begin, end, end, cache, logits, META, True, META.CAUSAL, META.HAS_WINDOW,
    )  # fmt: skip
    deliver(results, acc, total, top, item, row, heads, logits.options.sinks, cache.v_unit, META)


def decode_attention_triton(
    out, lse, q, k_cache, v_cache, table, indptr, work, q_len, max_items, options, v_scale, positions, scales
) -> None:
    """Launch the kernel; see `decode_attention` for the arguments."""
    heads = Heads(q_len, q.shape[1] // k_cache.shape[2], k_cache.shape[2])
    queries, head_dim = heads.group * q_len, q.shape[-1]
    nope_dim = head_dim - rope_dim_of(q, k_cache, v_cache)
    tile = decode_tile(queries, nope_dim, v_cache.shape[-1], q.dtype, k_cache.dtype)
    tile |= merge_sizes(queries, tile)
    mode, *rope = positions
    if mode == "ROPE_LLAMA":
        tile["BLOCK_D"] = max(tile["BLOCK_D"] // 2, 16)
    meta = meta_of(
        q, k_cache, v_cache, tile, options,
        PAGE_SIZE=0 if table.shape[-1] == 1 and indptr is None else k_cache.shape[1], HAS_INDPTR=indptr is not None,
        HAS_LSE=lse is not None, CAUSAL=q_len > 1, MODE=mode, ALIBI_POWER=1 << (q.shape[1].bit_length() - 1),
    )  # fmt: skip
    # two programs of eight warps, or the compiler spills to fit them
    is_wide_int8 = meta.KV_BITS == "int8" and (meta.BLOCK_M, meta.BLOCK_V, q.itemsize) == (16, 256, 2)
    limit = registers(PAIR_REGISTERS) if is_wide_int8 else {}
    pages = Pages.of(k_cache, v_cache, scales, table, table_stride=None if indptr is None else 0, v_unit=v_scale)
    _decode_attention_kernel[(max_items * heads.kv_heads, triton.cdiv(queries, meta.BLOCK_M))](
        Results(out, lse, *work[2:]), q, _Strides(*q.stride()), pages, indptr, work.kv_lens, work.plan,
        q.shape[0] // q_len, heads, logits_of(head_dim, options, 1.0, *rope),
        META=meta, **launch_options(tile), **limit,
    )  # fmt: skip


def _is_served(out, lse, q, k_cache, v_cache, table, indptr, positions) -> bool:
    is_supported = positions.position_mode == "NONE" and lse is None and (indptr is None or is_in_parts(q, k_cache))
    return is_supported and can_compile(q, k_cache, v_cache, out, table)


@operator(triton_version=decode_attention_triton, is_compiled=_is_served)
def decode_attention(
    out: Written[Tensor],
    lse: Written[Float32] | None,
    q: Tensor,
    k_cache: AnyElement,
    v_cache: AnyElement,
    table: Int32,
    indptr: Int32 | None,
    work: SplitPlan,
    *,
    q_len: int = 1,
    max_items: int,
    options: AttentionOptions,
    v_scale: float = 1.0,
    positions: Positions = Positions(),  # noqa: B008 (immutable)
    scales: PageScales | None = None,
) -> None:
    """Write the attention of each row's newest `q_len` tokens over the row's own pages into `out`.

    Args:
        out: [rows * q_len, hq, dv], contiguous.
        lse: fp32 [rows * q_len, hq], contiguous, base 2; or None.
        q: [rows * q_len, hq, d], any strides but the last; fp16, bf16 or fp32.
        k_cache: [pages, page_size, hkv, d], any strides; fp16, bf16, fp32, fp8 e4m3 or e5m2, or int8
            with `scales`.
        v_cache: [pages, page_size, hkv, dv]; of latent keys their last dv channels: a view of them, or, where
            `k_cache` has the d - dv channels before them alone, a tensor of its own.
        table: int32, pages of each row: [rows, max_pages], or with `indptr` the concatenation of all rows' pages.
        indptr: int32 [rows + 1], where each row begins in `table`; None for a dense table.
        work: the plan of the rows, and its workspace.
        q_len: queries a row, causal among themselves.
        max_items: what the plan was sized for (`work_items`).
        options: options of the logits, the scale of fp8 keys included.
        v_scale: multiplies the output.
        positions: how attention itself encodes them.
        scales: of the entries of an int8 cache; else None.
    """
    rows = q.shape[0] // q_len
    kv_heads, dim = k_cache.shape[2], q.shape[-1]
    lengths, pages = work.kv_lens.numpy()[:rows], table.numpy()
    starts = None if indptr is None else indptr.numpy()
    split = (rows, q_len, kv_heads, q.shape[1] // kv_heads)
    row_queries, row_outs = q.view(*split, dim).transpose(1, 2).unsqueeze(1), out.view(*split, -1)
    row_lses = None if lse is None else lse.view(split)
    for row, kv_len in enumerate(lengths.tolist()):
        if kv_len <= 0:
            row_outs[row].zero_()
            if row_lses is not None:
                row_lses[row].fill_(-math.inf)
            continue
        begin = first_visible(kv_len, q_len, options)
        row_pages = pages[row] if starts is None else pages[starts[row] :]
        k, v = row_entries(k_cache, v_cache, row_pages, begin, kv_len, scales)
        result, row_lse = attend_row(row_queries[row], k, v, kv_len, options, v_scale, positions)
        row_outs[row].copy_(result[0].transpose(0, 1))
        if row_lses is not None:
            row_lses[row].copy_(row_lse[0].transpose(0, 1) * LOG2_E)
