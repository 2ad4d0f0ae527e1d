"""The plan of split-KV decode attention, made on the device: which program attends which part of which row.

Every layer of a step shares one plan. It is a function of the lengths in device memory, so a captured plan is right
and balanced at any later lengths.
"""

from typing import NamedTuple

import numpy as np

from ..native.optional_triton import early_start_options, tl, triton, wait_and_trigger
from ..native.registration import Int32, Written, operator
from .attention_tile import PLAN_HEADER, PLAN_TILE
from .work_item import ITEM_SIZE

WAVES_WHEN_FULL = 1  # with more rows than one wave holds, long rows may be split into so many waves more
MOST_SPLITS = 16  # of one row: merging them is a chain of loads, and grids and workspaces are sized for as many


class PlanSizes(NamedTuple):
    """The sizes that rows are split by."""

    wave_items: int  # work items that run at the same time
    # tokens of a split, for plans that do not depend on the rest of the batch; more where a row would have more than
    # `MOST_SPLITS`. 0: balanced
    fixed_split: int = 0
    window_left: int = -1  # the window that most layers use, which is what the work is balanced for; -1: none
    page_size: int = 1  # tokens a page
    q_len: int = 1  # queries a row


class PlanMeta(NamedTuple):
    """Constants of the kernel of a plan: the source of lengths, how rows are split, and rows at once."""

    PAGED: bool
    FIXED: bool
    HAS_WINDOW: bool
    BLOCK: int
    HEADER: int = PLAN_HEADER
    TILE: int = PLAN_TILE
    WAVES: int = WAVES_WHEN_FULL
    MOST_SPLITS: int = MOST_SPLITS


def work_items(rows: int, wave_items: int, max_splits: int = 0) -> int:
    """Return how many work items a plan over `rows` rows may hold, the size of grids and workspaces.

    `wave_items` (times kv heads: programs) run at the same time. `max_splits`: with a fixed split size, the most splits
    of the longest row; 0 without.
    """
    if max_splits > 0:
        return rows * min(max_splits, MOST_SPLITS)
    return min(wave_items, rows * MOST_SPLITS) if rows <= wave_items else rows + WAVES_WHEN_FULL * wave_items


def plan_size(max_items: int) -> int:
    """Return how many int32 a plan takes: the number of items, and for each its row, split, splits and row's length."""
    return PLAN_HEADER + ITEM_SIZE * max_items


# One program plans one row: it reads all lengths (4 bytes a row, in L2 but for the first), finds the split size that
# all programs find, and writes its own row's items, 16 bytes each. No program waits for another.
@triton.jit(do_not_specialize=["rows"])
def _attention_plan_kernel(
    kv_lens, plan, lengths, live_rows, last_page_len, rows, sizes, META: tl.constexpr, PDL: tl.constexpr
):
    TILE: tl.constexpr = META.TILE
    if PDL:
        wait_and_trigger()
    row = tl.program_id(0)
    index = tl.arange(0, META.BLOCK)
    inside = index < rows
    if META.PAGED:
        pages = tl.load(lengths + index + 1, mask=inside, other=0) - tl.load(lengths + index, mask=inside, other=0)
        last = tl.load(last_page_len + index, mask=inside, other=0)
        tokens = tl.where(pages > 0, (pages - 1) * sizes.page_size + last, 0)
    else:
        inside = inside & (index < tl.load(live_rows))
        tokens = tl.where(inside, tl.load(lengths + index, mask=inside, other=0) + 1, 0)
    span = tokens
    if META.HAS_WINDOW:
        span = tl.minimum(tokens, sizes.window_left + sizes.q_len)
    if META.FIXED:  # a long row's splits become longer, which is a matter of its own length as well
        splits = tl.minimum(tl.cdiv(span, sizes.fixed_split), META.MOST_SPLITS)
    else:
        wave_items = sizes.wave_items
        total = tl.sum(span.to(tl.int64))
        filled = tl.sum((span > 0).to(tl.int32))
        capacity = tl.where(filled <= wave_items, wave_items, filled + META.WAVES * wave_items)
        # the smallest split of whole tiles with which all rows fit: sum(ceil(span / split)) <= capacity. It lies
        # between total / capacity and total / (capacity - filled)
        most = tl.maximum(tl.cdiv(tl.max(span), TILE), 1)
        low = tl.maximum(tl.cdiv(total, capacity.to(tl.int64) * TILE).to(tl.int32), 1)
        low = tl.maximum(low, tl.cdiv(most, META.MOST_SPLITS))
        spare = tl.maximum(capacity - filled, 1).to(tl.int64)
        high = tl.where(capacity > filled, tl.cdiv(total, spare * TILE).to(tl.int32), most)
        high = tl.maximum(tl.minimum(high, most), low)
        while low < high:
            middle = (low + high) // 2
            fits = tl.sum(tl.cdiv(span, middle * TILE)) <= capacity
            low = tl.where(fits, low, middle + 1)
            high = tl.where(fits, middle, high)
        splits = tl.cdiv(span, low * TILE)
    is_row = index == row
    count = tl.sum(tl.where(is_row, splits, 0))
    first = tl.sum(tl.where(index < row, splits, 0))
    length = tl.sum(tl.where(is_row, tokens, 0))
    tl.store(kv_lens + row, length)
    if row == 0:
        tl.store(plan, tl.sum(splits))
    for begin in range(0, count, 32):
        split = begin + tl.arange(0, 32)
        item = plan + META.HEADER + (first + split) * 4
        tl.store(item, split * 0 + row, mask=split < count)
        tl.store(item + 1, split, mask=split < count)
        tl.store(item + 2, split * 0 + count, mask=split < count)
        tl.store(item + 3, split * 0 + length, mask=split < count)


def attention_plan_triton(kv_lens, plan, pre_step_seqlens, live_rows, sizes) -> None:
    """Launch the kernel; see `attention_plan`."""
    rows = pre_step_seqlens.shape[0]
    _launch(kv_lens, plan, pre_step_seqlens, live_rows, None, rows, rows, sizes)


def paged_attention_plan_triton(kv_lens, plan, indptr, last_page_len, sizes) -> None:
    """Launch the kernel; see `paged_attention_plan`."""
    _launch(kv_lens, plan, indptr, None, last_page_len, last_page_len.shape[0], kv_lens.shape[0], sizes)


def _launch(kv_lens, plan, lengths, live_rows, last_page_len, rows, programs, sizes) -> None:
    block = triton.next_power_of_2(programs)
    _attention_plan_kernel[(programs,)](
        kv_lens, plan, lengths, live_rows, last_page_len, rows, sizes,
        META=PlanMeta(last_page_len is not None, sizes.fixed_split > 0, sizes.window_left >= 0, block),
        PDL=early_start_options(plan.device)["PDL"],  # the first of a step: it lets others begin early, and does not
        num_warps=1 if rows <= 256 else 4,
    )  # fmt: skip


def check_page_lists(indptr: np.ndarray, last_page_len: np.ndarray, num_indices: int, page_size: int) -> None:
    """Raise ValueError for page lists that no row could have; see `paged_attention_plan`."""
    pages = np.diff(indptr)
    if indptr[0] != 0 or (pages < 0).any() or indptr[-1] > num_indices:
        raise ValueError(
            f"indptr must rise from 0 to at most the {num_indices} pages of indices, got {indptr.tolist()}"
        )
    if ((pages > 0) & ((last_page_len < 1) | (last_page_len > page_size))).any():
        raise ValueError(
            f"last_page_len must be in 1..page_size={page_size} for rows with pages, got {last_page_len.tolist()}"
        )


@operator(triton_version=attention_plan_triton, is_compiled=lambda pre_step_seqlens: pre_step_seqlens.is_contiguous())
def attention_plan(
    kv_lens: Written[Int32], plan: Written[Int32], pre_step_seqlens: Int32, live_rows: Int32, sizes: PlanSizes
) -> None:
    """Plan one decode step from the lengths before it: each live row attends to `pre_step_seqlens + 1` tokens.

    Args:
        kv_lens: int32 [max_rows], written: the tokens that each row attends to, 0 for padding.
        plan: int32 [plan_size(...)], written.
        pre_step_seqlens: int32 [rows], rows <= max_rows.
        live_rows: int32 [1]; rows past it are padding, whatever their lengths say.
        sizes: what rows are split by; each has one query.
    """
    # nothing is split on a CPU: the lengths are all of the plan
    rows = pre_step_seqlens.shape[0]
    lengths = kv_lens.numpy()[:rows]
    count = min(max(int(live_rows), 0), rows)
    np.add(pre_step_seqlens.numpy()[:count], 1, out=lengths[:count])
    lengths[count:] = 0


@operator(triton_version=paged_attention_plan_triton)
def paged_attention_plan(
    kv_lens: Written[Int32],
    plan: Written[Int32],
    indptr: Int32,
    last_page_len: Int32,
    sizes: PlanSizes,
    num_indices: int,
) -> None:
    """Plan decode attention over rows whose pages are listed one row after another.

    Args:
        kv_lens: int32 [max_rows], written: `(pages - 1) * page_size + last_page_len`; 0 without pages and past rows.
        plan: int32 [plan_size(...)], written.
        indptr: int32 [rows + 1], where each row's pages begin; rows <= max_rows.
        last_page_len: int32 [rows], tokens in each row's last page.
        sizes: what rows are split by.
        num_indices: pages that are listed; indptr[-1] is at most that.

    Raises:
        ValueError: on a CPU, lengths that cannot be. A GPU is not waited for.
    """
    rows = last_page_len.shape[0]
    starts, last = indptr.numpy(), last_page_len.numpy()
    check_page_lists(starts, last, num_indices, sizes.page_size)
    pages = np.diff(starts)
    lengths = kv_lens.numpy()
    lengths[:rows] = np.where(pages > 0, (pages - 1) * sizes.page_size + last, 0)
    lengths[rows:] = 0
