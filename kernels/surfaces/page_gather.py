"""Gather the pages of each row into a contiguous row."""

import torch
from torch import Tensor

from ..native.optional_triton import tl, triton
from ..native.registration import Int32, Written, operator

_MAX_TILE = 4096


# One program writes one token of a group of heads: it reads (inside the row's length) and writes heads * d * itemsize
# bytes, and an entry of the page table. Past the length it writes zeros.
@triton.jit
def _page_gather_kernel(
    out,
    cache,
    page_table,
    cu_seqlens_kv,
    max_length,
    num_pages,
    page_size,
    table_width,
    heads,
    dim,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    row = (tl.program_id(0) // max_length).to(tl.int64)
    position = tl.program_id(0) % max_length
    length = tl.load(cu_seqlens_kv + row + 1) - tl.load(cu_seqlens_kv + row)
    entry = position // page_size
    alive = (position < length) & (entry < table_width)
    page = tl.load(page_table + row * table_width + entry, mask=alive, other=0)
    alive = alive & (page >= 0) & (page < num_pages)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, DIM)[None, :]
    mask = (head < heads) & (d < dim)
    found = (head < tl.where(alive, heads, 0)) & (d < dim)
    place = (page.to(tl.int64) * page_size + position % page_size) * heads + head
    values = tl.load(cache + place * dim + d, mask=found, other=0)
    tl.store(out + ((row * max_length + position) * heads + head) * dim + d, values, mask=mask)


def page_gather_triton(out: Tensor, cache: Tensor, page_table: Tensor, cu_seqlens_kv: Tensor) -> None:
    """Launch the kernel; see `page_gather`."""
    rows, max_length, heads, dim = out.shape
    if not rows:
        return
    if out.element_size() == 1:
        out, cache = out.view(torch.uint8), cache.view(torch.uint8)
    block_dim = triton.next_power_of_2(dim)
    block_heads = max(min(triton.next_power_of_2(heads), _MAX_TILE // block_dim), 1)
    _page_gather_kernel[(rows * max_length, triton.cdiv(heads, block_heads))](
        out,
        cache,
        page_table,
        cu_seqlens_kv,
        max_length,
        cache.shape[0],
        cache.shape[1],
        page_table.shape[1],
        heads,
        dim,
        HEADS=block_heads,
        DIM=block_dim,
        num_warps=4,
    )


@operator(triton_version=page_gather_triton)
def page_gather(out: Written[Tensor], cache: Tensor, page_table: Int32, cu_seqlens_kv: Int32) -> None:
    """Write each row's tokens into a contiguous row, and zeros behind them.

    Args:
        out: [b, max_seq, h, d], contiguous.
        cache: [pages, page_size, h, d], contiguous.
        page_table: int32 [>= b, pages a row].
        cu_seqlens_kv: int32 [>= b + 1], sums of the rows' lengths.
    """
    if out.element_size() == 1:  # fp8 has bits to copy, but hardly any operators
        out, cache = out.view(torch.uint8), cache.view(torch.uint8)
    rows, max_length = out.shape[:2]
    position = torch.arange(max_length, device=out.device)
    length = cu_seqlens_kv.diff()[:rows, None]
    entry = position // cache.shape[1]
    pages = page_table[:rows, entry.clamp(max=page_table.shape[1] - 1)].long()
    alive = (position < length) & (entry < page_table.shape[1]) & (pages >= 0) & (pages < cache.shape[0])
    place = torch.where(alive, pages * cache.shape[1] + position % cache.shape[1], 0)
    found = cache.view(-1, *cache.shape[2:])[place.view(-1)].view(out.shape)
    out.copy_(found.masked_fill_(~alive[..., None, None], 0))
