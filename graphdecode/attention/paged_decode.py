"""Decode attention inside a captured step: fixed workspaces, one plan a step, one run a layer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from graphdecode.cache import CacheScales
from graphdecode.cache.errors import require_positive
from graphdecode.kernels.attention.append_attention import append_attention
from graphdecode.kernels.attention.attention_plan import PlanSizes, attention_plan, plan_size, work_items
from graphdecode.kernels.attention.attention_records import AttentionOptions, QKNormRope
from graphdecode.kernels.attention.attention_tile import decode_tile, programs_per_processor
from graphdecode.kernels.attention.decode_attention import decode_attention
from graphdecode.kernels.attention.work_item import SplitPlan
from graphdecode.kernels.cache.rope_append import rope_append

FIXED_SPLIT = 1024  # tokens of a split in batch-invariant plans, at least


def splits_rows(device: torch.device) -> bool:
    """Whether rows are split over a device's processors, so that partial results need memory; on a CPU they are not."""
    return device.type == "cuda"


def wave_items_for(
    device: torch.device,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    q_len: int = 1,
) -> int:
    """Return in how many work items (times kv heads: programs) rows are split; `q_len` per row.

    As many as run on the device at the same time, by `decode_tile`. Of a step's smaller tiles more would run: on an
    H200 more splits made steps slower.
    """
    if not splits_rows(device):
        return 1
    tile = decode_tile(q_len * num_qo_heads // num_kv_heads, head_dim, head_dim_v, dtype, kv_dtype)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(processors * programs_per_processor(device, tile, kv_dtype.itemsize) // num_kv_heads, 1)


def new_split_plan(
    device: torch.device, rows: int, items: int, num_qo_heads: int, head_dim_v: int, q_len: int = 1
) -> SplitPlan:
    """Return a plan of at most `items` work items, and the workspace of `q_len` queries a row."""
    splits = items if splits_rows(device) else 1
    ints, floats = (partial(torch.zeros, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
    sizes = (splits, q_len, num_qo_heads)
    workspace = (floats(*sizes, head_dim_v), floats(*sizes, 2), ints(rows * q_len * num_qo_heads))
    return SplitPlan(ints(rows), ints(plan_size(items)), *workspace)


def plan_rows(
    before: Tensor, wave_items: int, num_qo_heads: int, head_dim_v: int, *, q_len: int = 1, window_left: int = -1
) -> tuple[SplitPlan, int]:
    """Return a plan in new tensors of rows that attend to `before` + 1 keys, int32 [rows], and its most work items."""
    rows, device = before.shape[0], before.device
    items = work_items(rows, wave_items)
    work = new_split_plan(device, rows, items, num_qo_heads, head_dim_v, q_len)
    live = torch.full((1,), rows, dtype=torch.int32, device=device)
    sizes = PlanSizes(wave_items, window_left=window_left, q_len=q_len)
    attention_plan(work.kv_lens, work.plan, before, live, sizes)
    return work, items


class PagedDecodeAttention:
    """Attention of one new token a row over a paged cache, for every layer of one step.

    The workspaces are allocated once, so that `plan` and `run` can be captured.

    Args:
        max_batch_size: rows of the largest bucket.
        num_qo_heads: query heads, a multiple of num_kv_heads.
        head_dim, head_dim_v: of queries and keys, and of values and outputs; None: the same.
        max_pages_per_row: width of the page table.
        dtype: queries' and outputs'.
        kv_dtype: keys' and values'; None: the same.
        windows: the layers' windows, -1 for none; each has a plan.
        batch_invariant: split at fixed positions, so that a row's bits do not depend on the rest of the batch.

    Attributes:
        separate_append: `append_and_run` is two launches: for an int8 cache on a GPU, whose keys are mixed before.

    Raises:
        ValueError: a size is less than 1, or the heads do not divide.
    """

    SEPARATE_APPEND_DEVICES: ClassVar = {"cuda"}  # of `separate_append`

    def __init__(
        self,
        *,
        max_batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        page_size: int,
        max_pages_per_row: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        windows: Iterable[int] = (-1,),
        batch_invariant: bool = False,
        device: torch.device | str,
    ) -> None:
        require_positive(
            max_batch_size=max_batch_size, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            page_size=page_size, max_pages_per_row=max_pages_per_row,
        )  # fmt: skip
        if num_qo_heads % num_kv_heads:
            raise ValueError(f"num_qo_heads={num_qo_heads} must be a multiple of num_kv_heads={num_kv_heads}")
        self.max_batch_size = max_batch_size
        self.device = torch.device(device)
        value_dim = head_dim if head_dim_v is None else head_dim_v
        self._wave_items = wave_items_for(
            self.device, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, head_dim_v=value_dim,
            dtype=dtype, kv_dtype=dtype if kv_dtype is None else kv_dtype,
        )  # fmt: skip
        self.separate_append = kv_dtype == torch.int8 and self.device.type in self.SEPARATE_APPEND_DEVICES
        self._rows: list[Tensor] = []  # row numbers, if `separate_append`
        if self.separate_append:
            self._rows = [torch.arange(max_batch_size, dtype=torch.int32, device=self.device)]
        self._planned: tuple[Tensor, Tensor] | None = None  # lengths and live rows of the step
        self.is_invariant = batch_invariant
        self._fixed_split = FIXED_SPLIT if batch_invariant else 0
        self._max_splits = -(-page_size * max_pages_per_row // FIXED_SPLIT) if batch_invariant else 0
        work = new_split_plan(self.device, max_batch_size, self._items(max_batch_size), num_qo_heads, value_dim)
        chosen = sorted(set(windows))
        plans = torch.zeros(len(chosen), work.plan.shape[0], dtype=torch.int32, device=self.device)
        self._work = {window: work._replace(plan=plan) for window, plan in zip(chosen, plans, strict=True)}

    def _items(self, rows: int) -> int:
        return work_items(rows, self._wave_items, self._max_splits)

    @property
    def workspace(self) -> list[Tensor]:
        """All tensors that a captured step reads and writes here."""
        kv_lens, _, *workspace = next(iter(self._work.values()))
        return [*self._rows, kv_lens, *(work.plan for work in self._work.values()), *workspace]

    def plan(self, pre_step_seqlens: Tensor, live_rows: Tensor) -> None:
        """Plan one step on the device: row i attends to `pre_step_seqlens[i] + 1` tokens, padding to none.

        Args:
            pre_step_seqlens: int32 [rows], tokens in the cache before the step.
            live_rows: int32 [1]; rows past it are padding.
        """
        self._planned = (pre_step_seqlens, live_rows)
        for window, work in self._work.items():
            sizes = PlanSizes(self._wave_items, self._fixed_split, window)
            attention_plan(work.kv_lens, work.plan, pre_step_seqlens, live_rows, sizes)

    def _work_for(self, window: int) -> SplitPlan:
        """Return the plan for a window; for an unknown one, any plan: it is correct, but less balanced."""
        return self._work.get(window, next(iter(self._work.values())))

    def run(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        options: AttentionOptions = AttentionOptions(),  # noqa: B008 (immutable)
        scales: CacheScales = CacheScales(),  # noqa: B008
    ) -> None:
        """Write one layer's attention into `out`, for the rows that were planned; padding rows get 0.

        The tensors are those of `decode_attention`; `options` and `scales` are the layer's.
        """
        work, options = self._work_for(options.window_left), options.scaled(q.shape[-1], scales.key)
        decode_attention(
            out, None, q, k_cache, v_cache, page_table, None, work,
            max_items=self._items(q.shape[0]), options=options, v_scale=scales.value, scales=scales.pages,
        )  # fmt: skip

    def append_and_run(
        self,
        out: Tensor,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        rope: QKNormRope,
        options: AttentionOptions = AttentionOptions(),  # noqa: B008
        scales: CacheScales = CacheScales(),  # noqa: B008
    ) -> None:
        """Append each row's new token to one layer's cache and write its attention into `out`; see `append_attention`.

        This is one launch, or two; see `separate_append`. One launch takes the newest key from registers, so its bits
        differ from `rope_append` and `run`, which batch-invariant models use.
        """
        if self.separate_append and self._planned is not None:
            q, count = torch.empty_like(out), out.shape[0]
            lens, live = self._planned
            (rows,) = self._rows
            rope_append(
                q, k_cache, v_cache, qkv, rows[:count], lens, live, page_table, rope,
                k_scale=scales.key, v_scale=scales.value, scales=scales.pages,
            )  # fmt: skip
            self.run(out, q, k_cache, v_cache, page_table, options, scales)
            return
        work, options = self._work_for(options.window_left), options.scaled(out.shape[-1])
        append_attention(
            out, k_cache, v_cache, qkv, page_table, work, rope, max_items=self._items(out.shape[0]), options=options,
            k_scale=scales.key, v_scale=scales.value, scales=scales.pages,
        )  # fmt: skip
