"""All that attention does in a decode step with what the QKV product gave, in one launch: norm of queries and keys,
rotary embedding, append of the new token to the cache, and attention over the row, split over the chip.

The formulas are those of `rope_append` and `decode_attention`. Over an int8 cache a GPU launches these two instead.
"""

import torch
from torch import Tensor

from ..cache.kv_format import PageScales
from ..cache.rope_append import rope_append
from ..native.library import LANES
from ..native.registration import operator
from ..native.signature import CODES, AnyElement, Float32, Int32, Wide, Written
from .decode_attention import decode_attention
from .split_append import append_attention_triton


def _is_served(
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *_others: Tensor | None,
    **_options: float | PageScales | None,
) -> bool:
    dense = (out, k_cache, v_cache, qkv, page_table)
    is_known = k_cache.dtype == v_cache.dtype and k_cache.dtype in (out.dtype, *CODES)
    return is_known and k_cache.shape[3] % LANES == 0 and all(tensor.is_contiguous() for tensor in dense)


@operator(triton_version=append_attention_triton, is_compiled=_is_served)
def append_attention(
    out: Written[Tensor],
    k_cache: Written[AnyElement],
    v_cache: Written[AnyElement],
    qkv: Wide,
    page_table: Int32,
    kv_lens: Int32,
    plan: Int32,
    partial: Written[Float32],
    partial_lse: Written[Float32],
    counters: Written[Int32],
    cos_sin: Float32,
    q_norm: Float32 | None = None,
    k_norm: Float32 | None = None,
    sinks: Float32 | None = None,
    *,
    eps: float = 0.0,
    max_items: int,
    sm_scale: float,
    window_left: int = -1,
    soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scales: Written[PageScales] | None = None,
) -> None:
    """Append each row's new token to the cache, and write the attention of its queries over the row into `out`.

    Args:
        out: [rows, num_qo_heads, head_dim], contiguous; 0 for rows without a token.
        k_cache: [pages, page_size, num_kv_heads, head_dim], channels side by side, of out's type, fp8, or int8 with
            `scales`, which a GPU refuses; the last page is the trash page.
        v_cache: the same shape.
        qkv: [rows, (num_qo_heads + 2 num_kv_heads) head_dim], rows may be strided: queries, keys, values, of out's
            dtype, or fp32.
        page_table: int32 [rows, pages of a row]. On a GPU it, the plan and all older keys were written at least two
            launches before this one.
        kv_lens: int32 [>= rows], tokens of each row, the new one included; 0 for padding, which comes last.
        plan: int32, what `attention_plan` wrote for these rows.
        partial: fp32 [max_items, 1, num_qo_heads, head_dim], workspace; a CPU reads none of it.
        partial_lse: fp32 [max_items, 1, num_qo_heads], workspace.
        counters: int32 [rows * num_qo_heads] at least, all 0, and 0 again afterwards.
        cos_sin: float32 [max positions, 2, rot/2], cosines and sines by position.
        q_norm: fp32 [head_dim], weight of each query head's RMSNorm, or [num_qo_heads * head_dim], of all of them
            together; or None.
        k_norm: the same of the keys.
        sinks: fp32 [num_qo_heads], a logit of each head that takes weight and has no value; or None.
        eps: of the norms.
        max_items: what the plan was sized for (`work_items`).
        sm_scale: multiplies the logits.
        window_left: keeps the newest `window_left + 1` keys where it is >= 0.
        soft_cap: caps the logits where it is > 0.
        k_scale: divides keys before fp8 holds them, and multiplies them afterwards.
        v_scale: the same of values.
        scales: written and read with the entries of an int8 cache.
    """
    rows = out.shape[0]
    lengths = kv_lens[:rows]
    count = (lengths > 0).sum().to(torch.int32)
    q = torch.empty_like(out)
    at = torch.arange(rows, dtype=torch.int32)
    rope_append.__wrapped__(  # type: ignore[attr-defined]
        q, k_cache, v_cache, qkv.contiguous(), at, lengths - 1, count, page_table, cos_sin, q_norm, k_norm, eps,
        k_scale=k_scale, v_scale=v_scale, scales=scales,
    )  # fmt: skip
    decode_attention.__wrapped__(  # type: ignore[attr-defined]
        out, None, q, k_cache, v_cache, page_table, None, kv_lens, plan, partial, partial_lse, counters,
        max_items=max_items, sm_scale=sm_scale * k_scale, v_scale=v_scale, window_left=window_left, soft_cap=soft_cap,
        sinks=sinks, scales=scales,
    )  # fmt: skip
