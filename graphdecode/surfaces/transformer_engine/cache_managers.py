"""The cache managers: rows or pages of sequences, their lengths, and the update in a step."""

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphdecode.buffers import default_device
from graphdecode.cache import PageLedger, UnknownSequenceError, copy_page, untouched_zeros
from graphdecode.cache.errors import require_choice, require_fit, require_hashable, require_positive, require_tensors
from graphdecode.errors import shown
from graphdecode.kernels.surfaces.cache_append import cache_append
from graphdecode.kernels.surfaces.cache_moves import move_rows, plan_row_moves, plan_words

from .metadata import StepMetadata

QKV_FORMATS = ("bshd", "sbhd", "thd")
_INT32_MAX = 2**31 - 1
log = logging.getLogger(__name__)


def layer_of(cache: Mapping[Any, tuple[Tensor, Tensor]], layer_number: Any) -> tuple[Tensor, Tensor]:
    """Return a layer's keys and values; raises ValueError if it has no memory."""
    require_hashable(layer_number=layer_number)
    if layer_number not in cache:
        raise ValueError(f"layer {layer_number!r} has no memory: call allocate_memory({layer_number!r}) first")
    return cache[layer_number]


class KVCacheManager:
    """Base of cache managers, as `InferenceParams` uses them.

    A custom subclass has these methods, `cache` (layer number -> (keys, values)), `sequences` (id -> tokens, in row
    order), and if paged `page_table`. It is called with those of the built-in manager's keyword arguments that it
    takes. Arguments of this class are ignored.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.sequences: OrderedDict[Hashable, int] = OrderedDict()

    def reset(self) -> None:
        """Forget all sequences."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate a layer's cache, zero-filled; a layer that exists is left as it is."""
        raise NotImplementedError

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> OrderedDict[Hashable, int]:
        """Prepare a step of these sequences and numbers of new tokens, and return `sequences` after it."""
        raise NotImplementedError

    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values, and return the layer's (keys, values) in the cache's own layout.

        Tensors are those of `InferenceParams.step`; `cu_new_seqlens` and `cu_cached_seqlens`, int32 [max_batch + 1],
        are the sums of the step lengths, and of the lengths after the step.
        """
        raise NotImplementedError


class StagedKVCacheManager(KVCacheManager, ABC):
    """Base of the built-in managers: sequences, their lengths and rows.

    Subclasses decide where tokens are stored, in `allocate_memory` and the `_places` hooks. All lengths on the device
    are derived from `sequences`; `metadata` has the buffers there. Arguments, by shorter names, and errors are those of
    `InferenceParams`.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_seqlen: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        *,
        max_ctx_len: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {
            "max_batch_size": max_batch_size,
            "max_seqlen": max_seqlen,
            "num_heads": num_heads,
            "head_dim_k": head_dim_k,
            "head_dim_v": head_dim_k if head_dim_v is None else head_dim_v,
            "max_ctx_len": max_seqlen if max_ctx_len is None else max_ctx_len,
        }
        require_positive(**sizes)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype must be a torch.dtype, got {dtype!r}")
        if max_batch_size * max_seqlen > _INT32_MAX:
            raise ValueError(
                f"max_batch_size * max_seqlen must be at most {_INT32_MAX} (lengths are summed in int32), "
                f"got {max_batch_size} * {max_seqlen}"
            )
        super().__init__()
        self.max_batch_size, self.max_seqlen, self.num_heads = max_batch_size, max_seqlen, num_heads
        self.head_dim_k, self.head_dim_v = head_dim_k, sizes["head_dim_v"]
        self.dtype, self.max_ctx_len, self.device = dtype, sizes["max_ctx_len"], default_device(device)
        self._row_ids: list[Hashable] | None = []  # sequences of the staged rows; None: to be staged again
        self.metadata = self._make_metadata()

    @abstractmethod
    def _make_metadata(self) -> StepMetadata:
        """Return the buffers on the device, and initialize a subclass's own state."""

    def _allocate(self, layer_number: int, slots: tuple[int, int]) -> None:
        if layer_number not in self.cache:
            sizes = ((*slots, self.num_heads, self.head_dim_k), (*slots, self.num_heads, self.head_dim_v))
            keys, values = (untouched_zeros(size, self.dtype, self.device) for size in sizes)
            self.cache[layer_number] = (keys, values)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a step reads or writes, by name."""
        by_name = self.metadata.tensors()
        for layer, (keys, values) in self.cache.items():
            by_name |= {f"keys_{layer}": keys, f"values_{layer}": values}
        return by_name

    def reset(self) -> None:
        """Forget all sequences. The cache keeps its memory and its graphs."""
        self.pre_step({})

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> OrderedDict[Hashable, int]:
        """Prepare a step: row i becomes the i-th sequence of `step_dict`, and advances by that many tokens.

        Sequences that are not in `step_dict` are removed, unknown ones are added. Costs the host O(batch + changed
        pages) and one asynchronous copy to the device.

        Returns:
            `sequences`: id -> length after the step.

        Raises:
            CacheFullError: there are not enough pages.
            ValueError: too many rows, a sequence too long, a step length that is not an integer >= 1.
            In each case nothing has changed.
        """
        if not isinstance(step_dict, Mapping):
            raise ValueError(f"step_dict must be a dict of sequences and their new tokens, got {shown(step_dict)}")
        ids = list(step_dict)
        steps = self._check_steps(step_dict)
        same_rows = ids == self._row_ids and ids == list(self.sequences)
        lengths = self.sequences
        before = np.fromiter([lengths.get(i, 0) for i in ids], np.int64, len(ids))
        after = before + steps
        if ids and after.max() > self.max_seqlen:
            row = int(after.argmax())
            raise ValueError(
                f"sequence {ids[row]!r} would have {after[row]} tokens, max_sequence_length is {self.max_seqlen}"
            )
        self.metadata.wait()
        (self._extend_storage if same_rows else self._arrange_storage)(ids, after)
        self.sequences = OrderedDict(zip(ids, after.tolist(), strict=True))
        self._row_ids = ids
        self.metadata.set_lengths(before, after)
        self.metadata.upload()
        return self.sequences

    def _check_steps(self, step_dict: Mapping[Hashable, int]) -> np.ndarray:
        if len(step_dict) > self.max_batch_size:
            raise ValueError(f"step_dict has {len(step_dict)} sequences, max_batch_size is {self.max_batch_size}")
        try:
            steps = np.array(list(step_dict.values()))
        except ValueError:  # lists of several lengths
            steps = np.array([0.5])
        if not len(steps):
            return steps.astype(np.int64)
        if steps.dtype.kind not in "iu" or steps.ndim != 1:
            raise ValueError(f"the step lengths in step_dict must be integers, got {shown(list(step_dict.values()))}")
        limit = self.max_ctx_len
        if steps.min() < 1 or steps.max() > limit:
            wrong = [i for i, n in step_dict.items() if not 1 <= n <= limit]
            raise ValueError(f"the step length of {wrong[0]!r} must be in 1..{limit}, got {step_dict[wrong[0]]}")
        return steps.astype(np.int64, copy=False)

    def _extend_storage(self, ids: list[Hashable], after: np.ndarray) -> None:
        """Allocate for the lengths `after`, with the rows of the last step; an error has changed nothing."""

    @abstractmethod
    def _arrange_storage(self, ids: list[Hashable], after: np.ndarray) -> None:
        """Allocate for these sequences in these rows, and free all others; an error has changed nothing."""

    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor]:
        """Append the new keys and values of one layer to each row, and return the layer's cache.

        Once captured, it is valid for any later `pre_step` whose steps fit the captured shapes; b, s and t may be
        larger than needed. Rows past the batch write nothing. See `KVCacheManager.step`.

        Raises:
            ValueError: an argument does not fit; nothing has changed.
        """
        require_tensors(new_k=new_k, new_v=new_v, cu_new_seqlens=cu_new_seqlens, cu_cached_seqlens=cu_cached_seqlens)
        keys, values = layer_of(self.cache, layer_number)
        require_choice("qkv_format", qkv_format, QKV_FORMATS)
        for name, tensor, dim in (("new_k", new_k, self.head_dim_k), ("new_v", new_v, self.head_dim_v)):
            require_tensors(keys.device, **{name: tensor})
            require_fit(name, tensor, (*qkv_format[:-2], self.num_heads, dim), self.dtype)
        if new_k.shape[:-1] != new_v.shape[:-1]:
            raise ValueError(f"new_k and new_v differ: {tuple(new_k.shape)} and {tuple(new_v.shape)}")
        for name, tensor in (("cu_new_seqlens", cu_new_seqlens), ("cu_cached_seqlens", cu_cached_seqlens)):
            require_fit(name, tensor, (self.max_batch_size + 1,), torch.int32)
        if qkv_format == "sbhd":
            new_k, new_v = new_k.transpose(0, 1), new_v.transpose(0, 1)
        if qkv_format == "thd":
            self._check_room("tokens", new_k.shape[0], self.metadata.tokens_in_step, None)
        else:
            self._check_room("rows", new_k.shape[0], self.metadata.live_rows, self.max_batch_size)
            self._check_room("tokens a row", new_k.shape[1], self.metadata.widest_step, None)
        rows = self.max_batch_size if qkv_format == "thd" else new_k.shape[0]
        return self._write(layer_number, (keys, values, new_k, new_v, cu_new_seqlens, cu_cached_seqlens), rows)

    @abstractmethod
    def _write(self, layer: int, tensors: tuple[Tensor, ...], rows: int) -> tuple[Tensor, Tensor]:
        """Run `cache_append` with its tensors, and return the layer's first `rows` rows."""

    @staticmethod
    def _check_room(unit: str, count: int, needed: int, limit: int | None) -> None:
        if count < needed or (limit is not None and count > limit):
            upper = f"..{limit}" if limit is not None else " or more"
            raise ValueError(f"new_k and new_v must have {needed}{upper} {unit} for this step, got {count}")

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Add `child_id` after all other rows, with the parent's tokens. Call it between steps.

        Raises:
            CacheFullError: there is no page for the child.
            UnknownSequenceError: there is no such parent.
            ValueError: the child exists, or there is no row for it.
            In each case nothing has changed.
        """
        require_hashable(parent_id=parent_id, child_id=child_id)
        length = self._length(parent_id)
        if child_id in self.sequences:
            raise ValueError(f"sequence {child_id!r} is in the cache already")
        if len(self.sequences) >= self.max_batch_size:
            raise ValueError(f"there is no row for {child_id!r}: max_batch_size is {self.max_batch_size}")
        self._fork_storage(parent_id, child_id, length)
        self.sequences[child_id] = length
        self._row_ids = None

    def truncate(self, sequence_id: Hashable, length: int) -> None:
        """Forget a sequence's tokens past `length` (rejected speculation). Call it between steps.

        Raises:
            CacheFullError: the new last page is shared, and there is no page for a copy of it.
            UnknownSequenceError: there is no such sequence.
            ValueError: `length` is not in 0..the sequence's length.
            In each case nothing has changed.
        """
        require_hashable(sequence_id=sequence_id)
        current = self._length(sequence_id)
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= current:
            raise ValueError(f"length must be in 0..{current}, the length of {sequence_id!r}, got {length!r}")
        self._truncate_storage(sequence_id, length)
        self.sequences[sequence_id] = length

    @abstractmethod
    def _fork_storage(self, parent_id: Hashable, child_id: Hashable, length: int) -> None:
        """Add a child with the parent's first `length` tokens; an error has changed nothing."""

    def _truncate_storage(self, sequence_id: Hashable, length: int) -> None:
        """Free what is past `length` tokens; an error has changed nothing."""

    def _length(self, sequence_id: Hashable) -> int:
        if sequence_id not in self.sequences:
            raise UnknownSequenceError(f"no sequence {sequence_id!r} is in the cache")
        return self.sequences[sequence_id]

    def _describe(self) -> str:
        tokens = sum(self.sequences.values())
        value_dim = f", head_dim_v={self.head_dim_v}" if self.head_dim_v != self.head_dim_k else ""
        size = sum(k.nbytes + v.nbytes for k, v in self.cache.values()) / 2**20
        return (
            f"{len(self.sequences)} of {self.max_batch_size} rows, {tokens} tokens, "
            f"max_sequence_length={self.max_seqlen}, num_heads_kv={self.num_heads}, "
            f"head_dim_k={self.head_dim_k}{value_dim}, {str(self.dtype).removeprefix('torch.')}, "
            f"{len(self.cache)} layers of {size:.1f} MiB in all, on {self.device}"
        )


class NonPagedKVCacheManager(StagedKVCacheManager):
    """Keys `[max_batch, max_seq, heads, d_k]` and values with `d_v` a layer; row i of both is row i of the batch.

    When sequences change rows their tokens are moved by the step. Each sequence has a tag; each layer stores on the
    device the tag of each row, and a step moves rows whose tags differ from those that the host staged. So a layer that
    missed a step catches up in the next one. A fork has its parent's tag as origin, and is copied in the same way.
    """

    def _make_metadata(self) -> StepMetadata:
        self._tags: dict[Hashable, int] = {}
        self._origins: dict[Hashable, int] = {}  # fork -> the tag of the parent's tokens
        self._last_tag = 0
        self._owners: dict[int, Tensor] = {}  # layer -> tags of the tokens in each row
        self._plan = torch.zeros(plan_words(self.max_batch_size), dtype=torch.int32, device=self.device)
        return StepMetadata(self.max_batch_size, self.device)

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate a layer's rows, zero-filled; a layer that exists is left as it is."""
        if layer_number not in self.cache:
            self._allocate(layer_number, (self.max_batch_size, self.max_seqlen))
            self._owners[layer_number] = torch.zeros(self.max_batch_size, dtype=torch.int32, device=self.device)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a step reads or writes, by name."""
        owners = {f"owners_{layer}": tags for layer, tags in self._owners.items()}
        return {**super().tensors(), **owners, "row_moves": self._plan}

    def _arrange_storage(self, ids: list[Hashable], after: np.ndarray) -> None:
        self._tags = {i: self._tags.get(i) or self._new_tag() for i in ids}
        self._origins = {i: self._origins[i] for i in ids if i in self._origins}
        for staged, values in (
            (self.metadata.host["row_tags"], [self._tags[i] for i in ids]),
            (self.metadata.host["row_origins"], [self._origins.get(i, 0) for i in ids]),
        ):
            staged[: len(values)], staged[len(values) :] = values, 0

    def _new_tag(self) -> int:
        self._last_tag += 1
        return self._last_tag

    def _fork_storage(self, parent_id: Hashable, child_id: Hashable, length: int) -> None:
        tag = self._tags[parent_id]
        # a parent without a step has no row yet: its own origin has the tokens
        self._origins[child_id] = tag if tag in self.metadata.host["row_tags"] else self._origins[parent_id]
        self._tags[child_id] = self._new_tag()

    def _write(self, layer: int, tensors: tuple[Tensor, ...], rows: int) -> tuple[Tensor, Tensor]:
        keys, values, *_, new_seqlens, cached_seqlens = tensors
        tags = (self._owners[layer], self.metadata.row_tags, self.metadata.row_origins)
        plan_row_moves(self._plan, *tags, new_seqlens, cached_seqlens)
        move_rows(keys, values, self._plan)
        cache_append(*tensors)
        return keys[:rows], values[:rows]

    def __repr__(self) -> str:
        return f"NonPagedKVCacheManager({self._describe()})"


class PagedKVCacheManager(StagedKVCacheManager):
    """Keys `[pages + 1, page_size, heads, d_k]` and values with `d_v` a layer; the last page is the null page.

    Args:
        total_num_pages: pages that sequences can own, >= 1; the null page is one more.
        page_size: tokens in a page.
        others: see `StagedKVCacheManager`.

    Attributes:
        page_table: int32 [max_batch, max_pages_per_row] on the device; unused entries are the null page.
        null_page: the page for padding, `total_num_pages`.
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
        require_positive(total_num_pages=total_num_pages, page_size=page_size, max_seqlen=max_seqlen)
        self.page_size, self.total_num_pages = page_size, total_num_pages
        self.null_page = total_num_pages
        self.max_pages_per_row = -(-max_seqlen // page_size)
        self._ledger = PageLedger(total_num_pages, page_size, prefix_caching=False)
        self.pool = self._ledger.pool  # counts pages: `free`, `used` and `shared`
        super().__init__(
            max_batch_size, max_seqlen, num_heads, head_dim_k, dtype, head_dim_v, max_ctx_len=max_ctx_len, device=device
        )
        self.page_table = self.metadata.page_table
        self._row_pages: list[tuple[list[int], int]] = [([], 0)] * max_batch_size  # staged: the list, its length then
        self._capacity = np.zeros(max_batch_size, dtype=np.int64)  # tokens that each row's pages hold

    def _make_metadata(self) -> StepMetadata:
        return StepMetadata(
            self.max_batch_size, self.device, pages_per_row=self.max_pages_per_row, null_page=self.null_page
        )

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate a layer's pages and its null page, zero-filled; a layer that exists is left as it is."""
        self._allocate(layer_number, (self.total_num_pages + 1, self.page_size))

    def pages_of(self, sequence_id: Hashable) -> tuple[int, ...]:
        """Return a sequence's pages, in order."""
        self._length(sequence_id)
        return tuple(self._ledger.pages[sequence_id])

    def get_sequence_count(self) -> int:
        """Return the number of sequences in the cache."""
        return len(self.sequences)

    def get_sequence_lengths(self) -> list[int]:
        """Return the sequences' lengths, in row order."""
        return list(self.sequences.values())

    def has_free_page(self) -> bool:
        """Return whether a sequence could get another page."""
        return self.pool.free > 0

    def get_page_count(self, seq: Hashable) -> int:
        """Return the number of a sequence's pages; raises UnknownSequenceError."""
        return len(self.pages_of(seq))

    def get_page_list(self, seq: Hashable) -> list[int]:
        """Return a sequence's pages, in order; raises UnknownSequenceError."""
        return list(self.pages_of(seq))

    def get_page_table(self, sequences: Sequence[Hashable]) -> Tensor:
        """Return the page table of these sequences, int32 [max_batch, max_pages_per_row] on the device.

        For the rows of the last step that is `page_table` itself, else a new tensor. Unused entries are the null page.

        Raises:
            UnknownSequenceError: there is no such sequence.
            ValueError: more than `max_batch_size` sequences.
        """
        rows = list(sequences)
        if rows == self._row_ids:
            return self.page_table
        if len(rows) > self.max_batch_size:
            raise ValueError(f"sequences must be at most {self.max_batch_size} (max_batch_size), got {len(rows)}")
        table = np.full((self.max_batch_size, self.max_pages_per_row), self.null_page, dtype=np.int32)
        for row, pages in enumerate(map(self.pages_of, rows)):
            table[row, : len(pages)] = pages
        return torch.from_numpy(table).to(self.device)

    def print_cache(self) -> None:
        """Log the pages in use, and each sequence's tokens and pages, at the level of debugging."""
        log.debug("%s", self)
        for row, (seq, length) in enumerate(self.sequences.items()):
            log.debug("row %d: sequence %r, %d tokens, pages %s", row, seq, length, self.get_page_list(seq))

    def _extend_storage(self, ids: list[Hashable], after: np.ndarray) -> None:
        rows = np.nonzero(after > self._capacity[: len(ids)])[0].tolist()
        if rows:
            self._ledger.exchange((), [(ids[row], int(after[row])) for row in rows])
            for row in rows:
                self._stage_row(row, self._ledger.pages[ids[row]])

    def _arrange_storage(self, ids: list[Hashable], after: np.ndarray) -> None:
        staying = set(ids)
        leaving = [i for i in self.sequences if i not in staying]
        self._ledger.exchange(leaving, zip(ids, after.tolist(), strict=True))
        for row, sequence_id in enumerate(ids):
            self._stage_row(row, self._ledger.pages[sequence_id])
        for row in range(len(ids), self.max_batch_size):
            self._stage_row(row, [])

    def _stage_row(self, row: int, pages: list[int]) -> None:
        staged, count = self._row_pages[row]
        if count == len(pages) and (staged is pages or not pages):
            return
        self.metadata.set_pages(row, pages, start=count if staged is pages else 0)
        self._row_pages[row] = (pages, len(pages))
        self._capacity[row] = len(pages) * self.page_size

    def _fork_storage(self, parent_id: Hashable, child_id: Hashable, length: int) -> None:
        copy_page(self.cache.values(), self._ledger.fork(parent_id, child_id, length))

    def _truncate_storage(self, sequence_id: Hashable, length: int) -> None:
        copy_page(self.cache.values(), self._ledger.truncate(sequence_id, length))
        self._row_ids = None

    def _write(self, layer: int, tensors: tuple[Tensor, ...], rows: int) -> tuple[Tensor, Tensor]:
        keys, values, new_k, new_v, new_seqlens, cached_seqlens = tensors
        cache_append(keys, values, new_k, new_v, new_seqlens, cached_seqlens, self.page_table)
        return keys, values

    def __repr__(self) -> str:
        return f"PagedKVCacheManager({self._describe()}, page_size={self.page_size}, {self.pool})"
