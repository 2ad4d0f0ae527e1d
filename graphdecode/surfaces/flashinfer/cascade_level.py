"""One level of a cascade: its lists of queries and pages, their plan on the device, and attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphdecode.kernels.attention.attention_plan import PlanSizes, attention_plan, plan_size, work_items
from graphdecode.kernels.attention.attention_torch import alibi_slopes, rotate_half
from graphdecode.kernels.attention.decode_attention import decode_attention
from graphdecode.kernels.attention.work_item import SplitPlan
from graphdecode.kernels.surfaces.cascade_rows import cascade_rows

from .decode_problem import DecodeProblem, partials_of

_TILE_QUERIES = 64  # queries times heads of a group that share one reading of the keys


class LevelLists(NamedTuple):
    """The rows of queries of a level, and the pages that each sees; all int32."""

    qo_indptr: Tensor  # [rows + 1], where each row's queries begin
    indptr: Tensor  # [rows + 1], where each row's pages begin in `indices`
    indices: Tensor  # pages of all rows, one row after another
    last_page_len: Tensor  # [rows], tokens in each row's last page

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.last_page_len.shape[0]

    def copy_to(self, buffers: LevelLists) -> None:
        """Write these into buffers that are large enough; rows past these have no queries and no pages."""
        for buffer, tensor in zip(buffers, self, strict=True):
            buffer[: tensor.shape[0]].copy_(tensor)
        for buffer, tensor in ((buffers.qo_indptr, self.qo_indptr), (buffers.indptr, self.indptr)):
            buffer[tensor.shape[0] :].copy_(tensor[-1:].expand(buffer.shape[0] - tensor.shape[0]))
        buffers.last_page_len[self.rows :].zero_()


class LevelRows(NamedTuple):
    """The results of `cascade_rows` for each query of a level."""

    begins: Tensor
    lens: Tensor
    newer: Tensor

    @classmethod
    def of(cls, lists: LevelLists, last: LevelLists, queries: int, page_size: int) -> LevelRows:
        """Return them for so many queries; raises ValueError for lists on a CPU that cannot be."""
        begins, lens, newer = (lists.indptr.new_empty(queries + more) for more in (1, 0, 0))
        cascade_rows(
            begins, lens, newer, lists.qo_indptr, last.qo_indptr, lists.indptr, lists.last_page_len, page_size,
            lists.indices.shape[0],
        )  # fmt: skip
        return cls(begins, lens, newer)


class CascadeLevel:
    """The keys that a level's queries see, at fixed addresses while no later plan is for more queries.

    Each query is a row of the decode kernels. A level of one row is read once for all queries, as heads of one query.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begins = self.num_keys = self._lens = self._ahead = self._plan = torch.zeros(
            0, dtype=torch.int32, device=device
        )
        self.is_shared, self.max_items = False, 0

    @property
    def workspace(self) -> list[Tensor]:
        """The tensors that a plan writes."""
        return [self.begins, self.num_keys, self._lens, self._ahead, self._plan]

    @staticmethod
    def floats(problem: DecodeProblem, device: torch.device, queries: int, *, is_shared: bool) -> int:
        """Return how many floats hold the partial results of so many queries."""
        rows, heads = (1, queries * problem.num_qo_heads) if is_shared else (queries, problem.num_qo_heads)
        return (
            work_items(rows, _wave_items(problem, device, queries, is_shared=is_shared))
            * heads
            * (problem.head_dim + 2)
        )

    def plan(
        self,
        problem: DecodeProblem,
        begins: Tensor,
        num_keys: Tensor,
        ahead: Tensor,
        *,
        is_shared: bool,
        window_left: int,
    ) -> None:
        """Plan on the device.

        Args:
            problem: the parameters.
            begins: int32 [queries + 1], see `cascade_rows`.
            num_keys: int32 [queries], keys that each query sees; 0: none.
            ahead: int32 [queries], how much later than the last key it sees, within the level, each query stands.
            is_shared: whether all queries see the same keys.
            window_left: see `AttentionOptions`.
        """
        queries = num_keys.shape[0]
        rows = 1 if is_shared else queries
        wave_items = _wave_items(problem, self._device, queries, is_shared=is_shared)
        items = work_items(rows, wave_items)
        if self.num_keys.shape[0] != queries:
            self.begins, self.num_keys, self._ahead = (torch.empty_like(each) for each in (begins, num_keys, ahead))
        if self._lens.shape[0] != rows:
            self._lens = torch.zeros_like(num_keys[:rows])
        if self._plan.shape[0] < plan_size(items):
            self._plan = torch.zeros(plan_size(items), dtype=torch.int32, device=self._device)
        for target, source in ((self.begins, begins), (self.num_keys, num_keys), (self._ahead, ahead)):
            target.copy_(source)
        self.is_shared, self.max_items = is_shared, items
        live = torch.full((1,), rows, dtype=torch.int32, device=self._device)
        attention_plan(self._lens, self._plan, self.num_keys[:rows] - 1, live, PlanSizes(wave_items, 0, window_left))

    def attend(
        self,
        kwargs: dict[str, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        floats: Tensor,
        counters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention of queries [queries, heads, head_dim] over the level, and base-2 log-sum-exps, in fp32.

        Partial results are written into `floats`; there is a counter for each query and head, see `SplitPlan`.
        """
        queries, heads, _ = q.shape
        mode, rope_scale, rope_theta = kwargs["positions"]
        if mode == "ROPE_LLAMA":  # the kernel rotates as if the newest key seen were the query's own
            q = rotate_half(q.transpose(0, 1), self._ahead[:queries], rope_scale, rope_theta).transpose(0, 1)
            q = q.contiguous()
        split = self._split(queries * heads if self.is_shared else heads, v.shape[-1], floats, counters)
        if self.is_shared:
            out, lse = attend_together(q, k, v, indices, self.begins, split, self.max_items, kwargs)
            is_listed = self.num_keys[:queries] > 0
            out.masked_fill_(~is_listed[:, None, None], 0.0)
            lse.masked_fill_(~is_listed[:, None], -math.inf)
        else:
            out = torch.empty(queries, heads, v.shape[-1], dtype=torch.float32, device=q.device)
            lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
            decode_attention(out, lse, q, k, v, indices, self.begins, split, max_items=self.max_items, **kwargs)
        if mode == "ALIBI":  # all logits of the level are less by the same
            lse -= self._ahead[:queries, None] * (alibi_slopes(heads, q.device) * math.log2(math.e))
        return out, lse

    def _split(self, heads: int, value_dim: int, floats: Tensor, counters: Tensor) -> SplitPlan:
        """Return the plan with the workspace of an item, which has so many heads."""
        partials = partials_of(floats, (self.max_items, 1, heads), value_dim)
        return SplitPlan(self._lens, self._plan, *partials, counters)


def attend_together(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    indptr: Tensor | None,
    work: SplitPlan,
    max_items: int,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return the attention of all queries [queries, heads, dim] over the keys of one row, which are read once.

    Queries become heads of a single one, which sees the same.
    """
    queries, heads, dim = q.shape
    kv_heads, device = k.shape[2], q.device
    joined = q.unflatten(1, (kv_heads, -1)).transpose(0, 1).reshape(1, -1, dim)
    out = torch.empty(1, joined.shape[1], v.shape[-1], dtype=torch.float32, device=device)
    lse = torch.empty(1, joined.shape[1], dtype=torch.float32, device=device)
    decode_attention(out, lse, joined, k, v, table, indptr, work, max_items=max_items, **kwargs)
    split = (kv_heads, queries, heads // kv_heads)
    return (
        out.view(*split, -1).transpose(0, 1).reshape(queries, heads, -1),
        lse.view(split).transpose(0, 1).reshape(queries, heads),
    )


def shared_wave_items(problem: DecodeProblem, device: torch.device, queries: int) -> int:
    """Return in how many work items a row is split that all queries see; see `wave_items_for`."""
    group = problem.num_qo_heads // problem.num_kv_heads
    tile_queries = min(queries, -(-_TILE_QUERIES // group))
    joined = replace(problem, num_qo_heads=tile_queries * problem.num_qo_heads)
    return max(joined.wave_items(device, problem.head_dim) // -(-queries // tile_queries), 1)


def _wave_items(problem: DecodeProblem, device: torch.device, queries: int, *, is_shared: bool) -> int:
    if is_shared:
        return shared_wave_items(problem, device, queries)
    return problem.wave_items(device, problem.head_dim)
