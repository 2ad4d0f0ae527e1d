"""The paged cache: sequences own pages of a pool, and a page table says which."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from .ledger import PageLedger
from .manager import KVCacheManager, require_positive
from .metadata import StepMetadata
from .pool import PagePool


class PagedKVCacheManager(KVCacheManager):
    """Keys `[pages + 1, page_size, heads, d_k]` and values with `d_v` a layer; the last page is the trash page.

    Used in two ways. With `pre_step` and `step` the manager stages lengths and page table for the device itself. An
    engine that stages its own rows uses `add`, `reserve`, `commit`, `free_sequence` and `fill_page_row`, which do
    host bookkeeping alone. Every verb that raises has changed nothing.

    Args:
        max_batch_size: rows.
        max_sequence_length: tokens of one sequence, at most.
        total_num_pages: pages that sequences can own, >= 1; the trash page is one more.
        page_size: tokens in a page.
        num_heads_kv: key/value heads.
        head_dim_k: size of a key head.
        dtype: of the cache.
        head_dim_v: size of a value head; None means `head_dim_k`.
        max_ctx_len: tokens that a sequence may advance by in one step, at most; None means no such limit.
        device: None means CUDA where there is one, else the CPU.
        prefix_caching: whether `add` finds the pages of known prefixes.

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
        max_batch_size: int,
        max_sequence_length: int,
        total_num_pages: int,
        page_size: int,
        num_heads_kv: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        max_ctx_len: int | None = None,
        *,
        device: torch.device | str | None = None,
        prefix_caching: bool = False,
    ) -> None:
        require_positive(max_sequence_length=max_sequence_length, total_num_pages=total_num_pages, page_size=page_size)
        self.page_size = page_size
        self.total_num_pages = total_num_pages
        self.trash_page = total_num_pages
        self.max_pages_per_row = -(-max_sequence_length // page_size)
        self.prefix_caching = prefix_caching
        self._ledger = PageLedger(total_num_pages, page_size, prefix_caching=prefix_caching)
        super().__init__(
            max_batch_size,
            max_sequence_length,
            num_heads_kv,
            head_dim_k,
            dtype,
            head_dim_v,
            max_ctx_len,
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
        """The pages' owners: ask it for `free`, `used`, `shared` and `parked`."""
        return self._ledger.pool

    @property
    def available_pages(self) -> int:
        """Pages that can be had: free ones, and those of prefixes that nobody uses now."""
        return self._ledger.available

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

    # How a step finds its pages.

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
        self._copy_page(self._ledger.fork(parent_id, child_id, length))

    def _truncate_places(self, sequence_id: Hashable, length: int) -> None:
        self._copy_page(self._ledger.truncate(sequence_id, length))
        self._row_ids = None

    def _copy_page(self, move: tuple[int, int] | None) -> None:
        if move is not None:
            source, destination = move
            for keys, values in self.cache.values():
                keys[destination].copy_(keys[source])
                values[destination].copy_(values[source])

    # The verbs of an engine.

    def add(self, sequence_id: Hashable, token_ids: Sequence[int] | None = None) -> int:
        """Enter a sequence, and return how many of its tokens are in the cache already.

        With `prefix_caching` and `token_ids` these are the full pages of its longest known prefix, which are shared
        from now on; never the whole prompt, at most all tokens but one.

        Raises:
            ValueError: the sequence exists, or there is no row for it; nothing has changed.
        """
        self._check_new(sequence_id)
        cached = self._ledger.open(sequence_id, token_ids)
        self.sequences[sequence_id] = cached
        self._row_ids = None
        return cached

    def reserve(self, sequence_id: Hashable, length: int) -> bool:
        """Make sure that a sequence has pages for `length` tokens, and return whether it got new ones.

        Raises:
            CacheFullError: there are not enough pages.
            UnknownSequenceError: there is no such sequence.
            ValueError: `length` is not in 0..max_sequence_length.
            In each case nothing has changed.
        """
        self._length(sequence_id)
        if not 0 <= length <= self.max_sequence_length:
            raise ValueError(
                f"length of {sequence_id!r} must be in 0..{self.max_sequence_length} (max_sequence_length), "
                f"got {length!r}"
            )
        grown = self._ledger.grow(sequence_id, length)
        if grown:
            self._row_ids = None
        return grown

    def commit(self, sequence_id: Hashable, length: int, token_ids: Sequence[int] | None = None) -> None:
        """Note a sequence's length after a step; with `token_ids` its full pages become findable prefixes.

        Args:
            sequence_id: of the sequence.
            length: tokens whose keys and values are in the cache; not fewer than before, `truncate` is for that.
            token_ids: at least the first `length` tokens.

        Raises:
            UnknownSequenceError: there is no such sequence.
            ValueError: `length` shrinks or goes past the reserved pages, or there are fewer token ids; nothing has
                changed.
        """
        current = self._length(sequence_id)
        reserved = len(self._ledger.pages[sequence_id]) * self.page_size
        if not current <= length <= reserved:
            raise ValueError(f"length of {sequence_id!r} must be in {current}..{reserved} (its pages), got {length!r}")
        if token_ids is not None:
            if len(token_ids) < length:
                raise ValueError(f"token_ids must hold the first {length} tokens, got {len(token_ids)}")
            self._ledger.publish(sequence_id, length, token_ids)
        self.sequences[sequence_id] = length

    def free_sequence(self, sequence_id: Hashable) -> None:
        """Give back a sequence's pages. Those of known prefixes stay findable until they are evicted.

        Raises:
            UnknownSequenceError: there is no such sequence.
        """
        self._length(sequence_id)
        self._ledger.close(sequence_id)
        del self.sequences[sequence_id]
        self._row_ids = None

    def fill_page_row(self, sequence_id: Hashable, out: np.ndarray) -> None:
        """Write a sequence's pages into `out`, int32 [max_pages_per_row], and the trash page behind them.

        Raises:
            UnknownSequenceError: there is no such sequence.
        """
        self._length(sequence_id)
        pages = self._ledger.pages[sequence_id]
        out[: len(pages)] = pages
        out[len(pages) :] = self.trash_page

    def __repr__(self) -> str:
        prefixes = ", prefix caching" if self.prefix_caching else ""
        return f"PagedKVCacheManager({self._describe()}, page_size={self.page_size}{prefixes}, {self.pool})"
