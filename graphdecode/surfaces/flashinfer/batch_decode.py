"""Decode attention with FlashInfer's names: planned on the device, run once a layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from graphdecode.attention.append import KV_LAYOUTS, PagedCache, paged_caches
from graphdecode.attention.paged_decode import FIXED_SPLIT
from graphdecode.cache.errors import require_choice, require_fit, require_tensors
from graphdecode.kernels.attention.attention_plan import (
    WAVES_WHEN_FULL,
    PlanSizes,
    check_page_lists,
    paged_attention_plan,
    plan_size,
    work_items,
)
from graphdecode.kernels.attention.decode_attention import decode_attention
from graphdecode.kernels.attention.work_item import SplitPlan

from .decode_problem import (
    BACKENDS,
    FP8_DTYPES,
    OUT_DTYPES,
    Q_DTYPE_LEFT_OUT,
    DecodeProblem,
    check_metadata,
    check_result,
    exact_queries,
    planned_dtypes,
)


class BatchDecodeWithPagedKVCacheWrapper:
    """Decode attention over a paged cache for a batch of requests: `plan` once a step, `run` once a layer.

    With tensors on a GPU, `plan` launches kernels there and reads nothing on the host, so that it can be captured: a
    captured plan and run are right at any later lengths. On a CPU it means the same.

    Args:
        float_workspace_buffer: workspace on the cache's device, of any dtype, for partial results of split rows;
            128 MB fit any batch; `plan` raises an error if it is too small. Unused on a CPU.
        kv_layout: `NHD` (pages [pages, page_size, heads, dim]) or `HND` (pages [pages, heads, page_size, dim]).
        use_cuda_graph: keep the metadata in the three buffers, at fixed addresses, so that a captured `run` goes on
            working after any later `plan`, of any batch up to the buffers' capacity.
        use_tensor_cores: a hint; all kernels use them. Required for several queries per request, as in FlashInfer.
        paged_kv_indptr_buffer: int32 [max_batch + 1].
        paged_kv_indices_buffer: int32 [max_pages].
        paged_kv_last_page_len_buffer: int32 [max_batch].
        backend: part of the surface; all of FlashInfer's mean the same here.
        jit_args: part of the surface; must be None.
        batch_invariant: split rows at fixed places, so that a row's bits do not depend on the rest of the batch.

    Raises:
        ValueError: the layout or the backend is unknown, or a buffer is missing or does not fit.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        require_choice("kv_layout", kv_layout, KV_LAYOUTS)
        require_choice("backend", backend, BACKENDS)
        if jit_args is not None:
            raise ValueError(f"jit_args must be None: custom kernels are not supported, got {jit_args!r}")
        self._layout, self._invariant, self.use_tensor_cores = kv_layout, batch_invariant, use_tensor_cores
        self.is_cuda_graph_enabled = use_cuda_graph
        self._workspace, self._device = float_workspace_buffer, float_workspace_buffer.device
        self._problem: DecodeProblem | None = None
        self._rows = self._max_items = 0
        self._pages: tuple[Tensor, ...] = ()  # indptr, indices, last_page_len
        self._max_rows: int | None = None  # capacity of the caller's buffers, if there are any
        if use_cuda_graph:
            self._pages = self._checked_buffers(
                paged_kv_indptr_buffer=paged_kv_indptr_buffer,
                paged_kv_indices_buffer=paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            )
            self._max_rows = self._pages[2].shape[0]
        self._kv_lens = torch.zeros(self._max_rows or 0, dtype=torch.int32, device=self._device)
        self._plan = torch.zeros(0, dtype=torch.int32, device=self._device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=self._device)

    def _checked_buffers(self, **buffers: Tensor | None) -> tuple[Tensor, ...]:
        held = []
        for name, buffer in buffers.items():
            if buffer is None:
                raise ValueError(f"use_cuda_graph needs {name}")
            require_tensors(self._device, **{name: buffer})
            require_fit(name, buffer, ("entries",), torch.int32)
            held.append(buffer)
        entries, _, rows = map(len, held)
        if entries != rows + 1 or not rows:
            raise ValueError(
                "paged_kv_indptr_buffer must have one entry more than paged_kv_last_page_len_buffer, which has one for "
                f"each row of the largest batch, got {entries} and {rows}"
            )
        return tuple(held)

    @property
    def workspace(self) -> list[Tensor]:
        """The tensors that `plan` and `run` write besides the output, to be declared with a captured step's buffers.

        They stay where they are while later plans need no more than those before; plan once before capture.
        """
        return [self._workspace, self._kv_lens, self._plan, self._counters]

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor | None = None
    ) -> None:
        """Use another workspace of the same device; `plan` again before `run`.

        `int_workspace_buffer` is ignored: the plan has its own integers.
        """
        require_tensors(self._device, float_workspace_buffer=float_workspace_buffer)
        self._workspace, self._problem = float_workspace_buffer, None

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = Q_DTYPE_LEFT_OUT,
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        """Set the rows and the parameters of later `run`s.

        Without use_cuda_graph the tensors on a GPU are kept, not copied: they may be changed in place between two
        replays of a captured plan and run. Those in host memory are copied, whatever the cache's device.

        Args:
            indptr: int32 [b + 1], where each row's pages begin in `indices`.
            indices: int32, pages of all rows, one row after another.
            last_page_len: int32 [b], tokens in each row's last page, 1..page_size; anything for rows without pages.
            num_qo_heads: query heads, a multiple of num_kv_heads.
            num_kv_heads: key and value heads.
            head_dim: 16..512.
            page_size: tokens a page, >= 1.
            pos_encoding_mode: `NONE`, `ROPE_LLAMA` (keys and queries are rotated in the kernel) or `ALIBI`.
            window_left: keys before a query's own that it sees; -1: all.
            logits_soft_cap: caps the logits; None or 0: no cap.
            q_data_type: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2, as a name or a dtype; left out:
                data_type where that has more than one byte, else float16; None: data_type, else float16.
            kv_data_type: likewise; None: data_type, else as the queries.
            data_type: default of the two before.
            sm_scale: multiplies the logits; None: 1 / sqrt(head_dim).
            rope_scale: divides the rotation angles; None: 1.
            rope_theta: base of the rotation frequencies; None: 10000.
            non_blocking: copy metadata that is on the host without waiting.
            q_len_per_req: queries a row, its newest tokens, causal among themselves.

        Raises:
            ValueError: an argument does not fit; nothing has changed then.
        """
        problem = DecodeProblem(
            num_qo_heads, num_kv_heads, head_dim, *planned_dtypes(q_data_type, kv_data_type, data_type),
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta, page_size, q_len_per_req,
        )  # fmt: skip
        if q_len_per_req > 1 and not self.use_tensor_cores:
            raise ValueError(f"q_len_per_req={q_len_per_req} needs use_tensor_cores=True, as in FlashInfer")
        rows = self._checked_rows(indptr, indices, last_page_len)
        sizes, max_items = self._divide(problem, rows, indices.shape[0] * page_size)
        if self._device.type == "cuda" and indptr.is_cpu and last_page_len.is_cpu:
            check_page_lists(indptr.numpy(), last_page_len.numpy(), indices.shape[0], page_size)
        given = (indptr, indices, last_page_len)
        metadata = tuple(t.to(self._device, non_blocking=non_blocking, copy=t.is_cpu) for t in given)
        kv_lens, plan, counters = self._plan_tensors(rows, max_items, q_len_per_req * num_qo_heads)
        paged_attention_plan(kv_lens, plan, metadata[0], metadata[2], sizes, indices.shape[0])
        self._kv_lens, self._plan, self._counters = kv_lens, plan, counters
        if self._max_rows is None:
            self._pages = metadata
        else:
            for buffer, tensor in zip(self._pages, metadata, strict=True):
                buffer[: tensor.shape[0]].copy_(tensor)
        self._problem, self._rows, self._max_items = problem, rows, max_items

    def _checked_rows(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> int:
        """Return the number of rows; raise ValueError if they do not fit the caller's buffers."""
        rows = check_metadata(indptr, indices, last_page_len)
        if self._max_rows is not None:
            if rows > self._max_rows:
                raise ValueError(f"the buffers hold {self._max_rows} rows, got {rows}")
            if len(indices) > len(self._pages[1]):
                raise ValueError(f"paged_kv_indices_buffer holds {len(self._pages[1])} pages, got {len(indices)}")
        return rows

    def _divide(self, problem: DecodeProblem, rows: int, tokens: int) -> tuple[PlanSizes, int]:
        """Return what rows are split by, and the most work items; partial results fit the workspace."""
        if self._max_rows is not None:
            rows, tokens = self._max_rows, len(self._pages[1]) * problem.page_size
        wave_items = problem.wave_items(self._device, problem.head_dim)
        fixed_split = FIXED_SPLIT if self._invariant else 0
        sizes = PlanSizes(wave_items, fixed_split, problem.window_left, problem.page_size, problem.q_len)
        items = rows + -(-tokens // FIXED_SPLIT) if self._invariant else work_items(rows, wave_items)
        if self._device.type != "cuda":
            return sizes, items
        floats_of_item = problem.q_len * problem.num_qo_heads * (problem.head_dim + 1)
        held = self._workspace.nbytes // (4 * floats_of_item)
        if held < items and not self._invariant:  # fewer splits fit too
            wave_items = min(wave_items, held) if rows <= min(wave_items, held) else (held - rows) // WAVES_WHEN_FULL
            items = work_items(rows, wave_items) if wave_items > 0 else items
        if held < items:
            raise ValueError(
                f"float_workspace_buffer has {self._workspace.nbytes} bytes, but {rows} rows need "
                f"{4 * floats_of_item * items}"
            )
        return sizes._replace(wave_items=wave_items), items

    def _plan_tensors(self, rows: int, max_items: int, queries_of_row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors for the plan: the existing ones if they are large enough."""
        rows = rows if self._max_rows is None else self._max_rows
        size = plan_size(max_items)
        kv_lens, plan, counters = self._kv_lens, self._plan, self._counters
        if kv_lens.shape[0] != rows:
            kv_lens = torch.zeros(rows, dtype=torch.int32, device=self._device)
        if plan.shape[0] < size:
            plan = torch.zeros(size, dtype=torch.int32, device=self._device)
        if counters.shape[0] < rows * queries_of_row:
            counters = torch.zeros(rows * queries_of_row, dtype=torch.int32, device=self._device)
        return kv_lens, plan, counters

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        window_left: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each row's newest tokens to all of its pages.

        Args:
            q: [b * q_len_per_req, num_qo_heads, head_dim], any strides.
            paged_kv_cache: (k, v), each [pages, page_size, num_kv_heads, head_dim] (NHD) or [pages, num_kv_heads,
                page_size, head_dim] (HND), or one tensor of 5 dimensions with keys and values at dimension 1.
            q_scale, k_scale: multiply the logits; None: 1.
            v_scale: multiplies the output; None: 1.
            return_lse: whether to return the log-sum-exps.
            out: where to write, [b * q_len_per_req, num_qo_heads, head_dim_v], contiguous, of q's dtype; for fp8
                queries fp16, bf16 or fp32 too.
            lse: where to write the log-sum-exps, fp32 [b * q_len_per_req, num_qo_heads], contiguous.
            window_left: this layer's window; None: the planned one.

        Returns:
            The output in q's dtype, 0 for empty rows; with return_lse also the base-2 log-sum-exp of the logits,
            -inf for empty rows.

        Raises:
            RuntimeError: there was no `plan`.
            ValueError: a tensor does not fit what was planned.
        """
        problem = self._problem
        if problem is None:
            raise RuntimeError("call plan() before run()")
        k_cache, v_cache = paged_caches(paged_kv_cache, self._layout)
        problem.check_tensors(q, k_cache, self._device)
        rows, rest = divmod(q.shape[0], problem.q_len)
        most = self._rows if self._max_rows is None else self._max_rows
        if rest or not self._rows <= rows <= most:
            wanted = f"{self._rows}" if most == self._rows else f"{self._rows}..{most}"
            raise ValueError(
                f"q must have q_len_per_req={problem.q_len} queries for each of {wanted} rows, got {len(q)}"
            )
        out_shape, lse_shape = (*q.shape[:2], v_cache.shape[-1]), tuple(q.shape[:2])
        if out is None:
            out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
        if lse is None and return_lse:
            lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
        out_dtypes = (q.dtype, *OUT_DTYPES) if q.dtype in FP8_DTYPES else (q.dtype,)
        check_result("out", out, out_shape, out_dtypes)
        check_result("lse", lse, lse_shape, (torch.float32,))
        queries = exact_queries(q)
        result = out if out.dtype == queries.dtype else torch.empty(out_shape, dtype=queries.dtype, device=q.device)
        indptr, indices, _ = self._pages
        decode_attention(
            result,
            lse,
            queries,
            k_cache,
            v_cache,
            indices,
            indptr,
            SplitPlan(self._kv_lens, self._plan, *self._partials(problem, v_cache.shape[-1]), self._counters),
            q_len=problem.q_len,
            max_items=self._max_items,
            **problem.how_to_attend(q_scale, k_scale, v_scale, window_left),
        )
        if result is not out:
            out.copy_(result)
        return (out, lse) if return_lse and lse is not None else out

    def run_return_lse(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        window_left: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend as `run` does, and return the log-sum-exps too."""
        scales = (q_scale, k_scale, v_scale)
        result = self.run(q, paged_kv_cache, *scales, True, out=out, lse=lse, window_left=window_left)
        return result[0], result[1]

    def _partials(self, problem: DecodeProblem, value_dim: int) -> tuple[Tensor, Tensor]:
        shape = (self._max_items, problem.q_len, problem.num_qo_heads)
        if self._device.type != "cuda":
            nothing = torch.empty(0)
            return nothing, nothing
        floats = self._workspace.view(-1).view(torch.uint8)
        floats = floats[: floats.shape[0] // 4 * 4].view(torch.float32)
        sums = math.prod(shape)
        if sums * (value_dim + 1) > floats.shape[0]:
            raise ValueError(
                f"float_workspace_buffer has {self._workspace.nbytes} bytes, needed are {4 * sums * (value_dim + 1)}"
            )
        return floats[: sums * value_dim].view(*shape, value_dim), floats[sums * value_dim :][:sums].view(shape)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The wrapper with its metadata in buffers of fixed addresses, for captured runs.

    A captured `run` is right after any later `plan` of at most as many rows and pages as the buffers hold, in whichever
    order; rows of q past the planned batch get 0. `plan` can be captured as well.

    Arguments are those of the base class by shorter names; both have the same errors.
    """

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = (indptr_buffer, indices_buffer, last_page_len_buffer)
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)
