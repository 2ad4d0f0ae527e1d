"""The paged cache: sequences own pages of a pool, and a page table says which."""

from collections.abc import Hashable

import numpy as np
import torch

from graphdecode.cache import PageLedger, PagePool, copy_page, require_positive

from .metadata import StepMetadata
from .staged_manager import StagedKVCacheManager


class PagedKVCacheManager(StagedKVCacheManager):
    """Keys `[pages + 1, page_size, heads, d_k]` and values with `d_v` a layer; the last page is the trash page.

    Args:
        total_num_pages: pages that sequences can own, >= 1; the trash page is one more.
        page_size: tokens in a page.
        num_heads: key/value heads.
        head_dim_k: size of a key head.
        dtype: of the cache.
        max_batch_size: rows.
        max_seqlen: tokens of one sequence, at most.
        head_dim_v: size of a value head; None means `head_dim_k`.
        max_ctx_len: tokens that a sequence may advance by in one step, at most; None means `max_seqlen`.
        device: None means CUDA where there is one, else the CPU.

    Attributes:
        cache: layer number -> (keys, values).
        sequences: id -> tokens, in row order.
        page_table: int32 [max_batch, max_pages_per_row] on the device; unused entries name the trash page.
        trash_page: the page that nobody owns, `total_num_pages`.
        max_pages_per_row: width of the page table.

    Raises:
        ValueError: a size is not a positive integer.
    """

    def __init__(
        self,
        total_num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        max_batch_size: int,
        max_seqlen: int,
        head_dim_v: int | None = None,
        *,
        max_ctx_len: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        require_positive(max_seqlen=max_seqlen, total_num_pages=total_num_pages, page_size=page_size)
        self.page_size = page_size
        self.total_num_pages = total_num_pages
        self.trash_page = total_num_pages
        self.max_pages_per_row = -(-max_seqlen // page_size)
        self._ledger = PageLedger(total_num_pages, page_size, prefix_caching=False)
        super().__init__(
            max_batch_size,
            max_seqlen,
            num_heads,
            head_dim_k,
            dtype,
            head_dim_v,
            max_ctx_len=max_ctx_len,
            device=device,
        )
        assert self.metadata.page_table is not None
        self.page_table = self.metadata.page_table
        self._row_pages: list[tuple[list[int], int]] = [([], 0)] * max_batch_size  # staged: the list, its length then
        self._capacity = np.zeros(max_batch_size, dtype=np.int64)  # tokens that each row's pages hold

    def _make_metadata(self) -> StepMetadata:
        return StepMetadata(
            self.max_batch_size, self.device, pages_per_row=self.max_pages_per_row, trash_page=self.trash_page
        )

    @property
    def pool(self) -> PagePool:
        """The pages' owners: ask it for `free`, `used` and `shared`."""
        return self._ledger.pool

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate a layer's pages and its trash page, zero-filled; a layer that exists is left as it is."""
        self._allocate(layer_number, (self.total_num_pages + 1, self.page_size))

    def pages_of(self, sequence_id: Hashable) -> tuple[int, ...]:
        """Return the pages of a sequence, in order.

        Raises:
            UnknownSequenceError: there is no such sequence.
        """
        self._length(sequence_id)
        return tuple(self._ledger.pages[sequence_id])

    def _extend_places(self, ids: list[Hashable], after: np.ndarray) -> None:
        rows = np.nonzero(after > self._capacity[: len(ids)])[0].tolist()
        if rows:
            self._ledger.exchange((), [(ids[row], int(after[row])) for row in rows])
            for row in rows:
                self._stage_row(row, self._ledger.pages[ids[row]])

    def _arrange_places(self, ids: list[Hashable], after: np.ndarray) -> None:
        staying = set(ids)
        leaving = [i for i in self.sequences if i not in staying]
        self._ledger.exchange(leaving, zip(ids, after.tolist(), strict=True))
        for row, sequence_id in enumerate(ids):
            self._stage_row(row, self._ledger.pages[sequence_id])
        for row in range(len(ids), self.max_batch_size):
            self._stage_row(row, [])

    def _stage_row(self, row: int, pages: list[int]) -> None:
        staged, count = self._row_pages[row]
        if staged is pages:
            if count == len(pages):
                return
            start = count
        elif not pages and not count:
            return
        else:
            start = 0
        self.metadata.set_pages(row, pages, start=start)
        self._row_pages[row] = (pages, len(pages))
        self._capacity[row] = len(pages) * self.page_size

    def _forget_places(self) -> None:
        self._ledger.clear()
        for row in range(self.max_batch_size):
            self._stage_row(row, [])

    def _fork_places(self, parent_id: Hashable, child_id: Hashable, length: int) -> None:
        copy_page(self.cache.values(), self._ledger.fork(parent_id, child_id, length))

    def _truncate_places(self, sequence_id: Hashable, length: int) -> None:
        copy_page(self.cache.values(), self._ledger.truncate(sequence_id, length))
        self._row_ids = None

    def __repr__(self) -> str:
        return f"PagedKVCacheManager({self._describe()}, page_size={self.page_size}, {self.pool})"
