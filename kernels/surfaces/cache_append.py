"""Append new keys and values to a cache behind what each row has: contiguous rows or pages, padded or packed tokens.

Token i of row r goes to position `kv_len[r] - q_len[r] + i`, where both lengths are differences of neighbours in the
cumulative sums. A token past its row's step length, or past the packed total, goes nowhere.
"""

import torch
from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Written, operator

_MAX_TILE = 4096


# One program copies one token's keys and values of a group of heads: it reads and writes
# heads * (d_k + d_v) * itemsize bytes, and three or four int32 of metadata (packed: all of cu_seqlens_q, which stays
# in L2). A position or page that cannot be is skipped, never an address.
@triton.jit
def _cache_append_kernel(
    k_cache,
    v_cache,
    new_k,
    new_v,
    cu_seqlens_q,
    cu_seqlens_kv,
    page_table,
    rows,
    width,
    num_slots,
    slot_size,
    table_width,
    heads,
    dim_k,
    dim_v,
    k_row_stride,
    k_token_stride,
    k_head_stride,
    v_row_stride,
    v_token_stride,
    v_head_stride,
    PACKED: tl.constexpr,
    PAGED: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
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
    before = tl.load(cu_seqlens_kv + row + 1) - tl.load(cu_seqlens_kv + row) - step
    position = before + token
    alive = alive & (token >= 0) & (token < step) & (position >= 0)
    if PAGED:
        entry = position // slot_size
        alive = alive & (entry < table_width)
        slot = tl.load(page_table + row.to(tl.int64) * table_width + entry, mask=alive, other=0)
        alive = alive & (slot >= 0) & (slot < num_slots)
        place = position % slot_size
    else:
        slot = row
        alive = alive & (position < slot_size)
        place = position

    live_heads = tl.where(alive, heads, 0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    target = (slot.to(tl.int64) * slot_size + place) * heads + head
    source_row = 0 if PACKED else row.to(tl.int64)
    source_token = (pid if PACKED else token).to(tl.int64)
    d = tl.arange(0, DIM_K)[None, :]
    mask = (head < live_heads) & (d < dim_k)
    source = source_row * k_row_stride + source_token * k_token_stride + head * k_head_stride
    tl.store(k_cache + target * dim_k + d, tl.load(new_k + source + d, mask=mask), mask=mask)
    d = tl.arange(0, DIM_V)[None, :]
    mask = (head < live_heads) & (d < dim_v)
    source = source_row * v_row_stride + source_token * v_token_stride + head * v_head_stride
    tl.store(v_cache + target * dim_v + d, tl.load(new_v + source + d, mask=mask), mask=mask)


def cache_append_triton(
    k_cache: Tensor,
    v_cache: Tensor,
    new_k: Tensor,
    new_v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    page_table: Tensor | None,
) -> None:
    """Launch the kernel; see `cache_append`."""
    if new_k.numel() == 0:
        return
    if k_cache.element_size() == 1:
        k_cache, v_cache, new_k, new_v = (t.view(torch.uint8) for t in (k_cache, v_cache, new_k, new_v))
    new_k = new_k if new_k.stride(-1) == 1 else new_k.contiguous()
    new_v = new_v if new_v.stride(-1) == 1 else new_v.contiguous()
    packed = new_k.dim() == 3
    num_slots, slot_size, heads, dim_k = k_cache.shape
    dim_v = v_cache.shape[3]
    rows = cu_seqlens_q.shape[0] - 1
    if not packed:
        rows = min(rows, new_k.shape[0])
    width = 1 if packed else new_k.shape[1]
    block_k, block_v = triton.next_power_of_2(dim_k), triton.next_power_of_2(dim_v)
    block_heads = max(min(triton.next_power_of_2(heads), _MAX_TILE // max(block_k, block_v)), 1)
    k_strides = (0, *new_k.stride()[:2]) if packed else new_k.stride()[:3]
    v_strides = (0, *new_v.stride()[:2]) if packed else new_v.stride()[:3]
    grid = (new_k.shape[0] * width, triton.cdiv(heads, block_heads))
    _cache_append_kernel[grid](
        k_cache,
        v_cache,
        new_k,
        new_v,
        cu_seqlens_q,
        cu_seqlens_kv,
        page_table,
        rows,
        width,
        num_slots,
        slot_size,
        0 if page_table is None else page_table.shape[1],
        heads,
        dim_k,
        dim_v,
        *k_strides,
        *v_strides,
        PACKED=packed,
        PAGED=page_table is not None,
        ROWS=triton.next_power_of_2(rows),
        HEADS=block_heads,
        DIM_K=block_k,
        DIM_V=block_v,
        num_warps=4,
    )


def _write(cache: Tensor, new: Tensor, target: Tensor, alive: Tensor) -> None:
    flat = cache.view(-1, *cache.shape[2:])
    if cache.is_cpu:
        flat.index_copy_(0, target[alive], new[alive])
        return
    target, alive = target.reshape(-1), alive.reshape(-1)
    new = new.reshape(-1, *new.shape[-2:])
    at_zero = alive & (target == 0)
    first = torch.where(at_zero.any(), new[at_zero.long().argmax()], flat[0])
    flat.index_copy_(0, torch.where(alive, target, 0), torch.where(alive[:, None, None], new, first))


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
    """Write each row's new keys and values at the end of what it has.

    Args:
        k_cache: [rows, max_seq, h, d_k], or with a page table [pages, page_size, h, d_k]; contiguous.
        v_cache: the same with d_v.
        new_k: [b, s, h, d_k], row r's tokens in front, any strides; or packed [t, h, d_k].
        new_v: the same with d_v.
        cu_seqlens_q: int32 [rows + 1], sums of the step lengths.
        cu_seqlens_kv: int32 [rows + 1], sums of the lengths after the step.
        page_table: int32 [rows, pages a row], or None for contiguous rows.
    """
    if k_cache.element_size() == 1:  # fp8 has bits to copy, but hardly any operators
        k_cache, v_cache, new_k, new_v = (t.view(torch.uint8) for t in (k_cache, v_cache, new_k, new_v))
    packed = new_k.dim() == 3
    rows = cu_seqlens_q.shape[0] - 1
    if not packed:
        rows = min(rows, new_k.shape[0])
    device = k_cache.device
    if packed:
        row = torch.searchsorted(cu_seqlens_q[1:].contiguous(), torch.arange(new_k.shape[0], device=device), right=True)
        alive = row < rows
        row = row.clamp_(max=rows - 1)
        token = torch.arange(new_k.shape[0], device=device) - cu_seqlens_q[row]
    else:
        row = torch.arange(rows, device=device)[:, None]
        token = torch.arange(new_k.shape[1], device=device)
        alive = torch.ones((), dtype=torch.bool, device=device)
        new_k, new_v = new_k[:rows], new_v[:rows]
    step = cu_seqlens_q.diff()[row]
    position = cu_seqlens_kv.diff()[row] - step + token
    alive = alive & (token >= 0) & (token < step) & (position >= 0)
    num_slots, slot_size = k_cache.shape[:2]
    if page_table is None:
        alive = alive & (position < slot_size)
        target = row * slot_size + position
    else:
        entry = position // slot_size
        alive = alive & (entry < page_table.shape[1])
        page = page_table[row, entry.clamp(0, page_table.shape[1] - 1)]
        alive = alive & (page >= 0) & (page < num_slots)
        target = page.long() * slot_size + position % slot_size
    # what goes nowhere is written over place 0 with what place 0 holds in the end
    _write(k_cache, new_k, target, alive)
    _write(v_cache, new_v, target, alive)
