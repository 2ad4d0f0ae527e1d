"""Decode attention of a recorded step on a CPU: what follows from where the tensors are is worked out once.

It serves the bare case: one query a row, a dense page table, a contiguous cache, logits that are only scaled. Many rows
of short contexts are copied side by side and done in one product, for there calls cost more than bytes; other rows are
done one by one over their own pages.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .flash_attention import flash_attention

_FLASH = getattr(flash_attention, "_op", flash_attention)  # without the checks of the Python around it
_COPIED_ROWS = 4
_COPIED_BYTES = 1 << 17  # keys and values of a row up to which a copy costs less than a call of its own


def bind_bare_decode(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    sm_scale: float,
    window_left: int,
) -> Callable[[], None]:
    """Return the attention of fixed tensors.

    Args:
        out: [b, num_qo_heads, head_dim], contiguous; rows of length 0 get 0.
        q: [b, num_qo_heads, head_dim], contiguous.
        k_cache: [pages, page_size, num_kv_heads, head_dim], contiguous.
        v_cache: the same shape.
        page_table: int32 [b, pages of a row].
        kv_lens: int32 [>= b], tokens of each row.
        sm_scale: multiplies the logits.
        window_left: keys before the last one that are seen; -1 is all.
    """
    page_size, heads, head_dim = k_cache.shape[1:]
    # the heads of a group are queries of the same keys
    queries, results = q.unflatten(1, (heads, -1)), out.unflatten(1, (heads, -1))
    row_queries, row_results = queries.unsqueeze(1).unbind(0), results.unsqueeze(1).unbind(0)
    tables, lengths = page_table.numpy(), kv_lens.numpy()[: q.shape[0]]
    page_bytes = 2 * k_cache[0].nbytes
    token = heads * head_dim
    strides = (0, head_dim, token, 1)
    copies = _SideBySide(k_cache, v_cache, page_table, q.dtype)

    def attend() -> None:
        lens = lengths.tolist()
        live = len(lens)
        while live and lens[live - 1] <= 0:
            live -= 1
        if live < len(lens):
            out[live:].zero_()
        longest = max(lens)
        pages = -(-longest // page_size)
        is_windowed = 0 <= window_left < longest - 1
        is_small = live >= _COPIED_ROWS and pages * page_bytes <= _COPIED_BYTES
        if is_small and not is_windowed and min(lens[:live]) > 0:
            keys, values, bias = copies.gather(live, pages, lengths)
            attended, _ = _FLASH(queries[:live], keys, values, attn_mask=bias, scale=sm_scale)
            results[:live].copy_(attended)
            return
        for row in range(live):
            length = lens[row]
            if length <= 0:
                results[row].zero_()
                continue
            begin = max(length - 1 - window_left, 0) if window_left >= 0 else 0
            own = tables[row, : -(-length // page_size)].tolist()
            if own[-1] - own[0] == len(own) - 1 and own == list(range(own[0], own[0] + len(own))):
                sizes = (1, heads, length - begin, head_dim)
                start = (own[0] * page_size + begin) * token
                keys = torch.as_strided(k_cache, sizes, strides, k_cache.storage_offset() + start)
                values = torch.as_strided(v_cache, sizes, strides, v_cache.storage_offset() + start)
            else:
                index = page_table[row, : len(own)]
                keys, values = (
                    cache.index_select(0, index).flatten(0, 1)[begin:length].transpose(0, 1).unsqueeze(0)
                    for cache in (k_cache, v_cache)
                )
            attended, _ = _FLASH(row_queries[row], keys, values, scale=sm_scale)
            row_results[row].copy_(attended)

    return attend


class _SideBySide:
    """Copies of all rows' keys and values as one tensor each, with a bias that hides what is past a row's end."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, dtype: torch.dtype) -> None:
        self._caches = (k_cache, v_cache)
        self._page_table = page_table
        self._dtype = dtype
        self._memory: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def gather(self, rows: int, pages: int, lengths: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values [rows, heads, tokens, head_dim] and the bias [rows, 1, 1, tokens]."""
        _, page_size, heads, head_dim = self._caches[0].shape
        if (rows, pages) not in self._memory:
            self._memory.clear()  # contexts only grow: the sizes before are not needed again
            shape = (rows * pages, page_size, heads, head_dim)
            cache = self._caches[0]
            self._memory[rows, pages] = (torch.empty(shape, dtype=cache.dtype), torch.empty(shape, dtype=cache.dtype))
        index = self._page_table[:rows, :pages].reshape(-1)
        side_by_side = []
        for cache, memory in zip(self._caches, self._memory[rows, pages], strict=True):
            torch.index_select(cache, 0, index, out=memory)
            side_by_side.append(memory.view(rows, pages * page_size, heads, head_dim))
        ends = lengths[:rows].tolist()
        bias = torch.zeros(rows, pages * page_size, dtype=self._dtype)
        for row, end in enumerate(ends):
            if end < pages * page_size:
                bias[row, end:] = -torch.inf
                # what unused places hold may be anything, and 0 * NaN is NaN
                side_by_side[0][row, end:] = 0
                side_by_side[1][row, end:] = 0
        keys, values = (copied.transpose(1, 2) for copied in side_by_side)
        return keys, values, bias[:, None, None]
