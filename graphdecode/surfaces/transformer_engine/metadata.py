"""The metadata of a step on the device: lengths, page table and row tags, moved there in one copy."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT_WORDS = 64
_RING_DEPTH = 2


class StepMetadata:
    """Int32 buffers at fixed addresses that the device reads, and the one block they are staged through.

    The lengths stand in front and the page table behind them, so that a step in which no page changed moves only the
    front: `upload` always makes one copy, of as much of the block as has changed.

    Args:
        max_batch_size: rows.
        device: where the buffers are.
        pages_per_row: width of the page table; 0 for none.
        trash_page: what unused page-table entries name.
        with_tags: whether the rows carry tags (who sits in which row of a contiguous cache).

    Attributes:
        pre_step_seqlens: [max_batch], lengths before the step; 0 past the batch.
        cu_seqlens_q: [max_batch + 1], sums of the step lengths; the last value repeats past the batch.
        cu_seqlens_kv: [max_batch + 1], sums of the lengths after the step; likewise.
        row_tags, row_origins: [max_batch] or None; see `NonPagedKVCacheManager`.
        page_table: [max_batch, pages_per_row] or None.
        num_uploads: copies made so far.
        live_rows, tokens_in_step, widest_step: of the step that was set last, on the host.
    """

    def __init__(
        self,
        max_batch_size: int,
        device: torch.device,
        *,
        pages_per_row: int = 0,
        trash_page: int = 0,
        with_tags: bool = False,
    ) -> None:
        rows = max_batch_size
        sizes = {"pre_step_seqlens": rows, "cu_seqlens_q": rows + 1, "cu_seqlens_kv": rows + 1}
        if with_tags:
            sizes |= {"row_tags": rows, "row_origins": rows}
        spans: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            spans[name] = slice(end, end + size)
            end += -(-size // _ALIGNMENT_WORDS) * _ALIGNMENT_WORDS
        self._front_words = end
        self._pages_per_row = pages_per_row
        self._trash_page = trash_page
        total = end + rows * pages_per_row
        mirror = torch.zeros(total, dtype=torch.int32)
        mirror[end:] = trash_page
        self._device_block = mirror.to(device, copy=True)
        self._mirror = mirror.numpy()
        on_cuda = device.type == "cuda"
        self._ring = [
            torch.empty(total, dtype=torch.int32, pin_memory=True) for _ in range(_RING_DEPTH if on_cuda else 0)
        ]
        self._events = [torch.cuda.Event() for _ in self._ring]
        self._host_block = mirror
        self.num_uploads = 0
        self.live_rows = self.tokens_in_step = self.widest_step = 0

        host = {name: self._mirror[span] for name, span in spans.items()}
        views = {name: self._device_block[span] for name, span in spans.items()}
        self._pre, self._cu_q, self._cu_kv = host["pre_step_seqlens"], host["cu_seqlens_q"], host["cu_seqlens_kv"]
        self.pre_step_seqlens: Tensor = views["pre_step_seqlens"]
        self.cu_seqlens_q: Tensor = views["cu_seqlens_q"]
        self.cu_seqlens_kv: Tensor = views["cu_seqlens_kv"]
        self.host_tags: np.ndarray | None = host.get("row_tags")
        self.host_origins: np.ndarray | None = host.get("row_origins")
        self.row_tags: Tensor | None = views.get("row_tags")
        self.row_origins: Tensor | None = views.get("row_origins")
        self.page_table: Tensor | None = None
        if pages_per_row:
            self.page_table = views["page_table"] = self._device_block[end:].view(rows, pages_per_row)
        self._views = views
        self._table = self._mirror[end:].reshape(rows, pages_per_row)
        self._filled = [0] * rows  # entries of each row that are not the trash page
        self._dirty_rows = 0  # page-table rows in front of this one travel with the next upload

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers on the device by name."""
        return dict(self._views)

    def set_lengths(self, before: np.ndarray, after: np.ndarray) -> None:
        """Write the lengths of the live rows before and after the step, and everything that follows from them."""
        n = len(before)
        self._pre[:n] = before
        self._pre[n:] = 0
        np.cumsum(after, out=self._cu_kv[1 : n + 1])
        self._cu_kv[n + 1 :] = self._cu_kv[n]
        steps = after - before
        np.cumsum(steps, out=self._cu_q[1 : n + 1])
        self._cu_q[n + 1 :] = self._cu_q[n]
        self.live_rows, self.tokens_in_step = n, int(self._cu_q[n])
        self.widest_step = int(steps.max()) if n else 0

    def set_pages(self, row: int, pages: Sequence[int], *, start: int = 0) -> None:
        """Write a row of the page table from entry `start` on; entries past its pages name the trash page."""
        count = len(pages)
        table = self._table[row]
        table[start:count] = pages[start:] if start else pages
        if count < self._filled[row]:
            table[count : self._filled[row]] = self._trash_page
        self._filled[row] = count
        self._dirty_rows = max(self._dirty_rows, row + 1)

    def upload(self) -> None:
        """Move what has changed to the device, in one copy that nothing waits for."""
        words = self._front_words + self._dirty_rows * self._pages_per_row
        source = self._host_block
        slot = self.num_uploads % _RING_DEPTH
        if self._ring:  # the mirror may be rewritten before the device has read it; the ring may not
            source = self._ring[slot]
            self._events[slot].synchronize()
            source[:words].copy_(self._host_block[:words])
        self._device_block[:words].copy_(source[:words], non_blocking=True)
        if self._ring:
            self._events[slot].record()
        self._dirty_rows = 0
        self.num_uploads += 1
