"""FlashInfer's older cascade of two levels: one prefix of contiguous keys, and each row's own pages."""

from __future__ import annotations

import torch
from torch import Tensor

from graphdecode.attention.append import KV_LAYOUTS, PagedCache
from graphdecode.attention.merge import merge_state_in_place
from graphdecode.attention.paged_decode import plan_rows
from graphdecode.cache.errors import require_choice, require_fit, require_tensors

from .batch_decode import BatchDecodeWithPagedKVCacheWrapper
from .cascade_level import attend_together, shared_wave_items
from .decode_problem import DecodeProblem, exact_queries, planned_dtypes


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Decode attention over a prefix that all rows share, read once for all of them, and then each row's own pages.

    `MultiLevelCascadeAttentionWrapper` is its successor. Arguments are those of `BatchDecodeWithPagedKVCacheWrapper`.
    """

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        require_choice("kv_layout", kv_layout, KV_LAYOUTS)
        require_tensors(float_workspace_buffer=float_workspace_buffer)
        self._layout, self._device = kv_layout, float_workspace_buffer.device
        self._unique = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._problem: DecodeProblem | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor | None) -> None:
        """Use another workspace of the same device; `begin_forward` again before `forward`."""
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._problem = None

    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: str | torch.dtype = "float16",
    ) -> None:
        """Set the rows' own pages, and the parameters of later `forward`s; see the other wrapper's `plan`.

        Raises:
            ValueError: an argument does not fit; nothing has changed then.
        """
        dtypes = planned_dtypes(data_type, data_type, None)
        sizes = (num_qo_heads, num_kv_heads, head_dim)
        problem = DecodeProblem(*sizes, *dtypes, "NONE", -1, None, None, None, None, page_size)
        self._unique.plan(
            unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, *sizes, page_size, q_data_type=dtypes[0],
            kv_data_type=dtypes[1], o_data_type=torch.float32,
        )  # fmt: skip
        self._problem = problem

    def forward(self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: PagedCache) -> Tensor:
        """Attend from each row's newest token to the prefix and to its own pages.

        Args:
            q: [b, num_qo_heads, head_dim], any strides.
            k_shared: [prefix tokens, num_kv_heads, head_dim] (NHD) or [num_kv_heads, prefix tokens, head_dim] (HND).
            v_shared: the same, with head_dim_v.
            unique_kv_cache: (k, v), or one tensor of 5 dimensions with keys and values at dimension 1.

        Returns:
            The output, [b, num_qo_heads, head_dim_v] of q's dtype.

        Raises:
            RuntimeError: there was no `begin_forward`.
            ValueError: a tensor does not fit what was planned.
        """
        problem = self._problem
        if problem is None:
            raise RuntimeError("call begin_forward() before forward()")
        sizes: tuple[int | str, ...] = ("tokens", problem.num_kv_heads, problem.head_dim)
        if self._layout == "HND":
            sizes = (sizes[1], sizes[0], sizes[2])
        require_tensors(self._device, q=q, k_shared=k_shared, v_shared=v_shared)
        require_fit("k_shared", k_shared, sizes, problem.kv_dtype)
        require_fit("v_shared", v_shared, (*k_shared.shape[:2], "head_dim_v"), problem.kv_dtype)
        out, lse = self._unique.run_return_lse(q, unique_kv_cache)
        if out.shape[-1] != v_shared.shape[-1]:
            raise ValueError(f"v_shared must have head_dim_v={out.shape[-1]} as the pages, got {v_shared.shape[-1]}")
        if self._layout == "HND":
            k_shared, v_shared = k_shared.transpose(0, 1), v_shared.transpose(0, 1)
        merge_state_in_place(out, lse, *self._of_prefix(problem, q, k_shared, v_shared))
        return out.to(q.dtype)

    def _of_prefix(self, problem: DecodeProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        queries, heads, _ = q.shape
        table = torch.zeros(1, 1, dtype=torch.int32, device=self._device)  # all keys are one page
        before = torch.full((1,), k.shape[0] - 1, dtype=torch.int32, device=self._device)
        wave_items = shared_wave_items(problem, self._device, queries)
        work, items = plan_rows(before, wave_items, queries * heads, v.shape[-1])
        kwargs = problem.attention_kwargs(None, None, None)
        tensors = (exact_queries(q, torch.float32), k.unsqueeze(0), v.unsqueeze(0))
        return attend_together(*tensors, table, None, work, items, kwargs)
