"""The rows of a plan of latent attention: their queries, their pages, and how long they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphdecode.cache.errors import require_fit, require_positive, require_tensors
from graphdecode.errors import shown
from graphdecode.kernels.attention.page_numbers import check_page_numbers
from graphdecode.kernels.surfaces.query_rows import check_query_rows, query_rows


@dataclass(frozen=True)
class MLAPlanMetadata:
    """The rows of a plan: their pages one row after another, or as a table; made by `csr`, `dense` or `dual`.

    Attributes:
        qo_indptr: int32 [b + 1], where each row's queries begin.
        kv_indptr: int32 [b + 1], where each row's pages begin in `kv_indices`.
        kv_indices: int32, pages of all rows, one row after another.
        kv_len_arr: int32 [b], tokens of each row, those of its queries included.
        cum_seq_lens_q: as `qo_indptr`.
        block_tables: int32 [b, pages], each row's pages.
        seq_lens: as `kv_len_arr`.
        max_q_len: a hint: no row has more queries.
    """

    qo_indptr: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    kv_len_arr: Tensor | None = None
    cum_seq_lens_q: Tensor | None = None
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> MLAPlanMetadata:
        """Return rows whose pages are listed one row after another."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: Tensor, block_tables: Tensor, seq_lens: Tensor, max_q_len: int | None = None
    ) -> MLAPlanMetadata:
        """Return rows whose pages are a table."""
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        *,
        cum_seq_lens_q: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Return rows in both forms; the first is used."""
        return cls(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len
        )  # fmt: skip


_CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")


class MLARows(NamedTuple):
    """Rows of queries over pages; see `MLAPlanMetadata`."""

    q_indptr: Tensor
    kv_indptr: Tensor | None  # None: `pages` is a table
    pages: Tensor
    kv_lens: Tensor

    @classmethod
    def of(cls, metadata: MLAPlanMetadata | None, flat: dict[str, Any], device: torch.device) -> MLARows:
        """Return the rows of a plan's arguments; raises ValueError if these do not fit each other. No value is read."""
        arguments = {name: value for name, value in flat.items() if value is not None}
        if metadata is not None:
            if not isinstance(metadata, MLAPlanMetadata):
                raise ValueError(f"metadata must be an MLAPlanMetadata, got {shown(metadata)}")
            if arguments:
                raise ValueError(f"metadata takes the place of {', '.join(arguments)}, got both")
            arguments = {name: value for name, value in vars(metadata).items() if value is not None}
        elif set(arguments) & set(_CSR) and set(arguments) - set(_CSR):
            raise ValueError(f"rows are {', '.join(_CSR)} or {', '.join(_DENSE)}, got {', '.join(arguments)}")
        if arguments.get("max_q_len") is not None:
            require_positive(max_q_len=arguments["max_q_len"])
        names = _CSR if set(arguments) & set(_CSR) else _DENSE
        if missing := [name for name in names if name not in arguments]:
            raise ValueError(f"plan needs metadata, {', '.join(_CSR)} or {', '.join(_DENSE)}: {missing[0]} is None")
        tensors = [arguments[name] for name in names]
        for name, tensor in zip(names, tensors, strict=True):
            require_tensors(**{name: tensor})
            if tensor.device not in (device, torch.device("cpu")):
                raise ValueError(f"{name} must be on {device} or on the host, got one on {tensor.device}")
        rows = tensors[-1].shape[0] if tensors[-1].dim() else 0
        require_fit(names[-1], tensors[-1], ("rows",), torch.int32)
        if not rows:
            raise ValueError(f"{names[-1]} must have at least one row, got none")
        for name, tensor in zip(names[:-1], tensors, strict=False):
            sizes = (rows, "pages") if name == "block_tables" else ("pages",) if name == "kv_indices" else (rows + 1,)
            require_fit(name, tensor, sizes, torch.int32)
        return cls(*tensors) if names is _CSR else cls(tensors[0], None, *tensors[1:])

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.kv_lens.shape[0]

    @property
    def queries(self) -> int | None:
        """The number of queries, or None if it is on a device."""
        return int(self.q_indptr[-1]) if self.q_indptr.is_cpu else None

    @property
    def _width(self) -> int:
        return self.pages.shape[-1]

    def check_host_values(self, page_size: int) -> None:
        """Raise a ValueError for lists on the host that no rows could have."""
        if all(each is None or each.is_cpu for each in (self.q_indptr, self.kv_indptr, self.kv_lens)):
            first = None if self.kv_indptr is None else self.kv_indptr.numpy()
            check_query_rows(self.q_indptr.numpy(), first, self.kv_lens.numpy(), self._width, page_size)

    def check_numbers(self, page_size: int, num_pages: int) -> None:
        """Raise a ValueError for a page in host memory that a pool does not have."""
        if self.pages.is_cpu and self.kv_lens.is_cpu and (self.kv_indptr is None or self.kv_indptr.is_cpu):
            check_page_numbers(self.pages, self.kv_indptr, self.kv_lens, page_size, num_pages, 0)

    def check_fit(self, buffers: MLARows) -> None:
        """Raise a ValueError if these do not fit into buffers of fixed addresses."""
        for name, buffer, tensor in (
            ("kv_len_arr", buffers.kv_lens, self.kv_lens),
            ("kv_indices", buffers.pages, self.pages),
        ):
            if len(tensor) > len(buffer):
                raise ValueError(f"the buffer {name} holds {len(buffer)} entries, got {len(tensor)}")

    def on(self, device: torch.device) -> MLARows:
        """Return these on a device; what is in host memory is copied, whatever the device."""
        q_indptr, kv_indptr, pages, kv_lens = (
            None if each is None else each.to(device, non_blocking=True, copy=each.is_cpu) for each in self
        )
        assert q_indptr is not None
        assert pages is not None
        assert kv_lens is not None
        return MLARows(q_indptr, kv_indptr, pages.contiguous(), kv_lens)

    def copy_to(self, buffers: MLARows) -> None:
        """Write these into buffers that are large enough; rows past them have no queries and no pages."""
        for buffer, tensor in zip(buffers, self, strict=True):
            if buffer is not None and tensor is not None:
                buffer[: tensor.shape[0]].copy_(tensor)
        if self.rows < buffers.rows:
            for indptr in (buffers.q_indptr, buffers.kv_indptr):
                if indptr is not None:
                    indptr[self.rows + 1 :].copy_(indptr[self.rows : self.rows + 1].expand(buffers.rows - self.rows))
            buffers.kv_lens[self.rows :].zero_()

    def as_single_queries(self, starts: Tensor, lengths: Tensor, page_size: int, *, causal: bool) -> None:
        """Write where each query's pages begin in the flat list, and how many keys it sees; see `query_rows`."""
        query_rows(
            starts, lengths, self.q_indptr, self.kv_indptr, self.kv_lens, width=self._width, page_size=page_size,
            causal=causal,
        )  # fmt: skip
