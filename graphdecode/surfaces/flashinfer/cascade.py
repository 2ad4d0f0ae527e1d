"""FlashInfer's cascade: attention over keys in levels, the upper ones shared by many queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphdecode.attention.append import KV_LAYOUTS, PagedCache, paged_caches
from graphdecode.attention.merge import merge_state_in_place
from graphdecode.cache.errors import require_choice, require_fit, require_range, require_tensors
from graphdecode.errors import shown
from graphdecode.kernels.attention.attention_plan import check_page_lists
from graphdecode.kernels.surfaces.cascade_rows import check_query_lists, require_queries

from .cascade_level import CascadeLevel, LevelLists, LevelRows
from .decode_problem import DecodeProblem, exact_queries, floats_of, planned_dtypes

_MAX_LEVELS = 64


class MultiLevelCascadeAttentionWrapper:
    """Decode attention over keys in levels, all in one paged cache: `plan` once a step, `run` once a layer.

    A query's keys are those of its row in the first level, then of its row in the next, and so on: results, windows and
    positions are those of attention over all of them, one level after another. A level of one row is read once for all
    queries.

    With tensors on a GPU, `plan` launches kernels there and reads nothing on the host, so that it can be captured: a
    captured plan and run are right at any later lengths. On a CPU it means the same.

    Args:
        num_levels: levels of keys.
        float_workspace_buffer: workspace on the cache's device, of any dtype, for partial results of split rows;
            128 MB fit any batch; an error is raised if it is too small. Unused on a CPU.
        kv_layout: `NHD` (pages [pages, page_size, heads, dim]) or `HND` (pages [pages, heads, page_size, dim]).
        use_cuda_graph: keep the metadata in the buffers, at fixed addresses, so that a captured `run` goes on working
            after any later `plan`, of any rows and pages up to the buffers' capacity.
        qo_indptr_buf_arr: of each level int32 [max_rows + 1].
        paged_kv_indptr_buf_arr: of each level int32 [max_rows + 1].
        paged_kv_indices_buf_arr: of each level int32 [max_pages].
        paged_kv_last_page_len_buf_arr: of each level int32 [max_rows].

    Raises:
        ValueError: an argument is out of its range, or a buffer is missing or does not fit.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        require_range(1, _MAX_LEVELS, num_levels=num_levels)
        require_tensors(float_workspace_buffer=float_workspace_buffer)
        require_choice("kv_layout", kv_layout, KV_LAYOUTS)
        self._layout, self._workspace, self._device = kv_layout, float_workspace_buffer, float_workspace_buffer.device
        self._buffers: list[LevelLists] | None = None
        if use_cuda_graph:
            self._buffers = _lists_of(
                num_levels,
                qo_indptr_buf_arr=qo_indptr_buf_arr,
                paged_kv_indptr_buf_arr=paged_kv_indptr_buf_arr,
                paged_kv_indices_buf_arr=paged_kv_indices_buf_arr,
                paged_kv_last_page_len_buf_arr=paged_kv_last_page_len_buf_arr,
            )
            for name, buffers in zip(LevelLists._fields, zip(*self._buffers, strict=True), strict=True):
                for buffer in buffers:
                    require_tensors(self._device, **{f"the buffer of {name}": buffer})
        self._levels = [CascadeLevel(self._device) for _ in range(num_levels)]
        self._lists: list[LevelLists] = []
        self._problem: DecodeProblem | None = None
        self._causal = False
        self._least_queries = self._queries = 0  # planned, as far as the host knows, and the capacity
        self._counters = torch.zeros(0, dtype=torch.int32, device=self._device)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the metadata is kept in buffers of fixed addresses."""
        return self._buffers is not None

    @property
    def workspace(self) -> list[Tensor]:
        """The tensors that `plan` and `run` write besides the output, to be declared with a captured step's buffers.

        They stay where they are while later plans need no more than those before; plan once before capture.
        """
        return [self._workspace, self._counters, *(each for level in self._levels for each in level.workspace)]

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: list[Tensor]) -> None:
        """Use another workspace of the same device; `plan` again before `run`.

        `int_workspace_buffers`, one a level, are ignored: plans have their own integers.
        """
        require_tensors(self._device, float_workspace_buffer=float_workspace_buffer)
        _check_count("int_workspace_buffers", int_workspace_buffers, len(self._levels))
        self._workspace, self._problem = float_workspace_buffer, None

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Set the rows and the parameters of later `run`s.

        Without use_cuda_graph the tensors on a GPU are kept, not copied: they may be changed in place between two
        replays of a captured plan and run. Those in host memory are copied, whatever the cache's device.

        Args:
            qo_indptr_arr: of each level int32 [rows + 1], where each row's queries begin; all end with their number.
            paged_kv_indptr_arr: of each level int32 [rows + 1], where each row's pages begin in the next.
            paged_kv_indices_arr: of each level int32, pages of all rows, one row after another.
            paged_kv_last_page_len: of each level int32 [rows], tokens in each row's last page, 1..page_size; anything
                for rows without pages.
            num_qo_heads: query heads, a multiple of num_kv_heads.
            num_kv_heads: key and value heads.
            head_dim: 16..512.
            page_size: tokens a page, >= 1.
            causal: whether a row's queries are its newest tokens, in the last level, and see none that are newer.
            pos_encoding_mode: `NONE`, `ROPE_LLAMA` (keys and queries are rotated in the kernel) or `ALIBI`.
            use_fp16_qk_reduction: a hint, without effect.
            sm_scale: multiplies the logits; None: 1 / sqrt(head_dim).
            window_left: keys before a query's own that it sees; -1: all. With several levels it must be -1, or too
                long to hide any key.
            logits_soft_cap: caps the logits; None or 0: no cap.
            rope_scale: divides the rotation angles; None: 1.
            rope_theta: base of the rotation frequencies; None: 10000.
            q_data_type: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2, as a name or a dtype.
            kv_data_type: likewise; None: as the queries.

        Raises:
            ValueError: an argument does not fit; nothing has changed then.
        """
        problem = DecodeProblem(
            num_qo_heads, num_kv_heads, head_dim, *planned_dtypes(q_data_type, kv_data_type, None), pos_encoding_mode,
            window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta, page_size,
        )  # fmt: skip
        levels = _lists_of(
            len(self._levels),
            qo_indptr_arr=qo_indptr_arr,
            paged_kv_indptr_arr=paged_kv_indptr_arr,
            paged_kv_indices_arr=paged_kv_indices_arr,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )
        most = sum(lists.indices.shape[0] for lists in levels) * page_size  # tokens that one query may see
        if window_left >= 0 and len(levels) > 1 and window_left < most - 1:
            raise ValueError(
                f"window_left must be -1 with {len(levels)} levels, or at least {most - 1}: keys of upper levels have "
                f"no window of their own, got {window_left}"
            )
        for level, (lists, buffers) in enumerate(zip(levels, self._buffers or [], strict=False)):
            _check_room(level, lists, buffers)
        num_queries = None
        if self._device.type == "cuda":  # on a CPU the operator checks: a captured plan reads nothing here
            num_queries = [_check_values(level, lists, levels[-1], page_size) for level, lists in enumerate(levels)][-1]
        if num_queries is not None:
            _check_window(problem, levels[-1].rows, num_queries, causal=causal)
        self._plan_lists(problem, levels, num_queries, causal=causal)

    begin_forward = plan

    def _plan_lists(
        self, problem: DecodeProblem, levels: list[LevelLists], num_queries: int | None, *, causal: bool
    ) -> None:
        """Plan; `num_queries` is None where it is not on the host."""
        queries = max([num_queries or 0, *(lists.rows for lists in self._buffers or levels)])
        on_device = [
            LevelLists(*(each.to(self._device, non_blocking=True, copy=each.is_cpu) for each in lists))
            for lists in levels
        ]
        rows = [LevelRows.of(lists, on_device[-1], queries, problem.page_size) for lists in on_device]
        self._floats(problem, on_device, queries, causal=causal)

        if self._buffers is not None:
            for lists, buffers in zip(on_device, self._buffers, strict=True):
                lists.copy_to(buffers)
            on_device = self._buffers
        self._lists, self._problem, self._causal, self._least_queries = on_device, problem, causal, num_queries or 0
        self._plan_levels(problem, rows, queries)

    def _shares(self, problem: DecodeProblem, lists: list[LevelLists], *, causal: bool) -> list[bool]:
        """Return of each level whether all queries see the same keys of it."""
        is_free = problem.window_left < 0 or len(lists) > 1
        can_share = is_free and problem.pos_encoding_mode != "ALIBI"  # whose slopes are those of heads
        return [can_share and each.rows == 1 and not (causal and each is lists[-1]) for each in lists]

    def _floats(self, problem: DecodeProblem, lists: list[LevelLists], queries: int, *, causal: bool) -> Tensor:
        """Return the workspace of partial results, which fits so many queries."""
        needed = max(
            CascadeLevel.floats(problem, self._device, queries, is_shared=is_shared)
            for is_shared in self._shares(problem, lists, causal=causal)
        )
        if self._device.type != "cuda":
            return torch.empty(needed, dtype=torch.float32)
        floats = floats_of(self._workspace)
        if floats.shape[0] < needed:
            raise ValueError(
                f"float_workspace_buffer has {self._workspace.nbytes} bytes, but {queries} queries need {4 * needed}"
            )
        return floats

    def _plan_levels(self, problem: DecodeProblem, rows: list[LevelRows], queries: int) -> None:
        newer = rows[-1].newer
        ahead = torch.stack([level.lens for level in rows]).sum(0, dtype=torch.int32) - newer  # of each level's end
        shares = self._shares(problem, self._lists, causal=self._causal)
        for level, level_rows, is_shared in zip(self._levels, rows, shares, strict=True):
            num_keys = level_rows.lens
            if self._causal and level_rows is rows[-1]:
                num_keys = (num_keys - newer).clamp_(min=0)
            ahead = ahead - num_keys
            window_left = problem.window_left if len(rows) == 1 else -1
            level.plan(problem, level_rows.begins, num_keys, ahead, is_shared=is_shared, window_left=window_left)
        self._queries = queries
        if self._counters.shape[0] < queries * problem.num_qo_heads:
            counters = queries * problem.num_qo_heads
            self._counters = torch.zeros(counters, dtype=torch.int32, device=self._device)

    def run(self, q: Tensor, paged_kv_cache: PagedCache) -> Tensor:
        """Attend from each query to all of its keys.

        Args:
            q: [queries, num_qo_heads, head_dim], any strides.
            paged_kv_cache: (k, v), each [pages, page_size, num_kv_heads, head_dim] (NHD) or [pages, num_kv_heads,
                page_size, head_dim] (HND), or one tensor of 5 dimensions with keys and values at dimension 1.

        Returns:
            The output, [queries, num_qo_heads, head_dim_v] of q's dtype, 0 for queries without keys and past those
            that were planned.

        Raises:
            RuntimeError: there was no `plan`.
            ValueError: a tensor does not fit what was planned.
        """
        problem = self._problem
        if problem is None:
            raise RuntimeError("call plan() before run()")
        k_cache, v_cache = paged_caches(paged_kv_cache, self._layout)
        problem.check_tensors(q, k_cache, self._device)
        queries, least = q.shape[0], self._least_queries
        if queries < least or (least and self._buffers is None and queries != least):
            raise ValueError(f"q must have the {least} queries that were planned, got {queries}")
        if self._buffers is None and self._device.type == "cpu":
            require_queries(self._lists[-1].qo_indptr, queries)
        _check_window(problem, self._lists[-1].rows, queries, causal=self._causal)
        floats = self._floats(problem, self._lists, max(queries, self._queries), causal=self._causal)
        if queries > self._queries:  # only now known to be so many
            lists = self._lists
            rows = [LevelRows.of(level, lists[-1], queries, problem.page_size) for level in lists]
            self._plan_levels(problem, rows, queries)
        kwargs = problem.attention_kwargs(None, None, None, problem.window_left if len(self._levels) == 1 else -1)
        wide = exact_queries(q, torch.float32)
        states = [
            level.attend(kwargs, wide, k_cache, v_cache, lists.indices, floats, self._counters)
            for level, lists in zip(self._levels, self._lists, strict=True)
        ]
        out, lse = states.pop()
        for state in states:
            merge_state_in_place(out, lse, *state)
        return out.to(q.dtype)

    forward = run


def _check_count(name: str, tensors: object, levels: int) -> None:
    if not isinstance(tensors, list | tuple) or len(tensors) != levels:
        count = len(tensors) if isinstance(tensors, list | tuple) else shown(tensors)
        raise ValueError(f"{name} must be a list of {levels} tensors, one a level, got {count}")


def _lists_of(levels: int, **arguments: Any) -> list[LevelLists]:
    """Return the lists of each level, as `LevelLists` has them; raises ValueError if they do not fit each other."""
    for name, tensors in arguments.items():
        _check_count(name, tensors, levels)
        for level, tensor in enumerate(tensors):
            require_tensors(**{f"{name}[{level}]": tensor})
            require_fit(f"{name}[{level}]", tensor, ("entries",), torch.int32)
            if tensor.is_meta:
                raise ValueError(f"{name}[{level}] must hold numbers, and is on the meta device")
    queries, pages, _, last = arguments
    level_lists = [LevelLists(*tensors) for tensors in zip(*arguments.values(), strict=True)]
    for level, lists in enumerate(level_lists):
        for name, tensor in ((queries, lists.qo_indptr), (pages, lists.indptr)):
            if tensor.shape[0] != lists.rows + 1 or not lists.rows:
                raise ValueError(
                    f"{name}[{level}] must have one entry more than {last}[{level}], and at least 2, got "
                    f"{tensor.shape[0]} and {lists.rows}"
                )
    return level_lists


def _check_room(level: int, lists: LevelLists, buffers: LevelLists) -> None:
    if lists.rows > buffers.rows:
        raise ValueError(f"the buffers of level {level} hold {buffers.rows} rows, got {lists.rows}")
    if len(lists.indices) > len(buffers.indices):
        raise ValueError(
            f"paged_kv_indices_buf_arr[{level}] holds {len(buffers.indices)} pages, got {len(lists.indices)}"
        )


def _check_values(level: int, lists: LevelLists, last: LevelLists, page_size: int) -> int | None:
    """Return how many queries there are, if that is on the host; raises ValueError for lists that cannot be."""
    try:
        if lists.qo_indptr.is_cpu and last.qo_indptr.is_cpu:
            check_query_lists(lists.qo_indptr.numpy(), last.qo_indptr.numpy())
        if lists.indptr.is_cpu and lists.last_page_len.is_cpu:
            check_page_lists(lists.indptr.numpy(), lists.last_page_len.numpy(), lists.indices.shape[0], page_size)
    except ValueError as error:
        raise ValueError(f"level {level}: {error}") from None
    return int(lists.qo_indptr.numpy()[-1]) if lists.qo_indptr.is_cpu else None


def _check_window(problem: DecodeProblem, rows: int, queries: int, *, causal: bool) -> None:
    if problem.window_left >= 0 and queries > rows and not causal:
        raise ValueError(
            f"window_left={problem.window_left} needs causal=True with several queries a row: got {queries} of {rows}"
        )
