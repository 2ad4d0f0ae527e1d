"""The contiguous cache: a sequence's row of the cache is its row of the batch."""

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from graphdecode.kernels.surfaces.cache_append import cache_append
from graphdecode.kernels.surfaces.cache_moves import move_rows, plan_row_moves, plan_words

from .metadata import StepMetadata
from .staged_manager import StagedKVCacheManager


class NonPagedKVCacheManager(StagedKVCacheManager):
    """Keys `[max_batch, max_seq, heads, d_k]` and values with `d_v` a layer; row i of both is row i of the batch.

    When sequences change rows their tokens move, inside the step. Each sequence has a tag, each layer remembers on
    the device which tag's tokens are in which row, and a step moves rows where the tags that the host staged differ.
    So a captured step is right for any later membership, and a layer that missed a step catches up in the next one.
    A fork names its parent's tag as origin, and is copied by the same move.

    Arguments, attributes and errors are those of `StagedKVCacheManager`.
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
        self._tags: dict[Hashable, int] = {}
        self._origins: dict[Hashable, int] = {}  # of forks: the tag of the tokens that they began with
        self._last_tag = 0
        self._owners: dict[int, Tensor] = {}  # layer -> tags of the tokens in each row
        self._plan = torch.zeros(plan_words(max_batch_size), dtype=torch.int32, device=self.device)

    def _make_metadata(self) -> StepMetadata:
        return StepMetadata(self.max_batch_size, self.device, with_tags=True)

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate a layer's rows, zero-filled; a layer that exists is left as it is."""
        if layer_number not in self.cache:
            self._allocate(layer_number, (self.max_batch_size, self.max_seqlen))
            self._owners[layer_number] = torch.zeros(self.max_batch_size, dtype=torch.int32, device=self.device)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a step reads or writes, by name, for whoever captures it."""
        owners = {f"owners_{layer}": tags for layer, tags in self._owners.items()}
        return {**super().tensors(), **owners, "row_moves": self._plan}

    def _extend_places(self, ids: list[Hashable], after: np.ndarray) -> None:
        """Nothing to do: every row has its place."""

    def _arrange_places(self, ids: list[Hashable], after: np.ndarray) -> None:
        self._tags = {i: self._tags.get(i) or self._new_tag() for i in ids}
        self._origins = {i: self._origins[i] for i in ids if i in self._origins}
        self._stage_tags([self._tags[i] for i in ids], [self._origins.get(i, 0) for i in ids])

    def _forget_places(self) -> None:
        self._tags, self._origins = {}, {}
        self._stage_tags([], [])

    def _stage_tags(self, tags: list[int], origins: list[int]) -> None:
        host_tags, host_origins = self.metadata.host_tags, self.metadata.host_origins
        assert host_tags is not None
        assert host_origins is not None
        host_tags[: len(tags)], host_tags[len(tags) :] = tags, 0
        host_origins[: len(tags)], host_origins[len(tags) :] = origins, 0

    def _new_tag(self) -> int:
        self._last_tag += 1
        return self._last_tag

    def _fork_places(self, parent_id: Hashable, child_id: Hashable, length: int) -> None:
        staged = self.metadata.host_tags
        assert staged is not None
        tag = self._tags[parent_id]
        # a parent that no step has seen is nowhere yet: its own origin is where the tokens are
        self._origins[child_id] = tag if tag in staged else self._origins[parent_id]
        self._tags[child_id] = self._new_tag()

    def _truncate_places(self, sequence_id: Hashable, length: int) -> None:
        """Nothing to do: tokens past the length are overwritten when the sequence grows again."""

    def _write(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.cache[layer_number]
        tags, origins = self.metadata.row_tags, self.metadata.row_origins
        assert tags is not None
        assert origins is not None
        plan_row_moves(self._plan, self._owners[layer_number], tags, origins, cu_new_seqlens, cu_cached_seqlens)
        move_rows(keys, values, self._plan)
        cache_append(keys, values, new_k, new_v, cu_new_seqlens, cu_cached_seqlens)
        return keys[:rows], values[:rows]

    def __repr__(self) -> str:
        return f"NonPagedKVCacheManager({self._describe()})"
