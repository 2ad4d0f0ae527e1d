"""The paged key-value cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from .ledger import PageLedger


class PagedKVCacheManager:
    """Pages of keys and values, and who owns them (engine verbs)."""

    def __init__(self, max_batch_size: int, max_sequence_length: int, total_num_pages: int, page_size: int,
                 num_heads_kv: int, head_dim_k: int, dtype: torch.dtype, head_dim_v: int | None = None,
                 max_ctx_len: int | None = None, *, device: torch.device | str | None = None,
                 prefix_caching: bool = False) -> None:
        self.max_sequence_length = max_sequence_length
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._ledger = PageLedger(total_num_pages, page_size, prefix_caching=prefix_caching)
        self.trash_page = total_num_pages
        self.max_pages_per_row = -(-max_sequence_length // page_size)
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.sequences: OrderedDict[Hashable, int] = OrderedDict()
        self._shape = (total_num_pages + 1, page_size, num_heads_kv)
        self._dims = (head_dim_k, head_dim_v or head_dim_k)
        self._dtype, self._device = dtype, device

    @property
    def pool(self):
        return self._ledger.pool

    def allocate_memory(self, layer: int) -> None:
        self.cache[layer] = tuple(torch.zeros((*self._shape, d), dtype=self._dtype, device=self._device) for d in self._dims)

    @property
    def available_pages(self) -> int:
        return self._ledger.available

    def add(self, seq_id: Hashable, token_ids: Sequence[int] | None = None) -> int:
        length = self._ledger.open(seq_id, token_ids)
        self.sequences[seq_id] = length
        return length

    def reserve(self, seq_id: Hashable, length: int) -> bool:
        return self._ledger.grow(seq_id, length)

    def commit(self, seq_id: Hashable, length: int, token_ids: Sequence[int] | None = None) -> None:
        self.sequences[seq_id] = length
        if token_ids is not None:
            self._ledger.publish(seq_id, length, token_ids)

    def free_sequence(self, seq_id: Hashable) -> None:
        self._ledger.close(seq_id)
        del self.sequences[seq_id]

    def fill_page_row(self, seq_id: Hashable, out: np.ndarray) -> None:
        pages = self._ledger.pages[seq_id]
        out[: len(pages)] = pages
        out[len(pages) :] = self.trash_page
