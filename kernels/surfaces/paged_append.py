"""Append of new keys and values to pages that are listed one row after another.

Token i goes to position `positions[i]` of row `batch_indices[i]`; tokens with a batch index of -1, and those past the
pages of their row, go nowhere.
"""

import torch
from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Written, operator


# One program copies one token's heads: it reads and writes heads * (HEAD_DIM + VALUE_DIM) * itemsize bytes.
@triton.jit
def _paged_append_kernel(
    k_cache,
    v_cache,
    key,
    value,
    batch_indices,
    positions,
    indices,
    indptr,
    rows,
    heads,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(batch_indices + token)
    position = tl.load(positions + token)
    if (row < 0) | (row >= rows) | (position < 0):
        return
    entry = tl.load(indptr + row) + position // PAGE_SIZE
    if entry >= tl.load(indptr + row + 1):
        return
    page = tl.load(indices + entry).to(tl.int64)
    place = position % PAGE_SIZE
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    inside = (head < heads)[:, None] & (dims < HEAD_DIM)[None, :]
    source = key + token * key_token_stride + head[:, None] * key_head_stride + dims[None, :]
    target = k_cache + page * k_page_stride + place * k_token_stride + head[:, None] * k_head_stride + dims[None, :]
    tl.store(target, tl.load(source, mask=inside, other=0.0).to(k_cache.dtype.element_ty), mask=inside)
    dims = tl.arange(0, BLOCK_V)
    inside = (head < heads)[:, None] & (dims < VALUE_DIM)[None, :]
    source = value + token * value_token_stride + head[:, None] * value_head_stride + dims[None, :]
    target = v_cache + page * v_page_stride + place * v_token_stride + head[:, None] * v_head_stride + dims[None, :]
    tl.store(target, tl.load(source, mask=inside, other=0.0).to(v_cache.dtype.element_ty), mask=inside)


_HEADS_AT_ONCE = 8


def paged_append_triton(
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    indices: Tensor,
    indptr: Tensor,
) -> None:
    """Launch the kernel; see `paged_append`. It has run in Triton's interpreter."""
    tokens, heads, head_dim = key.shape
    if not tokens:
        return
    # fp8 is rounded by torch, the same on every architecture, and then copied byte by byte
    key, value = key.to(k_cache.dtype), value.to(v_cache.dtype)
    caches = [k_cache, v_cache]
    if k_cache.dtype.itemsize == 1:
        key, value, *caches = (tensor.view(torch.uint8) for tensor in (key, value, k_cache, v_cache))
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        key, value = key.contiguous(), value.contiguous()
    _paged_append_kernel[(tokens, triton.cdiv(heads, _HEADS_AT_ONCE))](
        *caches,
        key,
        value,
        batch_indices,
        positions,
        indices,
        indptr,
        indptr.shape[0] - 1,
        heads,
        *key.stride()[:2],
        *value.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        HEAD_DIM=head_dim,
        VALUE_DIM=value.shape[-1],
        PAGE_SIZE=k_cache.shape[1],
        BLOCK_H=_HEADS_AT_ONCE,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_V=triton.next_power_of_2(value.shape[-1]),
        num_warps=2,
    )


@operator(triton_version=paged_append_triton)
def paged_append(
    k_cache: Written[Tensor],
    v_cache: Written[Tensor],
    key: Tensor,
    value: Tensor,
    batch_indices: Int32,
    positions: Int32,
    indices: Int32,
    indptr: Int32,
) -> None:
    """Write new keys and values to their places.

    Args:
        k_cache: [pages, page_size, heads, d], strided but for the last dimension; any float dtype, fp8 too.
        v_cache: [pages, page_size, heads, dv].
        key: [tokens, heads, d].
        value: [tokens, heads, dv].
        batch_indices: int32 [tokens], the row of each token; -1: skip it.
        positions: int32 [tokens], its position in its row.
        indices: int32, pages of all rows, one row after another.
        indptr: int32 [rows + 1], where each row's pages begin.
    """
    page_size = k_cache.shape[1]
    rows = indptr.shape[0] - 1
    named = (batch_indices >= 0) & (batch_indices < rows) & (positions >= 0)
    row = torch.where(named, batch_indices, 0).long()
    position = torch.where(named, positions, 0)
    entry = indptr[row] + position // page_size
    listed = (entry >= 0) & (entry < indptr[row + 1].clamp(max=indices.shape[0]))
    kept = (named & listed).nonzero().squeeze(1)
    pages = indices[entry[kept].long()].long()
    there = (pages >= 0) & (pages < k_cache.shape[0])
    kept, pages = kept[there], pages[there]
    places = (position[kept] % page_size).long()
    for cache, new in ((k_cache, key), (v_cache, value)):
        chosen = new[kept].to(cache.dtype)
        if cache.dtype.itemsize == 1:  # indexed copies know no fp8
            cache.view(torch.uint8)[pages, places] = chosen.view(torch.uint8)
        else:
            cache[pages, places] = chosen
