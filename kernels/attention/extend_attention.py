"""Extend attention: many new tokens a row over the row's cache, causal and bottom-right aligned, rows ragged.

Row i has `cu_seqlens_q[i + 1] - cu_seqlens_q[i]` queries, which are the newest of its
`cu_seqlens_kv[i + 1] - cu_seqlens_kv[i]` tokens. It serves prefill, chunks of prefill and speculation.
"""

import numpy as np
import torch
from torch import Tensor

from ..cache.page_scales import PageScales
from ..native.library import LANES
from ..native.optional_triton import tl, triton
from ..native.registration import operator
from ..native.signature import CODES, AnyElement, Float32, Int32, Written
from .attention_tile import (
    LOG2_E,
    all_registers,
    attend_span,
    cache_bytes,
    compute_dtype,
    pages_of,
    tile_sizes,
    to_compute,
    with_sinks,
)
from .attention_torch import LogitOptions, attend_row, row_entries

_LEAST_BLOCK_ROWS = 256  # rows among which a program looks for its own; one code up to as many


# One program takes BLOCK_M of one row's queries times the heads of one group: it reads the keys and values that they
# see once, (HEAD_DIM + VALUE_DIM) * itemsize bytes each, and writes the outputs. Which row and which queries is found
# in the cumulative lengths, so the grid needs nothing but the number of tokens; surplus programs exit. A row's last
# queries see the most keys and come first, so that no long program is left over at the end.
@triton.jit(do_not_specialize=["rows"])  # one code for any number of prompts: nothing is compiled while they wait
def _extend_attention_kernel(
    out,
    lse,
    sinks,
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    table,
    cu_seqlens_q,
    cu_seqlens_kv,
    rows,
    group,
    kv_heads,
    table_stride,
    q_row_stride,
    q_token_stride,
    q_head_stride,
    q_dim_stride,
    out_row_stride,
    out_token_stride,
    out_head_stride,
    out_dim_stride,
    lse_row_stride,
    lse_token_stride,
    lse_head_stride,
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
    PACKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    COMPUTE: tl.constexpr,
    KV_BITS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    index = tl.arange(0, BLOCK_ROWS)
    starts = tl.load(cu_seqlens_q + index, mask=index < rows, other=0)
    stops = tl.load(cu_seqlens_q + index + 1, mask=index < rows, other=0)
    tiles = tl.cdiv((stops - starts) * group, BLOCK_M)
    program = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    row = tl.sum((tl.cumsum(tiles, axis=0) <= program).to(tl.int32))
    if row >= rows:
        return
    tile = tl.sum(tl.where(index <= row, tiles, 0)) - 1 - program
    q_first = tl.load(cu_seqlens_q + row)
    q_len = tl.load(cu_seqlens_q + row + 1) - q_first
    kv_len = tl.load(cu_seqlens_kv + row + 1) - tl.load(cu_seqlens_kv + row)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = m // group
    head = kv_head * group + m % group
    held = query < q_len
    q_at = kv_len - q_len + query
    token = query.to(tl.int64)
    row_of = row.to(tl.int64)
    if PACKED:
        token += q_first
        row_of = row_of * 0
    dims = tl.arange(0, BLOCK_D)
    q_from = q + row_of * q_row_stride + token * q_token_stride + head * q_head_stride
    there = held[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(q_from[:, None] + dims[None, :] * q_dim_stride, mask=there, other=0.0)
    queries = to_compute(queries, COMPUTE)
    end = kv_len - q_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group, q_len - 1) + 1
    first = kv_len - q_len + (tile * BLOCK_M) // group
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first - window_left, 0)
    pages = table + row.to(tl.int64) * table_stride
    page = pages_of(pages, begin, end, PAGE_SIZE, BLOCK_N)
    if KV_BITS == "int8":
        k_scales += kv_head.to(tl.int64) * scales_head_stride
        v_scales += kv_head.to(tl.int64) * scales_head_stride
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if not HAS_WINDOW and BLOCK_M == 128:  # whole tiles that all queries see need no mask
        ragged = tl.maximum((first + 1) // BLOCK_N, 0) * BLOCK_N
        acc, total, top, page = attend_span(
            acc,
            total,
            top,
            page,
            queries,
            queries,
            q_at,
            q_at,
            k_cache + kv_head.to(tl.int64) * k_head_stride,
            v_cache + kv_head.to(tl.int64) * v_head_stride,
            k_scales,
            v_scales,
            pages,
            begin,
            ragged,
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
            0.0,
            1.0,
            HEAD_DIM,
            VALUE_DIM,
            PAGE_SIZE,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            BLOCK_V,
            COMPUTE,
            KV_BITS,
            False,
            True,
            HAS_WINDOW,
            HAS_CAP,
            "NONE",
        )
        begin = ragged
    acc, total, top, page = attend_span(
        acc,
        total,
        top,
        page,
        queries,
        queries,
        q_at,
        q_at,
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
        0.0,
        1.0,
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
        True,
        HAS_WINDOW,
        HAS_CAP,
        "NONE",
    )
    if HAS_SINKS:
        acc, total, top = with_sinks(acc, total, top, sinks, head, held)
    norm = tl.where(total == 0.0, 1.0, total)
    values = tl.arange(0, BLOCK_V)
    result = (acc / norm[:, None] * v_scale).to(out.dtype.element_ty)
    place = out + row_of * out_row_stride + token * out_token_stride + head * out_head_stride
    kept = held[:, None] & (values < VALUE_DIM)[None, :]
    tl.store(place[:, None] + values[None, :] * out_dim_stride, result, mask=kept)
    if HAS_LSE:
        place = lse + row_of * lse_row_stride + token * lse_token_stride + head * lse_head_stride
        tl.store(place, top + tl.log2(norm), mask=held)


def queries_at_once(device: torch.device) -> int:
    """Return the rows of a program's tile, queries times heads, where its accumulator fits."""
    # a warp group multiplies 64 rows: eight warps on one such tile would do the same work twice
    return 128 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 else 64


def extend_attention_triton(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    page_table: Tensor | None,
    sm_scale: float,
    window_left: int,
    soft_cap: float,
    sinks: Tensor | None,
    v_scale: float = 1.0,
    scales: PageScales | None = None,
) -> None:
    """Launch the kernel; see `extend_attention`. It has run in Triton's interpreter and been compiled ahead of time."""
    rows = cu_seqlens_q.shape[0] - 1
    packed = q.dim() == 3
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[-2] // kv_heads
    keys, kv_bits = cache_bytes(k_cache)
    values, _ = cache_bytes(v_cache)
    compute = compute_dtype(q.dtype, k_cache.dtype)
    tile = tile_sizes(
        queries_at_once(q.device),
        head_dim,
        v_cache.shape[-1],
        k_cache.dtype.itemsize,
        compute.primitive_bitwidth // 8,
        has_scales=scales is not None,
    )
    table = page_table if page_table is not None else torch.arange(rows, dtype=torch.int32, device=q.device)
    most = q.shape[0] * group if packed else q.shape[1] * group
    tiles = triton.cdiv(most, tile["BLOCK_M"]) + rows if packed else triton.cdiv(most, tile["BLOCK_M"]) * rows
    _extend_attention_kernel[(tiles * kv_heads,)](
        out,
        lse,
        sinks,
        q,
        keys,
        values,
        *(scales or (None, None)),
        table,
        cu_seqlens_q,
        cu_seqlens_kv,
        rows,
        group,
        kv_heads,
        table.stride(0),
        *((0,) if packed else ()),
        *q.stride(),
        *((0,) if packed else ()),
        *out.stride(),
        *((0,) if packed else ()),
        *((0, 0, 0)[: out.dim() - 1] if lse is None else lse.stride()),
        *keys.stride(),
        *values.stride(),
        *((0, 0) if scales is None else scales.k_scales.stride()[:2]),
        scale=sm_scale * LOG2_E,
        v_scale=v_scale,
        window_left=window_left,
        soft_cap=soft_cap,
        PACKED=packed,
        HEAD_DIM=head_dim,
        VALUE_DIM=v_cache.shape[-1],
        PAGE_SIZE=0 if page_table is None else page_size,
        BLOCK_ROWS=max(triton.next_power_of_2(rows), _LEAST_BLOCK_ROWS),
        COMPUTE=compute,
        KV_BITS=kv_bits,
        HAS_LSE=lse is not None,
        HAS_SINKS=sinks is not None,
        HAS_WINDOW=window_left >= 0,
        HAS_CAP=soft_cap > 0.0,
        **tile,
        **(all_registers() if head_dim == 128 else {}),  # one program fits at a time
    )


def _is_served(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    page_table: Tensor | None,
    **_others: float | Tensor | PageScales | None,
) -> bool:
    if lse is not None or page_table is None or q.dim() != 3 or k_cache.shape[3] % LANES:
        return False
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, *CODES):
        return False
    dense = (out, q, k_cache, v_cache, page_table)
    return k_cache.shape == v_cache.shape and all(tensor.is_contiguous() for tensor in dense)


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
    sm_scale: float,
    window_left: int = -1,
    soft_cap: float = 0.0,
    sinks: Float32 | None = None,
    v_scale: float = 1.0,
    scales: PageScales | None = None,
) -> None:
    """Write the causal attention of each row's newest tokens over the row's own pages into `out`.

    Args:
        out: like q with dv, any strides but the last. What belongs to no query is left alone.
        lse: fp32, like out without its last dimension, base 2; or None.
        q: [tokens, hq, d] packed, or [rows, width, hq, d] with each row's queries at its beginning.
        k_cache: [pages, page_size, hkv, d], any strides; as for `decode_attention`.
        v_cache: [pages, page_size, hkv, dv].
        cu_seqlens_q: int32 [rows + 1], queries of each row, cumulative.
        cu_seqlens_kv: int32 [rows + 1], tokens of each row, queries included, cumulative.
        page_table: int32 [rows, max_pages]; None where page i of the cache is row i.
        sm_scale: multiplies the logits.
        window_left: keeps the newest `window_left + 1` keys of each query where it is >= 0.
        soft_cap: caps the logits where it is > 0.
        sinks: fp32 [hq], contiguous, a logit of each head that takes weight and has no value; or None.
        v_scale: multiplies the output.
        scales: of the entries of an int8 cache; else None.
    """
    kv_heads = k_cache.shape[2]
    options = LogitOptions(sm_scale, v_scale, window_left, soft_cap, sinks=sinks)
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
        first = max(kv_len - queries - window_left, 0) if window_left >= 0 else 0
        own = np.array([row], dtype=np.int32) if pages is None else pages[row]
        row_q = q[chosen].unflatten(1, (kv_heads, -1)).transpose(0, 1).unsqueeze(0)  # [1, hkv, queries, group, d]
        k, v = row_entries(k_cache, v_cache, own, first, kv_len, scales)
        result, row_lse = attend_row(row_q, k, v, kv_len, options)
        row_out.unflatten(1, (kv_heads, -1)).copy_(result[0].transpose(0, 1))
        if lse is not None:
            lse[chosen].unflatten(1, (kv_heads, -1)).copy_(row_lse[0].transpose(0, 1) * LOG2_E)
