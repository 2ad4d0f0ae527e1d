"""The engine's cache: keys and values of all layers in pages, and which sequence owns which."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from .errors import UnknownSequenceError
from .ledger import PageLedger
from .pool import PagePool


class PagedKVCache:
    """Keys and values of all layers in pages, and which sequence owns which: plain tensors and host bookkeeping.

    It keeps no lengths. Every method that raises has changed nothing.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        total_num_pages: int,
        page_size: int,
        max_pages_per_row: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        prefix_caching: bool = False,
    ) -> None:
        self.page_size = page_size
        self.total_num_pages = total_num_pages
        self.trash_page = total_num_pages
        self.max_pages_per_row = max_pages_per_row
        self.prefix_caching = prefix_caching
        self._ledger = PageLedger(total_num_pages, page_size, prefix_caching=prefix_caching)
        shape = (total_num_pages + 1, page_size, num_kv_heads, head_dim)
        self.layers: list[tuple[Tensor, Tensor]] = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(num_layers)
        ]

    @property
    def pool(self) -> PagePool:
        return self._ledger.pool

    @property
    def available_pages(self) -> int:
        return self._ledger.available

    @property
    def sequence_ids(self) -> list[Hashable]:
        """Who is in the cache."""
        return list(self._ledger.pages)

    def add(self, sequence_id: Hashable, token_ids: Sequence[int] | None = None) -> int:
        if sequence_id in self._ledger.pages:
            raise ValueError(f"sequence {sequence_id!r} is in the cache already")
        return self._ledger.open(sequence_id, token_ids)

    def reserve(self, sequence_id: Hashable, length: int) -> bool:
        self._check(sequence_id)
        limit = self.max_pages_per_row * self.page_size
        if not 0 <= length <= limit:
            raise ValueError(f"length of {sequence_id!r} must be in 0..{limit}, got {length!r}")
        return self._ledger.grow(sequence_id, length)

    def publish(self, sequence_id: Hashable, length: int, token_ids: Sequence[int]) -> None:
        self._check(sequence_id)
        self._ledger.publish(sequence_id, length, token_ids)

    def truncate(self, sequence_id: Hashable, length: int) -> None:
        self._check(sequence_id)
        move = self._ledger.truncate(sequence_id, length)
        if move is not None:
            source, destination = move
            for keys, values in self.layers:
                keys[destination].copy_(keys[source])
                values[destination].copy_(values[source])

    def free(self, sequence_id: Hashable) -> None:
        self._check(sequence_id)
        self._ledger.close(sequence_id)

    def pages_of(self, sequence_id: Hashable) -> tuple[int, ...]:
        self._check(sequence_id)
        return tuple(self._ledger.pages[sequence_id])

    def fill_page_row(self, sequence_id: Hashable, out: np.ndarray) -> None:
        self._check(sequence_id)
        pages = self._ledger.pages[sequence_id]
        out[: len(pages)] = pages
        out[len(pages) :] = self.trash_page

    def reset(self) -> None:
        self._ledger.clear()

    def _check(self, sequence_id: Hashable) -> None:
        if sequence_id not in self._ledger.pages:
            raise UnknownSequenceError(f"no sequence {sequence_id!r} is in the cache")
