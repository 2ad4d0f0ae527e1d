"""Append new keys and values to a cache, as TransformerEngine (`cache_append`) and FlashInfer (`paged_append`) do it.

They differ in how a token's slot is found. Tokens without one are skipped; nothing is read on the host.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..cache.kv_format import as_bytes
from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Written, operator

_MAX_TILE = 4096


class Entries(NamedTuple):
    """Keys and values [rows, tokens, heads, channels], the last dimension dense; strides are in elements.

    In a kernel a record has an attribute `values` of Triton's own, so no field has this name.
    """

    k: Tensor
    v: Tensor
    k_row: int
    k_token: int
    k_head: int
    v_row: int
    v_token: int
    v_head: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> Self:
        """Return the record of a cache or new tokens; packed tokens [tokens, heads, channels] are one row."""
        keys, values = as_bytes(keys), as_bytes(values)
        if keys.stride(-1) != 1 or values.stride(-1) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        is_packed = keys.dim() == 3
        strides = [(0, *x.stride()[:2]) if is_packed else x.stride()[:3] for x in (keys, values)]
        return cls(keys, values, *strides[0], *strides[1])


class AppendMeta(NamedTuple):
    """Channels of keys and values, these padded to powers of two, and heads per program."""

    DIM_K: int
    DIM_V: int
    BLOCK_K: int
    BLOCK_V: int
    HEADS: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> Self:
        """Return the constants for a cache."""
        block_k, block_v = triton.next_power_of_2(keys.shape[-1]), triton.next_power_of_2(values.shape[-1])
        heads = min(triton.next_power_of_2(keys.shape[-2]), _MAX_TILE // max(block_k, block_v))
        return cls(keys.shape[-1], values.shape[-1], block_k, block_v, max(heads, 1))


@triton.jit
def _copy_token(cache, slot, slot_offset, new, row, token, heads, META: tl.constexpr):
    """Copy the keys and values of some heads of a token; `heads` is 0 if there is nothing to copy."""
    head = tl.program_id(1) * META.HEADS + tl.arange(0, META.HEADS)[:, None]
    d = tl.arange(0, META.BLOCK_K)[None, :]
    mask = (head < heads) & (d < META.DIM_K)
    target = cache.k + slot * cache.k_row + slot_offset * cache.k_token + head * cache.k_head + d
    tl.store(target, tl.load(new.k + row * new.k_row + token * new.k_token + head * new.k_head + d, mask), mask)
    d = tl.arange(0, META.BLOCK_V)[None, :]
    mask = (head < heads) & (d < META.DIM_V)
    target = cache.v + slot * cache.v_row + slot_offset * cache.v_token + head * cache.v_head + d
    tl.store(target, tl.load(new.v + row * new.v_row + token * new.v_token + head * new.v_head + d, mask), mask)


# One program copies one token's keys and values of a group of heads: it reads and writes
# heads * (d_k + d_v) * itemsize bytes, and three or four int32 of metadata (packed: all of cu_seqlens_q, which stays
# in L2). Invalid positions and pages are skipped.
@triton.jit
def _cache_append_kernel(
    cache,
    new,
    cu_seqlens_q,
    cu_seqlens_kv,
    page_table,
    rows,
    width,
    num_slots,
    slot_size,
    table_width,
    heads,
    META: tl.constexpr,
    PACKED: tl.constexpr,
    PAGED: tl.constexpr,
    ROWS: tl.constexpr,
):
    pid = tl.program_id(0)
    if PACKED:
        index = tl.arange(0, ROWS)
        ends = tl.load(cu_seqlens_q + 1 + index, mask=index < rows, other=2147483647)
        row = tl.sum((ends <= pid).to(tl.int32), axis=0)
        alive = row < rows
        row = tl.minimum(row, rows - 1)
    else:
        row = pid // width
        alive = row < rows
    first = tl.load(cu_seqlens_q + row)
    step = tl.load(cu_seqlens_q + row + 1) - first
    token = pid - first if PACKED else pid % width
    position = tl.load(cu_seqlens_kv + row + 1) - tl.load(cu_seqlens_kv + row) - step + token
    alive = alive & (token >= 0) & (token < step) & (position >= 0)
    if PAGED:
        entry = position // slot_size
        alive = alive & (entry < table_width)
        slot = tl.load(page_table + row.to(tl.int64) * table_width + entry, mask=alive, other=0)
        alive = alive & (slot >= 0) & (slot < num_slots)
        slot_offset = position % slot_size
    else:
        slot = row
        alive = alive & (position < slot_size)
        slot_offset = position
    source = (pid if PACKED else token).to(tl.int64)
    _copy_token(cache, slot.to(tl.int64), slot_offset, new, row.to(tl.int64), source, tl.where(alive, heads, 0), META)


# One program copies one token's keys and values of a group of heads, with five int32 of metadata.
@triton.jit
def _paged_append_kernel(
    cache, new, batch_indices, positions, indices, indptr, rows, page_size, heads, META: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(batch_indices + token)
    position = tl.load(positions + token)
    if (row < 0) | (row >= rows) | (position < 0):
        return
    entry = tl.load(indptr + row) + position // page_size
    if entry >= tl.load(indptr + row + 1):
        return
    page = tl.load(indices + entry).to(tl.int64)
    _copy_token(cache, page, position % page_size, new, 0, token, heads, META)


def cache_append_triton(k_cache, v_cache, new_k, new_v, cu_seqlens_q, cu_seqlens_kv, page_table) -> None:
    """Launch the kernel; see `cache_append`."""
    if new_k.numel() == 0:
        return
    packed = new_k.dim() == 3
    num_slots, slot_size, heads, _ = k_cache.shape
    rows = cu_seqlens_q.shape[0] - 1
    if not packed:
        rows = min(rows, new_k.shape[0])
    width, table_width = 1 if packed else new_k.shape[1], 0 if page_table is None else page_table.shape[1]
    meta = AppendMeta.of(k_cache, v_cache)
    _cache_append_kernel[(new_k.shape[0] * width, triton.cdiv(heads, meta.HEADS))](
        Entries.of(k_cache, v_cache), Entries.of(new_k, new_v), cu_seqlens_q, cu_seqlens_kv, page_table,
        rows, width, num_slots, slot_size, table_width, heads,
        META=meta, PACKED=packed, PAGED=page_table is not None, ROWS=triton.next_power_of_2(rows), num_warps=4,
    )  # fmt: skip


def paged_append_triton(k_cache, v_cache, key, value, batch_indices, positions, indices, indptr) -> None:
    """Launch the kernel; see `paged_append`."""
    tokens, heads, _ = key.shape
    if not tokens:
        return
    new = Entries.of(key.to(k_cache.dtype), value.to(v_cache.dtype))  # torch rounds, the same on every architecture
    meta = AppendMeta.of(k_cache, v_cache)
    _paged_append_kernel[(tokens, triton.cdiv(heads, meta.HEADS))](
        Entries.of(k_cache, v_cache), new, batch_indices, positions, indices, indptr,
        indptr.shape[0] - 1, k_cache.shape[1], heads, META=meta, num_warps=2,
    )  # fmt: skip


def _write(cache: Tensor, new: Tensor, slots: Tensor, slot_offsets: Tensor) -> None:
    """Write `new` [n, heads, channels] to slots of a cache."""
    as_bytes(cache)[slots, slot_offsets] = as_bytes(new.to(cache.dtype))


@operator(triton_version=cache_append_triton)
def cache_append(
    k_cache: Written[Tensor],
    v_cache: Written[Tensor],
    new_k: Tensor,
    new_v: Tensor,
    cu_seqlens_q: Int32,
    cu_seqlens_kv: Int32,
    page_table: Int32 | None = None,
) -> None:
    """Append each row's new keys and values.

    Token i of row r goes to position `kv_len[r] - q_len[r] + i`; both lengths are differences of adjacent cumulative
    sums. A token past its row's step length, or past the packed total, is skipped.

    Args:
        k_cache: [rows, max_seq, h, d_k], or with a page table [pages, page_size, h, d_k]; contiguous.
        v_cache: the same with d_v.
        new_k: [b, s, h, d_k], row r's tokens in front, any strides; or packed [t, h, d_k].
        new_v: the same with d_v.
        cu_seqlens_q: int32 [rows + 1], sums of the step lengths.
        cu_seqlens_kv: int32 [rows + 1], sums of the lengths after the step.
        page_table: int32 [rows, pages a row], or None for contiguous rows.
    """
    rows = cu_seqlens_q.shape[0] - 1
    steps, lengths = cu_seqlens_q.diff(), cu_seqlens_kv.diff()
    if new_k.dim() == 3:
        index = torch.arange(new_k.shape[0], device=k_cache.device)
        row = torch.searchsorted(cu_seqlens_q[1:].contiguous(), index, right=True)
        alive = row < rows
        row = row.clamp_(max=rows - 1)
        token = index - cu_seqlens_q[row]
    else:
        rows = min(rows, new_k.shape[0])
        new_k, new_v = new_k[:rows], new_v[:rows]
        row, token = torch.meshgrid(
            *(torch.arange(count, device=k_cache.device) for count in new_k.shape[:2]), indexing="ij"
        )
        alive = torch.ones_like(row, dtype=torch.bool)
    position = lengths[row] - steps[row] + token
    alive = alive & (token >= 0) & (token < steps[row]) & (position >= 0)
    if page_table is None:
        slot, slot_offset = row, position
        alive = alive & (position < k_cache.shape[1])
    else:
        entry, slot_offset = position // k_cache.shape[1], position % k_cache.shape[1]
        alive = alive & (entry < page_table.shape[1])
        slot = page_table[row, entry.clamp(0, page_table.shape[1] - 1)].long()
        alive = alive & (slot >= 0) & (slot < k_cache.shape[0])
    for cache, new in ((k_cache, new_k), (v_cache, new_v)):
        _write(cache, as_bytes(new)[alive].view(new.dtype), slot[alive], slot_offset[alive])


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
    """Write new keys and values to pages, whose indices are concatenated by row.

    Args:
        k_cache: [pages, page_size, heads, d], strided but for the last dimension; any float dtype, fp8 too.
        v_cache: [pages, page_size, heads, dv].
        key: [tokens, heads, d].
        value: [tokens, heads, dv].
        batch_indices: int32 [tokens], the row of each token; -1: it is skipped.
        positions: int32 [tokens], its position in its row; past the row's pages: it is skipped.
        indices: int32, pages of all rows, concatenated.
        indptr: int32 [rows + 1], offsets of each row's pages.
    """
    page_size = k_cache.shape[1]
    named = (batch_indices >= 0) & (batch_indices < indptr.shape[0] - 1) & (positions >= 0)
    row, position = torch.where(named, batch_indices, 0).long(), torch.where(named, positions, 0)
    entry = indptr[row] + position // page_size
    listed = (entry >= 0) & (entry < indptr[row + 1].clamp(max=indices.shape[0]))
    valid = (named & listed).nonzero().squeeze(1)
    pages = indices[entry[valid].long()].long()
    in_pool = (pages >= 0) & (pages < k_cache.shape[0])
    valid, pages = valid[in_pool], pages[in_pool]
    for cache, new in ((k_cache, key), (v_cache, value)):
        _write(cache, new[valid], pages, (position[valid] % page_size).long())
