"""The plan of split-KV decode attention, made on the device: which program attends which part of which row.

Every layer of a step shares one plan. It is a function of the lengths in device memory, so a captured plan is right
and balanced at any later lengths.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from .registration import operator

WAVES_WHEN_FULL = 3  # with more rows than one wave holds, long rows may be split into so many waves more
PLAN_HEADER = 1


def work_items(rows: int, wave_items: int, max_splits: int = 0) -> int:
    """Return how many work items a plan over `rows` rows may hold: what grids and workspaces are sized by.

    Args:
        rows: rows of the bucket.
        wave_items: work items (times kv heads: programs) that run at the same time on the chip.
        max_splits: with a fixed split size, the most splits of one row; 0 without.
    """
    if max_splits > 0:
        return rows * max_splits
    return wave_items if rows <= wave_items else rows + WAVES_WHEN_FULL * wave_items


def plan_size(max_rows: int, max_items: int) -> int:
    """Return how many int32 a plan takes: the number of items, first item and splits of each row, row of each item."""
    return PLAN_HEADER + 2 * max_rows + max_items


def bind_attention_plan(
    kv_lens: Tensor,
    plan: Tensor,
    pre_step_seqlens: Tensor,
    live_rows: Tensor,
    wave_items: int,
    fixed_split: int,
    window_left: int,
) -> Callable[[], None]:
    """Return the plan of fixed tensors in host memory: the lengths alone, as nothing is split there."""
    rows = pre_step_seqlens.shape[0]
    before, after, live = pre_step_seqlens.numpy(), kv_lens.numpy()[:rows], live_rows.numpy()

    def set_lengths() -> None:
        count = min(max(int(live[0]), 0), rows)
        np.add(before[:count], 1, out=after[:count])
        after[count:] = 0

    return set_lengths


def attention_plan_torch(
    kv_lens: Tensor,
    plan: Tensor,
    pre_step_seqlens: Tensor,
    live_rows: Tensor,
    wave_items: int,
    fixed_split: int,
    window_left: int,
) -> None:
    """Set the lengths on the host; the torch version of attention needs no plan. See `attention_plan`."""
    bind_attention_plan(kv_lens, plan, pre_step_seqlens, live_rows, wave_items, fixed_split, window_left)()


_attention_plan = operator(
    "attention_plan(Tensor(a!) kv_lens, Tensor(b!) plan, Tensor pre_step_seqlens, Tensor live_rows, int wave_items, "
    "int fixed_split, int window_left) -> ()",
    torch_version=attention_plan_torch,
    bound_version=bind_attention_plan,
)


def attention_plan(
    kv_lens: Tensor,
    plan: Tensor,
    pre_step_seqlens: Tensor,
    live_rows: Tensor,
    *,
    wave_items: int,
    fixed_split: int = 0,
    window_left: int = -1,
) -> None:
    """Plan one decode step from the lengths before it: each live row attends to `pre_step_seqlens + 1` tokens.

    Args:
        kv_lens: int32 [max_rows], written: the tokens that each row attends to, 0 for padding.
        plan: int32 [plan_size(...)], written.
        pre_step_seqlens: int32 [rows], rows <= max_rows.
        live_rows: int32 [1]; rows past it are padding, whatever their lengths say.
        wave_items: work items that run at the same time.
        fixed_split: tokens a split, for plans that do not depend on the rest of the batch; 0: balanced.
        window_left: the window that most layers use, which is what the work is balanced for; -1: none.
    """
    _attention_plan(kv_lens, plan, pre_step_seqlens, live_rows, wave_items, fixed_split, window_left)
