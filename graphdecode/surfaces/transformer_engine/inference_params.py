"""`InferenceParams`: the cache with TransformerEngine's interface."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphdecode.buffers import default_device
from graphdecode.cache.errors import require_choice, require_positive
from graphdecode.kernels.surfaces.page_gather import page_gather

from .cache_managers import QKV_FORMATS, NonPagedKVCacheManager, PagedKVCacheManager, layer_of
from .metadata import StepMetadata

OUTPUT_FORMATS = {"bshd": "bshd", "sbhd": "sbhd_2bshd", "thd": "thd_2bshd"}


class InferenceParams:
    """A key-value cache of many layers, with the lengths that attention needs on the device.

    Once a step: `pre_step` with the sequences and their new tokens. Once a layer: `step` with the new keys and values.

    Args:
        max_batch_size: rows.
        max_sequence_length: tokens of one sequence, at most.
        num_heads_kv: key/value heads.
        head_dim_k: size of a key head.
        dtype: the cache's.
        head_dim_v: size of a value head; None means `head_dim_k`.
        is_paged: whether sequences own pages or whole rows.
        total_num_pages: pages, if paged; any number >= 1.
        page_size: tokens in a page, if paged.
        max_ctx_len: tokens that a sequence may enter with or advance by in one step, at most; None means
            `max_sequence_length`.
        qkv_format: default of `step`: `bshd`, `sbhd` or `thd`.
        custom_cache_manager: a class to use instead of the built-in one; see `KVCacheManager`.
        device: None means CUDA if available, else the CPU.

    Attributes:
        pre_step_seqlens: int32 [max_batch], lengths before the step; 0 past the batch.
        cu_seqlens_q: int32 [max_batch + 1], sums of the step lengths; the last value repeats past the batch.
        cu_seqlens_kv: int32 [max_batch + 1], sums of the lengths after the step; likewise.
        cache_manager: the manager of the cache.
        batch_size: rows of the last `pre_step`.

    The other arguments are attributes, too, with defaults filled in.

    Raises:
        ValueError: a size is missing or is not a positive integer, or the format is unknown.
    """

    def __init__(
        self, max_batch_size: int, max_sequence_length: int, num_heads_kv: int | None = None,
        head_dim_k: int | None = None, dtype: torch.dtype | None = None, head_dim_v: int | None = None,
        is_paged: bool = False, total_num_pages: int | None = None, page_size: int | None = None,
        max_ctx_len: int | None = None, qkv_format: str = "bshd",
        custom_cache_manager: Callable[..., Any] | None = None, *, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        require_choice("qkv_format", qkv_format, QKV_FORMATS)
        if num_heads_kv is None or head_dim_k is None or dtype is None:
            raise ValueError(
                f"num_heads_kv, head_dim_k and dtype are required, got {num_heads_kv!r}, {head_dim_k!r} and {dtype!r}"
            )
        head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        max_ctx_len = max_sequence_length if max_ctx_len is None else max_ctx_len
        require_positive(
            max_batch_size=max_batch_size,
            max_sequence_length=max_sequence_length,
            num_heads_kv=num_heads_kv,
            head_dim_k=head_dim_k,
            head_dim_v=head_dim_v,
            max_ctx_len=max_ctx_len,
            **({"total_num_pages": total_num_pages, "page_size": page_size} if is_paged else {}),
        )
        if max_ctx_len > max_sequence_length:
            raise ValueError(
                f"max_ctx_len must be in 1..{max_sequence_length} (max_sequence_length), got {max_ctx_len}"
            )
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k, self.head_dim_v = num_heads_kv, head_dim_k, head_dim_v
        self.dtype, self.is_paged = dtype, is_paged
        self.total_num_pages = total_num_pages if is_paged else None
        self.page_size = page_size if is_paged else None
        self.max_ctx_len = max_ctx_len
        self.qkv_format = qkv_format
        self.device = default_device(device)
        built_in = PagedKVCacheManager if is_paged else NonPagedKVCacheManager
        self.cache_manager: Any = self._make_manager(custom_cache_manager or built_in)
        self.batch_size = 0
        metadata: Any = getattr(self.cache_manager, "metadata", None)
        self._staged_by_manager = isinstance(metadata, StepMetadata)
        self._metadata: StepMetadata = (
            metadata if self._staged_by_manager else StepMetadata(max_batch_size, self.device)
        )
        self.pre_step_seqlens = self._metadata.pre_step_seqlens
        self.cu_seqlens_q = self._metadata.cu_seqlens_q
        self.cu_seqlens_kv = self._metadata.cu_seqlens_kv

    def _make_manager(self, manager: Callable[..., Any]) -> Any:
        arguments: dict[str, Any] = {
            "max_batch_size": self.max_batch_size,
            "max_seqlen": self.max_sequence_length,
            "num_heads": self.num_heads_kv,
            "head_dim_k": self.head_dim_k,
            "dtype": self.dtype,
            "head_dim_v": self.head_dim_v,
            "max_ctx_len": self.max_ctx_len,
            "device": self.device,
        }
        if self.is_paged:
            arguments |= {"total_num_pages": self.total_num_pages, "page_size": self.page_size}
        accepted = inspect.signature(manager).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
            return manager(**arguments)
        return manager(**{name: value for name, value in arguments.items() if name in accepted})

    @property
    def sequences(self) -> OrderedDict[Hashable, int]:
        """Tokens of each sequence, in row order."""
        return self.cache_manager.sequences

    def reset(self) -> None:
        """Forget all sequences; memory, addresses and captured graphs stay."""
        self.cache_manager.reset()
        self.batch_size = 0
        if not self._staged_by_manager:
            self._stage(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate a layer's cache, zero-filled; a layer that exists is left as it is."""
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> None:
        """Prepare a step; see `StagedKVCacheManager.pre_step`."""
        self.cache_manager.pre_step(step_dict)
        self.batch_size = len(step_dict)
        if not self._staged_by_manager:
            rows = self.cache_manager.sequences
            after = np.fromiter(rows.values(), np.int64, len(rows))
            steps = np.fromiter([step_dict[i] for i in rows], np.int64, len(rows))
            self._stage(after - steps, after)

    def _stage(self, before: np.ndarray, after: np.ndarray) -> None:
        self._metadata.wait()
        self._metadata.set_lengths(before, after)
        self._metadata.upload()

    def get_seqlens_pre_step(self) -> Tensor:
        """Return `pre_step_seqlens`: where each row's new tokens begin (for rotary embeddings)."""
        return self.pre_step_seqlens

    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int, str]:
        """Write one layer's new keys and values, and return what attention over the whole cache needs.

        Args:
            new_k: [b, s, h, d_k] (bshd), [s, b, h, d_k] (sbhd) or [t, h, d_k] (thd, packed with `cu_seqlens_q`; a
                trailing pad is allowed).
            new_v: the same with d_v.
            qkv_format: layout of both; None means the constructor's.

        Returns:
            (keys, values, cu_seqlens_q, cu_seqlens_kv, max_sequence_length, out_format). The cache is bshd: its first
            b rows (thd: all rows), or the whole pool if paged. `out_format` is `bshd`, `sbhd_2bshd` or `thd_2bshd`.
        """
        qkv_format = self.qkv_format if qkv_format is None else qkv_format
        require_choice("qkv_format", qkv_format, QKV_FORMATS)
        lengths = (self.cu_seqlens_q, self.cu_seqlens_kv)
        keys, values = self.cache_manager.step(layer_number, new_k, new_v, *lengths, qkv_format)[:2]
        return keys, values, *lengths, self.max_sequence_length, OUTPUT_FORMATS[qkv_format]

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Return a layer of a paged cache as contiguous rows `[batch_size, max_seq, h, d]`, zero past each length."""
        if not self.is_paged:
            raise ValueError("convert_paged_to_nonpaged needs is_paged=True: this cache's rows are contiguous already")
        converted = []
        for pages in layer_of(self.cache_manager.cache, layer_number):
            rows = pages.new_empty((self.batch_size, self.max_sequence_length, *pages.shape[2:]))
            page_gather(rows, pages, self.cache_manager.page_table, self.cu_seqlens_kv)
            converted.append(rows)
        return converted[0], converted[1]

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Enter `child_id` with the parent's tokens; see `StagedKVCacheManager.fork`."""
        self._built_in("fork").fork(parent_id, child_id)

    def truncate(self, sequence_id: Hashable, length: int) -> None:
        """Forget a sequence's tokens past `length`; see `StagedKVCacheManager.truncate`."""
        self._built_in("truncate").truncate(sequence_id, length)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a step reads or writes, by name."""
        return self._built_in("tensors").tensors()

    def _built_in(self, verb: str) -> Any:
        if not hasattr(self.cache_manager, verb):
            raise ValueError(f"the custom cache manager {type(self.cache_manager).__name__} offers no {verb}")
        return self.cache_manager

    def __repr__(self) -> str:
        return f"InferenceParams(batch_size={self.batch_size}, qkv_format={self.qkv_format!r}, {self.cache_manager!r})"
