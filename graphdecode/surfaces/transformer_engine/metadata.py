"""The metadata of a step on the device: lengths, page table and row tags, uploaded in one copy."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from graphdecode.buffers import Slot, StagingBlock

_FRONT = {"pre_step_seqlens": "batch", "cu_seqlens_q": "batch+1", "cu_seqlens_kv": "batch+1"}
_TAGS = {"row_tags": "batch", "row_origins": "batch"}
_INT32_BYTES = 4


class StepMetadata:
    """Int32 buffers at fixed addresses on the device, and their staging block.

    `upload` copies the front of the block, as far as it has changed: the lengths, followed by the page table (if
    `pages_per_row` is not 0; unused entries are `null_page`). `host` has the staged arrays, to be written after
    `wait`; see `InferenceParams` and `NonPagedKVCacheManager`.
    """

    def __init__(
        self, max_batch_size: int, device: torch.device, *, pages_per_row: int = 0, null_page: int = 0
    ) -> None:
        slots = [Slot(name, (size,), torch.int32) for name, size in (_FRONT | _TAGS).items()]
        if pages_per_row:
            slots.append(Slot("page_table", ("batch", pages_per_row), torch.int32))
        self._block = StagingBlock(slots, max_batch_size, device)
        self.host, self._views = self._block.arrays, self._block.device_views
        self.wait = self._block.wait
        self.num_uploads = self.live_rows = self.tokens_in_step = self.widest_step = 0
        self.pre_step_seqlens, self.cu_seqlens_q, self.cu_seqlens_kv = (self._views[name] for name in _FRONT)
        self.row_tags, self.row_origins = (self._views[name] for name in _TAGS)
        self._table_bytes = _INT32_BYTES * max_batch_size * pages_per_row
        self._row_bytes = _INT32_BYTES * pages_per_row
        self._null_page = null_page
        self._filled = [0] * max_batch_size  # entries of each row that are not the null page
        self._dirty_rows = max_batch_size  # rows of the page table to upload
        if pages_per_row:
            self.page_table = self._views["page_table"]
            self.host["page_table"][:] = null_page
        self.upload()

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers on the device by name."""
        return dict(self._views)

    def set_lengths(self, before: np.ndarray, after: np.ndarray) -> None:
        """Write the lengths of the live rows before and after the step, and their sums."""
        n, steps = len(before), after - before
        pre, cu_q, cu_kv = (self.host[name] for name in _FRONT)
        pre[:n], pre[n:] = before, 0
        for sums, lengths in ((cu_q, steps), (cu_kv, after)):
            np.cumsum(lengths, out=sums[1 : n + 1])
            sums[n + 1 :] = sums[n]
        self.live_rows, self.tokens_in_step = n, int(cu_q[n])
        self.widest_step = int(steps.max()) if n else 0

    def set_pages(self, row: int, pages: Sequence[int], *, start: int = 0) -> None:
        """Write a row of the page table from entry `start` on; entries past its pages are the null page."""
        count, table = len(pages), self.host["page_table"][row]
        table[start:count] = pages[start:] if start else pages
        table[count : self._filled[row]] = self._null_page
        self._filled[row] = count
        self._dirty_rows = max(self._dirty_rows, row + 1)

    def upload(self) -> None:
        """Upload what has changed, in one asynchronous copy."""
        self._block.upload(len(self._block.host) - self._table_bytes + self._dirty_rows * self._row_bytes)
        self._dirty_rows = 0
        self.num_uploads += 1
