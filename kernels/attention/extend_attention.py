"""Extend attention: many new tokens a row over the row's cache, causal and bottom-right aligned, rows ragged.

Row i has `cu_seqlens_q[i + 1] - cu_seqlens_q[i]` queries, which are the newest of its
`cu_seqlens_kv[i + 1] - cu_seqlens_kv[i]` tokens. It serves prefill, chunks of prefill and speculation.
"""

from typing import NamedTuple

import numpy as np
import torch
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
    attend_span,
    head_pages,
    load_queries,
    pages_of,
    registers,
    tile_sizes,
    window_begin,
    with_sinks,
)
from .attention_torch import attend_row, first_visible, row_entries

_LEAST_BLOCK_ROWS = 256  # rows among which a program looks for its own; one code up to as many


class Rows(NamedTuple):
    """Queries and where their results go: of rows one behind another, or each in its own place; strides in elements."""

    q: Tensor
    out: Tensor
    lse: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    q_row: int
    q_token: int
    q_head: int
    q_dim: int
    out_row: int
    out_token: int
    out_head: int
    out_dim: int
    lse_row: int
    lse_token: int
    lse_head: int


# One program takes BLOCK_M of one row's queries times the heads of one group: it reads the keys and values that they
# see once, (HEAD_DIM + VALUE_DIM) * itemsize bytes each, and writes the outputs. Which row and which queries is found
# in the cumulative lengths, so the grid needs nothing but the number of tokens; surplus programs exit. A row's last
# queries see the most keys and come first, so that no long program is left over at the end.
@triton.jit(do_not_specialize=["count"])  # one code for any number of prompts: nothing is compiled while they wait
def _extend_attention_kernel(
    rows, count, group, kv_heads, cache, logits, META: tl.constexpr, PACKED: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_V: tl.constexpr = META.BLOCK_V
    index = tl.arange(0, BLOCK_ROWS)
    starts = tl.load(rows.cu_seqlens_q + index, mask=index < count, other=0)
    stops = tl.load(rows.cu_seqlens_q + index + 1, mask=index < count, other=0)
    tiles = tl.cdiv((stops - starts) * group, BLOCK_M)
    program = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    row = tl.sum((tl.cumsum(tiles, axis=0) <= program).to(tl.int32))
    if row >= count:
        return
    tile = tl.sum(tl.where(index <= row, tiles, 0)) - 1 - program
    q_first = tl.load(rows.cu_seqlens_q + row)
    q_len = tl.load(rows.cu_seqlens_q + row + 1) - q_first
    kv_len = tl.load(rows.cu_seqlens_kv + row + 1) - tl.load(rows.cu_seqlens_kv + row)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = m // group
    head = kv_head * group + m % group
    active = query < q_len
    q_at = kv_len - q_len + query
    token = query.to(tl.int64)
    row_of = row.to(tl.int64)
    if PACKED:
        token += q_first
        row_of = row_of * 0
    q_from = rows.q + row_of * rows.q_row + token * rows.q_token + head * rows.q_head
    queries, rotated = load_queries(q_from, rows.q_dim, active, META)
    end = kv_len - q_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group, q_len - 1) + 1
    first = kv_len - q_len + (tile * BLOCK_M) // group
    begin = 0
    if META.HAS_WINDOW:
        begin = tl.maximum(window_begin(first, logits.options.window_left, META.IS_CHUNKED), 0)
    pages = cache.table + row.to(tl.int64) * cache.table_stride
    page = pages_of(pages, begin, end, META.PAGE_SIZE, META.BLOCK_N)
    head_cache = head_pages(cache, pages, kv_head, META)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if not META.HAS_WINDOW and BLOCK_M == 128:  # whole tiles that all queries see need no mask
        ragged = tl.maximum((first + 1) // META.BLOCK_N, 0) * META.BLOCK_N
        acc, total, top, page = attend_span(
            acc, total, top, page, queries, rotated, q_at, q_at, head_cache, begin, ragged, end, cache, logits, META,
            False, True, META.HAS_WINDOW,
        )  # fmt: skip
        begin = ragged
    acc, total, top, page = attend_span(
        acc, total, top, page, queries, rotated, q_at, q_at, head_cache, begin, end, end, cache, logits, META,
        True, True, META.HAS_WINDOW,
    )  # fmt: skip
    if META.HAS_SINKS:
        acc, total, top = with_sinks(acc, total, top, logits.options.sinks, head, active)
    norm = tl.where(total == 0.0, 1.0, total)
    values = tl.arange(0, BLOCK_V)
    result = (acc / norm[:, None] * cache.v_unit).to(rows.out.dtype.element_ty)
    target = rows.out + row_of * rows.out_row + token * rows.out_token + head * rows.out_head
    in_bounds = active[:, None] & (values < META.VALUE_DIM)[None, :]
    tl.store(target[:, None] + values[None, :] * rows.out_dim, result, mask=in_bounds)
    if META.HAS_LSE:
        target = rows.lse + row_of * rows.lse_row + token * rows.lse_token + head * rows.lse_head
        tl.store(target, top + tl.log2(norm), mask=active)


def tile_rows(device: torch.device) -> int:
    """Return the rows of a program's tile, queries times heads, where its accumulator fits."""
    # a warp group multiplies 64 rows: eight warps on one such tile would do the same work twice
    return 128 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 else 64


def extend_attention_triton(
    out, lse, q, k_cache, v_cache, cu_seqlens_q, cu_seqlens_kv, page_table, options, v_scale=1.0, scales=None
) -> None:
    """Launch the kernel; see `extend_attention`."""
    count = cu_seqlens_q.shape[0] - 1
    packed = q.dim() == 3
    kv_heads, head_dim = k_cache.shape[2], q.shape[-1]
    group = q.shape[-2] // kv_heads
    nope_dim = head_dim - rope_dim_of(q, k_cache, v_cache)
    tile = tile_sizes(tile_rows(q.device), nope_dim, v_cache.shape[-1], q.dtype, k_cache.dtype)
    table = page_table if page_table is not None else torch.arange(count, dtype=torch.int32, device=q.device)
    meta = meta_of(
        q, k_cache, v_cache, tile, options, HAS_LSE=lse is not None,
        PAGE_SIZE=0 if page_table is None else k_cache.shape[1], CAUSAL=True,
    )  # fmt: skip
    no_row = (0,) if packed else ()
    of_lse = (0, 0, 0)[: out.dim() - 1] if lse is None else lse.stride()
    most = q.shape[0] * group if packed else q.shape[1] * group
    tiles = triton.cdiv(most, meta.BLOCK_M)
    _extend_attention_kernel[((tiles + count if packed else tiles * count) * kv_heads,)](
        Rows(q, out, lse, cu_seqlens_q, cu_seqlens_kv, *no_row, *q.stride(), *no_row, *out.stride(), *no_row, *of_lse),
        count, group, kv_heads, Pages.of(k_cache, v_cache, scales, table, v_unit=v_scale), logits_of(head_dim, options),
        META=meta, PACKED=packed, BLOCK_ROWS=max(triton.next_power_of_2(count), _LEAST_BLOCK_ROWS),
        **launch_options(tile), **(registers() if head_dim == 128 else {}),  # one program fits at a time
        enable_fp_fusion=False,  # logits are subtracted as they were compared, so that the largest has a weight of 1
    )  # fmt: skip


def _is_served(out, lse, q, k_cache, v_cache, page_table) -> bool:
    is_supported = lse is None and page_table is not None and q.dim() == 3 and not is_in_parts(q, k_cache)
    return is_supported and can_compile(q, k_cache, v_cache, out, page_table)  # type: ignore[arg-type]


@operator(triton_version=extend_attention_triton, is_compiled=_is_served)
def extend_attention(
    out: Written[Tensor],
    lse: Written[Float32] | None,
    q: Tensor,
    k_cache: AnyElement,
    v_cache: AnyElement,
    cu_seqlens_q: Int32,
    cu_seqlens_kv: Int32,
    page_table: Int32 | None,
    *,
    options: AttentionOptions,
    v_scale: float = 1.0,
    scales: PageScales | None = None,
) -> None:
    """Write the causal attention of each row's newest tokens over the row's own pages into `out`.

    Args:
        out: like q with dv, any strides but the last. What belongs to no query is left alone.
        lse: fp32, like out without its last dimension, base 2; or None.
        q: [tokens, hq, d] packed, or [rows, width, hq, d] with each row's queries at its beginning.
        k_cache: [pages, page_size, hkv, d], any strides; as for `decode_attention`.
        v_cache: [pages, page_size, hkv, dv]; likewise.
        cu_seqlens_q: int32 [rows + 1], queries of each row, cumulative.
        cu_seqlens_kv: int32 [rows + 1], tokens of each row, queries included, cumulative.
        page_table: int32 [rows, max_pages]; None where page i of the cache is row i.
        options: options of the logits, the scale of fp8 keys included.
        v_scale: multiplies the output.
        scales: of the entries of an int8 cache; else None.
    """
    kv_heads = k_cache.shape[2]
    q_ends = cu_seqlens_q.tolist()
    kv_ends = cu_seqlens_kv.tolist()
    pages = None if page_table is None else page_table.numpy()
    for row in range(len(q_ends) - 1):
        begin, queries = q_ends[row], q_ends[row + 1] - q_ends[row]
        if queries <= 0:
            continue
        kv_len = kv_ends[row + 1] - kv_ends[row]
        chosen = (row, slice(0, queries)) if q.dim() == 4 else slice(begin, begin + queries)
        row_out = out[chosen]  # [queries, hq, dv]
        if kv_len <= 0:
            row_out.zero_()
            if lse is not None:
                lse[chosen].fill_(-float("inf"))
            continue
        first = first_visible(kv_len, queries, options)
        row_pages = np.array([row], dtype=np.int32) if pages is None else pages[row]
        row_q = q[chosen].unflatten(1, (kv_heads, -1)).transpose(0, 1).unsqueeze(0)  # [1, hkv, queries, group, d]
        k, v = row_entries(k_cache, v_cache, row_pages, first, kv_len, scales)
        result, row_lse = attend_row(row_q, k, v, kv_len, options, v_scale)
        row_out.unflatten(1, (kv_heads, -1)).copy_(result[0].transpose(0, 1))
        if lse is not None:
            lse[chosen].unflatten(1, (kv_heads, -1)).copy_(row_lse[0].transpose(0, 1) * LOG2_E)
