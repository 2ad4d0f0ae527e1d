"""Split-KV decode attention over pages: one or a few queries a row, each row over its own pages.

`out = softmax(cap(s * q k^T) + bias) v`, with the partial results of a split row merged by their log-sum-exps
(Dao et al., Flash-Decoding, 2023). Rows may stand in any pages; rows of length 0 give output 0 and lse -inf.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from ..cache.kv_format import PageScales
from ..native.library import LANES
from ..native.registration import operator
from ..native.signature import CODES, AnyElement, Float32, Int32, OneOf, Written
from .attention_tile import LOG2_E
from .attention_torch import LogitOptions, attend_row, row_entries
from .split_decode import decode_attention_triton

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
    *_plan: Tensor,
    q_len: int,
    position_mode: str,
    **_others: float | Tensor | PageScales | None,
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
    sm_scale: float,
    v_scale: float = 1.0,
    window_left: int = -1,
    soft_cap: float = 0.0,
    position_mode: Annotated[str, POSITION_MODES] = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    sinks: Float32 | None = None,
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
        sm_scale: multiplies the logits.
        v_scale: multiplies the output.
        window_left: keeps the newest `window_left + 1` keys of each query where it is >= 0.
        soft_cap: caps the logits where it is > 0.
        position_mode: one of `POSITION_MODES`.
        rope_scale: divides the rotation angles.
        rope_theta: base of the rotation frequencies.
        sinks: fp32 [hq], contiguous, a logit of each head that takes weight and has no value; or None.
        scales: of the entries of an int8 cache; else None.
    """
    rows = q.shape[0] // q_len
    kv_heads, dim = k_cache.shape[2:]
    group = q.shape[1] // kv_heads
    options = LogitOptions(sm_scale, v_scale, window_left, soft_cap, position_mode, rope_scale, rope_theta, sinks)
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
        begin = max(kv_len - q_len - window_left, 0) if window_left >= 0 else 0
        own = pages[row] if starts is None else pages[starts[row] :]
        k, v = row_entries(k_cache, v_cache, own, begin, kv_len, scales)
        result, row_lse = attend_row(row_queries[row], k, v, kv_len, options)
        outs.append(result.transpose(1, 2))
        lses.append(row_lse.transpose(1, 2) * LOG2_E)
    _write(row_outs, outs, 0.0)
    if row_lses is not None:
        _write(row_lses, lses, -math.inf)
