"""The rows of a decode plan: which pages they have, and how long they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphdecode.attention.append import get_seq_lens
from graphdecode.cache.errors import require_fit, require_tensors
from graphdecode.kernels.attention.attention_plan import (
    PlanSizes,
    attention_plan,
    check_page_lists,
    paged_attention_plan,
)
from graphdecode.kernels.attention.page_numbers import check_page_numbers


class PageLists(NamedTuple):
    """The pages of rows, one row after another as FlashInfer lists them, or as a table."""

    table: Tensor  # int32, pages of all rows; without `indptr` [b, pages]
    indptr: Tensor | None  # int32 [b + 1], where each row's pages begin in the table; None: in its own row
    lengths: Tensor  # int32 [b], tokens in each row's last page; without `indptr` in all of them

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> PageLists:
        """Return the rows that a plan's arguments describe; raises ValueError if these do not fit each other.

        No values are read, but where all are on the host.
        """
        names = ("indptr", "indices", "last_page_len", "block_tables", "seq_lens", "page_size")
        indptr, indices, last_page_len, block_tables, seq_lens, page_size = (arguments[name] for name in names)
        if seq_lens is not None:
            require_tensors(seq_lens=seq_lens)
            require_fit("seq_lens", seq_lens, ("rows",), torch.int32)
        if block_tables is not None:
            require_tensors(block_tables=block_tables)
            require_fit("block_tables", block_tables, ("rows", "pages"), torch.int32)
        if indptr is not None and last_page_len is not None:
            _check_metadata(indptr, last_page_len)
        if last_page_len is None:
            if seq_lens is None:
                raise ValueError("last_page_len or seq_lens is needed to know how long rows are, got None")
            rows, last_page_len = seq_lens.shape[0], _last_page_lens(seq_lens, page_size)
        else:
            rows = last_page_len.shape[0]
        for name, tensor in (("seq_lens", seq_lens), ("block_tables", block_tables)):
            if tensor is not None and tensor.shape[0] != rows:
                raise ValueError(f"{name} must have {rows} rows as last_page_len, got {tensor.shape[0]}")
        if indices is None:
            if block_tables is None:
                raise ValueError("indices or block_tables is needed to know the pages of rows, got None")
            if seq_lens is None:
                if indptr is None:
                    raise ValueError("indptr or seq_lens is needed to know how long rows are, got None")
                seq_lens = get_seq_lens(indptr, last_page_len, page_size)
            return cls(block_tables, None, seq_lens)
        require_tensors(indices=indices, indptr=indptr)
        assert indptr is not None
        _check_metadata(indptr, last_page_len)
        _require_values("indices", indices)
        lists = cls(indices, indptr, last_page_len)
        if seq_lens is not None and seq_lens.is_cpu and lists.is_on_host:
            counted = get_seq_lens(indptr, last_page_len, page_size)
            if not torch.equal(counted, seq_lens):
                raise ValueError(
                    f"seq_lens must be the tokens in indptr and last_page_len, {counted.tolist()}, "
                    f"got {seq_lens.tolist()}"
                )
        return lists

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.lengths.shape[0]

    @property
    def is_on_host(self) -> bool:
        """Whether lengths can be read without waiting for a device."""
        return self.lengths.is_cpu and (self.indptr is None or self.indptr.is_cpu)

    @property
    def numbers_on_host(self) -> PageLists | None:
        """A copy of these if page numbers can be read without waiting for a device."""
        are_readable = self.table.is_cpu and self.is_on_host
        return self.on(self.table.device, non_blocking=False) if are_readable else None

    def check_fit(self, buffers: PageLists) -> None:
        """Raise a ValueError if these do not fit into buffers of fixed addresses."""
        if self.indptr is None:
            raise ValueError("block_tables without indices needs use_cuda_graph=False: there is no buffer for them")
        if self.rows > buffers.rows:
            raise ValueError(f"the buffers hold {buffers.rows} rows, got {self.rows}")
        if len(self.table) > len(buffers.table):
            raise ValueError(f"paged_kv_indices_buffer holds {len(buffers.table)} pages, got {len(self.table)}")

    def check_host_values(self, page_size: int) -> None:
        """Raise a ValueError for lists on the host that no row could have."""
        if self.indptr is not None and self.is_on_host:
            check_page_lists(self.indptr.numpy(), self.lengths.numpy(), self.table.shape[0], page_size)

    def check_numbers(self, page_size: int, num_pages: int, window: int) -> None:
        """Raise a ValueError for a page on the host that a pool does not have; a window reads its tokens' alone."""
        check_page_numbers(self.table, self.indptr, self.lengths, page_size, num_pages, window)

    def on(self, device: torch.device, *, non_blocking: bool) -> PageLists:
        """Return these on a device; what is in host memory is copied, whatever the device."""
        table, indptr, lengths = (
            None if each is None else each.to(device, non_blocking=non_blocking, copy=each.is_cpu) for each in self
        )
        assert table is not None
        assert lengths is not None
        return PageLists(table, indptr, lengths)

    def plan(self, kv_lens: Tensor, plan: Tensor, sizes: PlanSizes) -> None:
        """Plan a decode of these rows on their device."""
        if self.indptr is not None:
            paged_attention_plan(kv_lens, plan, self.indptr, self.lengths, sizes, self.table.shape[0])
        else:
            live = torch.full((1,), self.rows, dtype=torch.int32, device=kv_lens.device)
            most = self.table.shape[1] * sizes.page_size  # tokens that a row's pages hold
            attention_plan(kv_lens, plan, self.lengths.clamp(max=most) - 1, live, sizes)

    def copy_to(self, buffers: PageLists) -> None:
        """Write these into buffers that are large enough."""
        for buffer, tensor in zip(buffers, self, strict=True):
            if buffer is not None and tensor is not None:
                buffer[: tensor.shape[0]].copy_(tensor)


def _last_page_lens(seq_lens: Tensor, page_size: int) -> Tensor:
    return torch.where(seq_lens > 0, (seq_lens - 1) % page_size + 1, 0).to(torch.int32)


def _require_values(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ValueError(f"{name} must hold numbers, and is on the meta device")
    require_fit(name, tensor, ("entries",), torch.int32)


def _check_metadata(indptr: Tensor, last_page_len: Tensor) -> None:
    """Raise a ValueError if the tensors do not fit each other."""
    require_tensors(indptr=indptr, last_page_len=last_page_len)
    for name, tensor in (("indptr", indptr), ("last_page_len", last_page_len)):
        _require_values(name, tensor)
    rows = last_page_len.shape[0]
    if indptr.shape[0] != rows + 1 or not rows:
        raise ValueError(
            f"indptr must have one entry more than last_page_len, and at least 2, got {indptr.shape[0]} and {rows}"
        )
