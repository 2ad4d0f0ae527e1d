"""Gather the pages of each row into a contiguous row."""

import torch
from torch import Tensor

from ..cache.kv_format import as_bytes
from ..native.registration import Int32, Written, operator


@operator()
def page_gather(out: Written[Tensor], cache: Tensor, page_table: Int32, cu_seqlens_kv: Int32) -> None:
    """Write each row's tokens into a contiguous row, followed by zeros; nothing is read on the host.

    Args:
        out: [b, max_seq, h, d], contiguous.
        cache: [pages, page_size, h, d], contiguous.
        page_table: int32 [>= b, pages a row].
        cu_seqlens_kv: int32 [>= b + 1], sums of the rows' lengths.
    """
    out, cache = as_bytes(out), as_bytes(cache)
    rows, max_length = out.shape[:2]
    position = torch.arange(max_length, device=out.device)
    length = cu_seqlens_kv.diff()[:rows, None]
    entry = position // cache.shape[1]
    pages = page_table[:rows, entry.clamp(max=page_table.shape[1] - 1)].long()
    alive = (position < length) & (entry < page_table.shape[1]) & (pages >= 0) & (pages < cache.shape[0])
    token_index = torch.where(alive, pages * cache.shape[1] + position % cache.shape[1], 0)
    tokens = cache.view(-1, *cache.shape[2:])[token_index.view(-1)].view(out.shape)
    out.copy_(tokens.masked_fill_(~alive[..., None, None], 0))
