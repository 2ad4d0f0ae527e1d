"""Decode attention with FlashInfer's names: planned on the device, run once a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphdecode.attention.append import KV_LAYOUTS, PagedCache, paged_caches
from graphdecode.attention.paged_decode import FIXED_SPLIT, splits_rows
from graphdecode.cache.errors import require_choice, require_fit, require_integers, require_range, require_tensors
from graphdecode.errors import shown
from graphdecode.kernels.attention.attention_plan import PlanSizes, plan_size, work_items
from graphdecode.kernels.attention.decode_attention import decode_attention
from graphdecode.kernels.attention.work_item import SplitPlan

from .decode_problem import (
    BACKENDS,
    MAX_TOKENS,
    OUT_DTYPES,
    Q_DTYPE_LEFT_OUT,
    DecodeProblem,
    exact_queries,
    floats_of,
    lse_for,
    partials_of,
    require_neutral,
    result_for,
    sinks_of,
    wave_items_that_fit,
)
from .page_lists import PageLists


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
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None, paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto", jit_args: list[Any] | None = None, *, batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        require_choice("kv_layout", kv_layout, KV_LAYOUTS)
        require_choice("backend", backend, BACKENDS)
        if jit_args is not None:
            raise ValueError(f"jit_args must be None: custom kernels are not supported, got {jit_args!r}")
        self._layout, self._invariant, self.use_tensor_cores = kv_layout, batch_invariant, use_tensor_cores
        self.is_cuda_graph_enabled = use_cuda_graph
        self._workspace, self._device = float_workspace_buffer, float_workspace_buffer.device
        self._problem: DecodeProblem | None = None
        self._rows = self._max_items = 0
        self._pages: PageLists | None = None  # of the plan
        self._buffers: PageLists | None = None  # the caller's
        self._on_host: PageLists | None = None  # the plan's, if page numbers are known
        self._checked: set[tuple[int, int]] = set()  # (pages of a cache, tokens of a window) that these fit
        if use_cuda_graph:
            indptr, indices, last_page_len = self._checked_buffers(
                paged_kv_indptr_buffer=paged_kv_indptr_buffer,
                paged_kv_indices_buffer=paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            )
            self._pages = self._buffers = PageLists(indices, indptr, last_page_len)
        self._kv_lens = torch.zeros(self._rows_of(0), dtype=torch.int32, device=self._device)
        self._plan = torch.zeros(0, dtype=torch.int32, device=self._device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=self._device)

    def _checked_buffers(self, **buffers: Tensor | None) -> tuple[Tensor, ...]:
        checked = []
        for name, buffer in buffers.items():
            if buffer is None:
                raise ValueError(f"use_cuda_graph needs {name}")
            require_tensors(self._device, **{name: buffer})
            require_fit(name, buffer, ("entries",), torch.int32)
            checked.append(buffer)
        entries, _, rows = map(len, checked)
        if entries != rows + 1 or not rows:
            raise ValueError(
                "paged_kv_indptr_buffer must have one entry more than paged_kv_last_page_len_buffer, which has one for "
                f"each row of the largest batch, got {entries} and {rows}"
            )
        return tuple(checked)

    @property
    def workspace(self) -> list[Tensor]:
        """The tensors that `plan` and `run` write besides the output, to be declared with a captured step's buffers.

        They stay where they are while later plans need no more than those before; plan once before capture.
        """
        return [self._workspace, self._kv_lens, self._plan, self._counters]

    @property
    def _window_left(self) -> int | None:  # vLLM compares these three with its layer's before each run
        return None if self._problem is None else self._problem.window_left

    @property
    def _logits_soft_cap(self) -> float | None:
        return None if self._problem is None else self._problem.logits_soft_cap

    @property
    def _sm_scale(self) -> float | None:
        return None if self._problem is None else self._problem.sm_scale

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor | None = None
    ) -> None:
        """Use another workspace of the same device; `plan` again before `run`.

        `int_workspace_buffer` is ignored: the plan has its own integers.
        """
        require_tensors(self._device, float_workspace_buffer=float_workspace_buffer)
        self._workspace, self._problem = float_workspace_buffer, None

    def plan(
        self, indptr: Tensor, indices: Tensor | None, last_page_len: Tensor | None, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = Q_DTYPE_LEFT_OUT,
        kv_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
        non_blocking: bool = True, q_len_per_req: int = 1, *, window_right: int = 0,
        o_data_type: str | torch.dtype | None = None, block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None, fixed_split_size: int | None = None, disable_split_kv: bool = False,
        is_causal: bool | None = None,
    ) -> None:  # fmt: skip
        """Set the rows and the parameters of later `run`s.

        Without use_cuda_graph the tensors on a GPU are kept, not copied: they may be changed in place between two
        replays of a captured plan and run. Those in host memory are copied, whatever the cache's device.

        Args:
            indptr: int32 [b + 1], where each row's pages begin in `indices`.
            indices: int32, pages of all rows, one row after another; None: `block_tables` names them. Numbers in host
                memory are compared with the cache by the next `run`; those on a GPU are not read on the host.
            last_page_len: int32 [b], tokens in each row's last page, 1..page_size; anything for rows without pages;
                None: `seq_lens` says how long rows are.
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
            window_right: part of the surface; must be 0: no query sees keys behind its own.
            o_data_type: float16, bfloat16, float32, or the queries'; None: the queries'.
            block_tables: int32 [b, pages], each row's pages; used without `indices` and buffers of fixed addresses,
                else part of the surface.
            seq_lens: int32 [b], tokens of each row; used without `last_page_len`, else they must agree.
            fixed_split_size: split rows into so many pages each, whatever the batch, as with `batch_invariant`.
            disable_split_kv: do not split rows, which makes bits independent of the batch, too.
            is_causal: part of the surface; must not be False with several queries a row.

        Raises:
            ValueError: an argument does not fit; nothing has changed then.
        """
        problem, pages, fixed_split = self._parsed(locals())
        if window_right != 0:
            raise ValueError(f"window_right must be 0: no query sees keys behind its own, got {shown(window_right)}")
        if is_causal is not None and not is_causal and q_len_per_req > 1:
            raise ValueError(f"is_causal must be True with q_len_per_req={q_len_per_req}, got {shown(is_causal)}")
        self._plan_rows(problem, pages, fixed_split, non_blocking=non_blocking)

    begin_forward = plan

    def end_forward(self) -> None:
        """Do nothing: part of the surface."""

    def workspace_size(
        self, indptr: Tensor, indices: Tensor | None, last_page_len: Tensor | None, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = Q_DTYPE_LEFT_OUT,
        kv_data_type: str | torch.dtype | None = None, o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, block_tables: Tensor | None = None, seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False, q_len_per_req: int = 1,
    ) -> tuple[int, int]:  # fmt: skip
        """Return how many bytes of `float_workspace_buffer` fit such a plan, and of integers, which are allocated.

        Arguments and errors are those of `plan`; nothing is planned.
        """
        problem, pages, fixed_split = self._parsed(locals())
        rows, items, _ = self._most_items(problem, pages, fixed_split)
        floats = items * problem.floats_of_item if splits_rows(self._device) else 0
        return 4 * floats, 4 * (rows + plan_size(items) + rows * q_len_per_req * num_qo_heads)

    def _parsed(self, arguments: Mapping[str, Any]) -> tuple[DecodeProblem, PageLists, int]:
        """Return the problem of a plan's arguments, its rows, and the tokens of a fixed split; 0: none."""
        problem = DecodeProblem.of(arguments)
        self._check_queries(problem.q_len)
        fixed_split = self._fixed_split(arguments["fixed_split_size"], arguments["disable_split_kv"], problem.page_size)
        return problem, PageLists.of(arguments), fixed_split

    def _check_queries(self, q_len: int) -> None:
        if q_len > 1 and not self.use_tensor_cores:
            raise ValueError(f"q_len_per_req={q_len} needs use_tensor_cores=True, as in FlashInfer")

    def _fixed_split(self, pages: int | None, disabled: bool, page_size: int) -> int:
        """Return the tokens of a split of plans that do not depend on the batch; 0: balanced."""
        if disabled:
            return MAX_TOKENS
        require_integers(fixed_split_size=0 if pages is None else pages)
        if pages is not None and pages > 0:  # FlashInfer's -1 means none, too
            require_range(1, MAX_TOKENS // page_size, fixed_split_size=pages)
            return pages * page_size
        return FIXED_SPLIT if self._invariant else 0

    def _plan_rows(self, problem: DecodeProblem, lists: PageLists, fixed_split: int, *, non_blocking: bool) -> None:
        rows, buffers = lists.rows, self._buffers
        if buffers is not None:
            lists.check_fit(buffers)
        sizes, max_items = self._divide(problem, lists, fixed_split)
        if self._device.type == "cuda":
            lists.check_host_values(problem.page_size)
        pages = lists.on(self._device, non_blocking=non_blocking)
        kv_lens, plan, counters = self._plan_tensors(rows, max_items, problem.q_len * problem.num_qo_heads)
        pages.plan(kv_lens, plan, sizes)
        self._kv_lens, self._plan, self._counters = kv_lens, plan, counters
        self._on_host, self._checked = pages if pages.table.is_cpu else lists.numbers_on_host, set()
        if buffers is None:
            self._pages = pages
        else:
            pages.copy_to(buffers)
        self._problem, self._rows, self._max_items = problem, rows, max_items

    def _most_items(self, problem: DecodeProblem, pages: PageLists, fixed_split: int) -> tuple[int, int, int]:
        """Return the rows to plan for, the most work items, and how many run at a time."""
        most = pages if self._buffers is None else self._buffers
        rows, tokens = most.rows, most.table.numel() * problem.page_size
        wave_items = problem.wave_items(self._device, problem.head_dim)
        if fixed_split:
            return rows, rows + -(-tokens // fixed_split), wave_items
        return rows, work_items(rows, wave_items), wave_items

    def _divide(self, problem: DecodeProblem, pages: PageLists, fixed_split: int) -> tuple[PlanSizes, int]:
        """Return the sizes that rows are split by, and the most work items; partial results fit the workspace."""
        rows, items, wave_items = self._most_items(problem, pages, fixed_split)
        sizes = PlanSizes(wave_items, fixed_split, problem.window_left, problem.page_size, problem.q_len)
        if not splits_rows(self._device):
            return sizes, items
        most_items = self._workspace.nbytes // (4 * problem.floats_of_item)
        if most_items < items and not fixed_split:  # fewer splits fit too
            wave_items = wave_items_that_fit(rows, wave_items, most_items)
            items = work_items(rows, wave_items) if wave_items > 0 else items
        if most_items < items:
            raise ValueError(
                f"float_workspace_buffer has {self._workspace.nbytes} bytes, but {rows} rows need "
                f"{4 * problem.floats_of_item * items}"
            )
        return sizes._replace(wave_items=wave_items), items

    def _plan_tensors(self, rows: int, max_items: int, queries_of_row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors for the plan: the existing ones if they are large enough."""
        rows, size = self._rows_of(rows), plan_size(max_items)
        kv_lens, plan = self._kv_lens, self._plan
        if kv_lens.shape[0] != rows:
            kv_lens = torch.zeros(rows, dtype=torch.int32, device=self._device)
        if plan.shape[0] < size:
            plan = torch.zeros(size, dtype=torch.int32, device=self._device)
        return kv_lens, plan, self._counters_for(rows * queries_of_row)

    def _counters_for(self, queries: int) -> Tensor:
        """Return counters of so many queries: the existing ones if they are enough."""
        if self._counters.shape[0] >= queries:
            return self._counters
        return torch.zeros(queries, dtype=torch.int32, device=self._device)

    def _rows_of(self, planned: int) -> int:
        """Return how many rows the tensors of a plan have: those that the caller's buffers hold, if there are any."""
        return planned if self._buffers is None else self._buffers.rows

    def run(
        self, q: Tensor, paged_kv_cache: PagedCache, q_scale: float | None = None, k_scale: float | None = None,
        v_scale: float | None = None, return_lse: bool = False, *, out: Tensor | None = None, lse: Tensor | None = None,
        enable_pdl: bool | None = None, window_left: int | None = None, sinks: Tensor | None = None,
        q_len_per_req: int | None = None, skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attend from each row's newest tokens to all of its pages.

        Args:
            q: [b * q_len_per_req, num_qo_heads, head_dim], any strides.
            paged_kv_cache: (k, v), each [pages, page_size, num_kv_heads, head_dim] (NHD) or [pages, num_kv_heads,
                page_size, head_dim] (HND), or one tensor of 5 dimensions with keys and values at dimension 1.
            q_scale, k_scale: multiply the logits; None: 1.
            v_scale: multiplies the output; None: 1.
            return_lse: whether to return the log-sum-exps.
            out: where to write, [b * q_len_per_req, num_qo_heads, head_dim_v], contiguous, of the planned
                o_data_type; where none was planned of q's dtype, and for fp8 queries fp16, bf16 or fp32 too.
            lse: where to write the log-sum-exps, fp32 [b * q_len_per_req, num_qo_heads], contiguous.
            enable_pdl: a hint, without effect.
            window_left: this layer's window; None: the planned one.
            sinks: float32 [num_qo_heads], a logit of each head that takes weight and has no value.
            q_len_per_req: queries a row; None: as planned.
            skip_softmax_threshold_scale_factor, kv_cache_sf: part of the surface; must be None: softmax skips nothing,
                and there are no fp4 caches.

        Returns:
            The output, 0 for empty rows; with return_lse also the base-2 log-sum-exp of the logits, -inf for empty
            rows.

        Raises:
            RuntimeError: there was no `plan`.
            ValueError: a tensor does not fit what was planned, or an argument is not supported at this value.
        """
        problem, pages = self._problem, self._pages
        if problem is None or pages is None:
            raise RuntimeError("call plan() before run()")
        require_neutral(
            skip_softmax_threshold_scale_factor=(skip_softmax_threshold_scale_factor or None, None),
            kv_cache_sf=(kv_cache_sf, None),
        )
        if q_len_per_req is not None:
            self._check_queries(q_len_per_req)
            problem = replace(problem, q_len=q_len_per_req)
        k_cache, v_cache = paged_caches(paged_kv_cache, self._layout)
        problem.check_tensors(q, k_cache, self._device)
        rows, remainder = divmod(q.shape[0], problem.q_len)
        most = self._rows_of(self._rows)
        if remainder or not self._rows <= rows <= most:
            allowed = f"{self._rows}" if most == self._rows else f"{self._rows}..{most}"
            raise ValueError(
                f"q must have q_len_per_req={problem.q_len} queries for each of {allowed} rows, got {len(q)}"
            )
        out = result_for("out", out, (*q.shape[:2], v_cache.shape[-1]), problem.out_dtypes, q.device)
        lse = lse_for(lse, q.shape[:2], q.device, return_lse=return_lse)
        queries = exact_queries(q, out.dtype)
        result = out if out.dtype in OUT_DTYPES else torch.empty(out.shape, dtype=queries.dtype, device=q.device)
        kwargs = problem.attention_kwargs(q_scale, k_scale, v_scale, window_left)
        self._check_pages(k_cache.shape[0], problem.window_of(kwargs["options"]), problem.page_size)
        kwargs["options"] = kwargs["options"]._replace(sinks=sinks_of(sinks, problem.num_qo_heads, self._device))
        self._counters = self._counters_for(most * problem.q_len * problem.num_qo_heads)
        work = SplitPlan(self._kv_lens, self._plan, *self._partials(problem, v_cache.shape[-1]), self._counters)
        decode_attention(
            result, lse, queries, k_cache, v_cache, pages.table, pages.indptr, work, q_len=problem.q_len,
            max_items=self._max_items, **kwargs,
        )  # fmt: skip
        if result is not out:
            out.copy_(result)
        return (out, lse) if return_lse and lse is not None else out

    def _check_pages(self, num_pages: int, window: int, page_size: int) -> None:
        """Compare page numbers that are known with a cache, once a plan."""
        if self._on_host is not None and (num_pages, window) not in self._checked:
            self._on_host.check_numbers(page_size, num_pages, window)
            self._checked.add((num_pages, window))

    def forward(
        self, q: Tensor, paged_kv_cache: PagedCache, pos_encoding_mode: str = "NONE", q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, *, return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attend as `run` does, with these in place of what was planned; part of the surface, `run` is its new name."""
        if self._problem is None:
            raise RuntimeError("call plan() before forward()")
        self._problem = replace(
            self._problem, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        return self.run(q, paged_kv_cache, q_scale, k_scale, v_scale, return_lse)

    def forward_return_lse(
        self, q: Tensor, paged_kv_cache: PagedCache, pos_encoding_mode: str = "NONE", q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend as `forward` does, and return the log-sum-exps too."""
        result = self.forward(
            q, paged_kv_cache, pos_encoding_mode, q_scale, k_scale, v_scale, window_left, logits_soft_cap, sm_scale,
            rope_scale, rope_theta, return_lse=True,
        )  # fmt: skip
        return result[0], result[1]

    def run_return_lse(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend as `run` does, and return the log-sum-exps too; `others` are `run`'s."""
        result = self.run(q, paged_kv_cache, q_scale, k_scale, v_scale, **others, return_lse=True)
        return result[0], result[1]

    def _partials(self, problem: DecodeProblem, value_dim: int) -> tuple[Tensor, Tensor]:
        if not splits_rows(self._device):
            return torch.empty(0), torch.empty(0)
        shape = (self._max_items, problem.q_len, problem.num_qo_heads)
        return partials_of(floats_of(self._workspace), shape, value_dim)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int,
    num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
    logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    non_blocking: bool = True, fixed_split_size: int | None = None, disable_split_kv: bool = False,
    q_len_per_req: int = 1, global_override_indptr_cpu: Tensor | None = None,
) -> None:  # fmt: skip
    """Plan as the wrapper's own `plan` does, which is as fast: nothing is read on the host.

    A function whose first argument is the wrapper, so that it can be bound as a method; `global_override_indptr_cpu` is
    a hint, without effect.
    """
    arguments = {name: value for name, value in locals().items() if name != "global_override_indptr_cpu"}
    BatchDecodeWithPagedKVCacheWrapper.plan(**arguments)


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
