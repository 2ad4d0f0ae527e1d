"""Attention of one row over its own pages, with torch operators: the CPU path of the attention operators.

A row's keys are a *view* of the cache where its pages lie side by side (they mostly do), and a gathered copy of its
own pages where they do not. Both have the same strides and go through the same operator, so a row's bits do not
depend on which pages it owns.
"""

import math
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cache.kv_format import PageScales, as_bytes, decoded, format_of
from ..native.registration import OneOf
from .attention_records import AttentionOptions

POSITION_MODES = OneOf(("NONE", "ROPE_LLAMA", "ALIBI"))

_LANES = 16  # fp32 numbers of the widest vector


def math_attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend by matrix products: the fallback of torch's fused operator, with its results; slower.

    Args:
        q: [batch, heads, queries, head_dim].
        k: [batch, heads, keys, head_dim].
        v: the same shape.
        attn_mask: added to the logits; broadcast to [batch, heads, queries, keys].
        is_causal: query i sees the keys up to i.
        scale: multiplies the logits.

    Returns:
        The output, of q's shape and dtype, and the natural log-sum-exp of the logits, fp32 [batch, heads, queries].
    """
    logits = scale * (q.float() @ k.float().transpose(-1, -2))
    if attn_mask is not None:
        logits += attn_mask
    if is_causal:
        logits += torch.full(logits.shape[-2:], -torch.inf).triu(1)
    weights, total, top = _weights(logits)
    return ((weights @ v.float()) / total.unsqueeze(-1)).to(q.dtype), top + total.log()


def _weights(logits: Tensor, least: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [..., keys] beside the largest logit, whose own is exactly 1, their sums, and that logit [...].

    It is at least `least` [...], unless that is None.
    """
    top = logits.amax(-1)
    top = top if least is None else torch.maximum(top, least)
    weights = torch.exp(logits - torch.where(top == -math.inf, 0.0, top).unsqueeze(-1))
    return weights, weights.sum(-1), top


_operator = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_fused: Any = math_attention if _operator is None else _operator.default


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention's output and log-sum-exp; see `math_attention`."""
    # of fewer keys than a vector has lanes, the fused operator takes logits that are no numbers for keys not seen
    attend = math_attention if k.shape[-2] < _LANES else _fused
    return attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)


_FOLDED_QUERIES = 16  # up to so many queries a row, the group is folded into the query dimension
_FLOAT32_VALUES = 1 << 19  # of keys, and as many of values, that are converted at a time: 2 MiB each
_SCORE_BLOCK = 1 << 22  # most scores that the general path holds at once


class Positions(NamedTuple):
    """The position encoding that attention itself applies."""

    position_mode: Annotated[str, POSITION_MODES] = "NONE"  # one of `POSITION_MODES`
    rope_scale: float = 1.0  # divides the rotation angles
    rope_theta: float = 1e4  # base of the rotation frequencies


def first_visible(kv_len: int, queries: int, options: AttentionOptions) -> int:
    """Return the first position of a row that any of its newest queries sees."""
    return max(window_begin(kv_len - queries, options), 0) if options.window_left >= 0 else 0


def window_begin(position: Any, options: AttentionOptions) -> Any:
    """Return where the window of a query at a position begins, or those of several."""
    return position - (position % (options.window_left + 1) if options.is_chunked else options.window_left)


def row_entries(
    k_cache: Tensor, v_cache: Tensor, pages: np.ndarray, begin: int, end: int, scales: PageScales | None = None
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the positions [begin, end) of one row: views, or copies of its own pages.

    Args:
        k_cache: [pages, page_size, heads, d], any strides.
        v_cache: [pages, page_size, heads, dv], any strides.
        pages: the row's page table, on the host.
        begin: first position.
        end: one past the last position.
        scales: of an int8 cache, whose entries become fp32.

    Returns:
        [1, heads, end - begin, d] and [1, heads, end - begin, dv].
    """
    page_size = k_cache.shape[1]
    first = begin // page_size
    row_pages = pages[first : (end - 1) // page_size + 1]
    listed = row_pages.tolist()
    if listed and not 0 <= min(listed) <= max(listed) < k_cache.shape[0]:
        raise ValueError(f"pages must be in 0..{k_cache.shape[0] - 1}, got {min(listed)}..{max(listed)}")
    begin -= first * page_size
    end -= first * page_size
    if scales is not None:
        chosen = torch.from_numpy(row_pages).long()
        k, v = (
            decoded(cache[chosen], cache_scales[chosen]).flatten(0, 1)[begin:end].transpose(0, 1).unsqueeze(0)
            for cache, cache_scales in zip((k_cache, v_cache), scales, strict=True)
        )
        return k, v
    if len(listed) == 1:
        return _view(k_cache, listed[0], begin, end), _view(v_cache, listed[0], begin, end)
    consecutive = listed[-1] - listed[0] == len(listed) - 1 and listed == list(range(listed[0], listed[-1] + 1))
    if consecutive and k_cache.is_contiguous() and v_cache.is_contiguous():
        return _view(k_cache, listed[0], begin, end), _view(v_cache, listed[0], begin, end)
    chosen = torch.from_numpy(row_pages)
    return _gathered(k_cache, chosen, begin, end), _gathered(v_cache, chosen, begin, end)


def _view(cache: Tensor, page: int, begin: int, end: int) -> Tensor:
    _, _, heads, dim = cache.shape
    stride_page, stride_token, stride_head, stride_dim = cache.stride()
    if cache.shape[1] == 1:  # of a page of one token the stride between two tokens may be any number
        stride_token = stride_page
    offset = cache.storage_offset() + page * stride_page + begin * stride_token
    return torch.as_strided(cache, (1, heads, end - begin, dim), (0, stride_head, stride_token, stride_dim), offset)


def _gathered(cache: Tensor, chosen: Tensor, begin: int, end: int) -> Tensor:
    copy = as_bytes(cache).index_select(0, chosen).view(cache.dtype).view(1, -1, *cache.shape[2:])
    return copy[:, begin:end].transpose(1, 2)


def alibi_slopes(num_heads: int, device: torch.device | None = None) -> Tensor:
    """Return ALiBi's slopes (Press et al., 2022, section 3; other counts as in the authors' code), fp32 [num_heads]."""
    power = 1 << (num_heads.bit_length() - 1)
    heads = torch.arange(num_heads, dtype=torch.float64, device=device)
    exponents = torch.where(heads < power, -8.0 * (heads + 1) / power, -4.0 * (2 * (heads - power) + 1) / power)
    return torch.exp2(exponents).float()


def rotate_half(x: Tensor, positions: Tensor, rope_scale: float, rope_theta: float) -> Tensor:
    """Rotate `x` [..., tokens, dim] to its positions [tokens]: half-split, angle `pos * theta^(-2i/dim) / scale`."""
    dim = x.shape[-1]
    half = dim // 2
    exponents = torch.arange(half, dtype=torch.float64, device=x.device) * (-2.0 / dim)
    angles = positions.double().unsqueeze(-1) * (rope_theta**exponents / rope_scale)
    cos, sin = angles.cos().float(), angles.sin().float()
    low, high = x[..., :half].float(), x[..., half:].float()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def attend_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: int,
    options: AttentionOptions,
    v_scale: float = 1.0,
    positions: Positions = Positions(),  # noqa: B008 (immutable)
) -> tuple[Tensor, Tensor]:
    """Attend from the last `n` positions of a row of `kv_len` tokens, causally, to the row's newest keys.

    Args:
        q: [1, hkv, n, group, d] queries of the positions kv_len - n .. kv_len - 1.
        k: [1, hkv, m, d] keys of the positions kv_len - m .. kv_len - 1, as `row_entries` gives them; with fewer
            channels than queries, those before the values, which are the others.
        v: [1, hkv, m, dv] values of the same positions.
        kv_len: the row's length in tokens.
        options: options of the logits, scales of queries and keys included.
        v_scale: multiplies the output.
        positions: the position encoding.

    Returns:
        The output [1, hkv, n, group, dv] in q's dtype, and the natural log-sum-exp, fp32 [1, hkv, n, group].
    """
    _, heads, queries, group, dim = q.shape
    keys = k.shape[2]
    # a fused kernel scales logits at most, and a log-sum-exp that is rounded tells little of a sink's weight
    is_fusable = options.logits_soft_cap <= 0.0 and positions.position_mode == "NONE" and options.sinks is None
    fused = is_fusable and dim == v.shape[-1] and q.dtype.itemsize > 1 and keys >= queries
    if fused:
        if queries == 1:
            one = q.view(1, heads, group, dim)
            if is_slow(q.dtype, group) or k.dtype != q.dtype:
                out, lse = _attend_in_float32(one, k, v, options.scale_of(dim))
            else:
                out, lse = flash_attention(one, k, v, scale=options.scale_of(dim))
            out, lse = out.unsqueeze(2), lse.unsqueeze(2)
        elif q.dtype == torch.float16 or k.dtype != q.dtype:
            out, lse = _fused_causal(q.float(), to_float32(k), to_float32(v), kv_len, options)
        else:
            out, lse = _fused_causal(q, k, v, kv_len, options)
        if v_scale != 1.0:
            out = out * v_scale
        return out.to(q.dtype), lse
    out = q.new_empty(1, heads, queries, group, v.shape[-1])
    lse = torch.empty(1, heads, queries, group, dtype=torch.float32, device=q.device)
    block = max(_SCORE_BLOCK // max(heads * group * keys, 1), 1)
    wide_k, wide_v = to_float32(k[0]), to_float32(v[0])
    if positions.position_mode == "ROPE_LLAMA":
        at = torch.arange(kv_len - keys, kv_len, device=q.device)
        wide_k = rotate_half(wide_k, at, positions.rope_scale, positions.rope_theta)
    for begin in range(0, queries, block):
        end = min(begin + block, queries)
        first = kv_len - queries + begin
        part, part_lse = _general(q[0, :, begin:end], wide_k, wide_v, kv_len, first, options, positions)
        out[0, :, begin:end] = part.mul_(v_scale)
        lse[0, :, begin:end] = part_lse
    return out, lse


def is_slow(dtype: torch.dtype, group: int) -> bool:
    """Return whether a CPU is faster at converting a cache of this dtype to fp32 than at multiplying it as it is.

    So it is with fp16, and with bf16 where each product is with one vector: 3 to 8 times, on a server of 2024.
    """
    return dtype == torch.float16 or (dtype == torch.bfloat16 and group == 1)


def to_float32(x: Tensor) -> Tensor:
    """Return values of a cache, or of queries, in fp32."""
    return format_of(x.dtype).load(x)


def _attend_in_float32(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Attend in fp32, over pieces of the keys that the caches hold while they are converted and multiplied."""
    _, heads, keys, dim = k.shape
    piece = max(_FLOAT32_VALUES // (heads * dim), 1)
    wide = q.float()
    if keys <= piece:
        return flash_attention(wide, to_float32(k), to_float32(v), scale=sm_scale)
    out = torch.zeros(*wide.shape[:-1], v.shape[-1])
    total, top = torch.zeros(wide.shape[:-1]), torch.full(wide.shape[:-1], -math.inf)
    for begin in range(0, keys, piece):  # merged by their largest logits: a log-sum-exp of large ones is rounded
        part = slice(begin, min(begin + piece, keys))
        logits = (wide @ to_float32(k[:, :, part]).transpose(-1, -2)).mul_(sm_scale)
        weights, of_part, higher = _weights(logits, top)
        shrink = torch.exp(top - higher)
        out = out * shrink.unsqueeze(-1) + weights @ to_float32(v[:, :, part])
        total, top = total * shrink + of_part, higher
    return out / total.unsqueeze(-1), top + total.log()


def _visible(q_at: Tensor, k_at: Tensor, options: AttentionOptions) -> Tensor:
    """Return which keys each query sees, bool [queries, keys], given the positions of both."""
    visible = q_at.unsqueeze(1) >= k_at
    return visible & (window_begin(q_at, options).unsqueeze(1) <= k_at) if options.window_left >= 0 else visible


def _fused_causal(q: Tensor, k: Tensor, v: Tensor, kv_len: int, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    _, heads, queries, group, dim = q.shape
    keys = k.shape[2]
    mask = None
    if keys != queries or options.window_left >= 0 or queries <= _FOLDED_QUERIES:
        q_at, k_at = (torch.arange(kv_len - count, kv_len, device=q.device) for count in (queries, keys))
        visible = _visible(q_at, k_at, options)
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -math.inf)
    if queries <= _FOLDED_QUERIES:
        folded = q.reshape(1, heads, queries * group, dim)
        mask = None if mask is None else mask.repeat_interleave(group, dim=0)
        out, lse = flash_attention(folded, k, v, attn_mask=mask, scale=options.scale_of(dim))
        return out.reshape(1, heads, queries, group, dim), lse.reshape(1, heads, queries, group)
    per_head = q[0].transpose(1, 2)  # [hkv, group, queries, d]
    shared_k = k[0].unsqueeze(1).expand(heads, group, keys, dim)
    shared_v = v[0].unsqueeze(1).expand(heads, group, keys, dim)
    out, lse = flash_attention(
        per_head, shared_k, shared_v, is_causal=mask is None, attn_mask=mask, scale=options.scale_of(dim)
    )
    return out.transpose(1, 2).unsqueeze(0), lse.transpose(1, 2).unsqueeze(0)


def _general(
    q: Tensor, k: Tensor, v: Tensor, kv_len: int, first: int, options: AttentionOptions, positions: Positions
) -> tuple[Tensor, Tensor]:
    """Attend with every option, in fp32: q [hkv, n, group, d] at positions from `first`, k and v the newest keys."""
    heads, queries, group, dim = q.shape
    keys = k.shape[1]
    q_at = torch.arange(first, first + queries, device=q.device)
    k_at = torch.arange(kv_len - keys, kv_len, device=q.device)
    wide = q.float()
    if positions.position_mode == "ROPE_LLAMA":
        wide = rotate_half(wide.transpose(1, 2), q_at, positions.rope_scale, positions.rope_theta).transpose(1, 2)
    of_k = k.shape[-1]
    logits = torch.einsum("hqgd,hkd->hqgk", wide[..., :of_k], k)
    if of_k < dim:  # the other channels of keys are the values
        logits += torch.einsum("hqgd,hkd->hqgk", wide[..., of_k:], v)
    logits *= options.scale_of(dim)
    if options.logits_soft_cap > 0.0:
        logits = torch.tanh_(logits.div_(options.logits_soft_cap)).mul_(options.logits_soft_cap)
    if positions.position_mode == "ALIBI":
        slopes = alibi_slopes(heads * group).to(q.device).view(heads, 1, group, 1)
        logits.sub_(slopes * (q_at.unsqueeze(1) - k_at).view(1, queries, 1, keys))
    logits.masked_fill_(~_visible(q_at, k_at, options).view(1, queries, 1, keys), -math.inf)
    sinks = (
        None if options.sinks is None else options.sinks.to(q.device).view(heads, 1, group).expand(logits.shape[:-1])
    )
    weights, total, top = _weights(logits, sinks)
    if sinks is not None:
        total = total + torch.exp(sinks - torch.where(top == -math.inf, 0.0, top))
    norm = torch.where(total == 0.0, 1.0, total)
    return torch.einsum("hqgk,hkd->hqgd", weights, v) / norm.unsqueeze(-1), top + norm.log()
