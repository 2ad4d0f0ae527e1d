"""The plan: every key in exactly one work item, the work balanced, and no more items than were sized for."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphdecode.kernels.attention.attention_plan import (
    MOST_SPLITS,
    PlanSizes,
    attention_plan_triton,
    paged_attention_plan_triton,
    plan_size,
    work_items,
)
from graphdecode.kernels.attention.attention_tile import PLAN_HEADER, PLAN_TILE
from graphdecode.kernels.attention.work_item import ITEM_SIZE
from graphdecode.kernels.native.registration import versions

attention_plan_torch = versions("attention_plan").torch


def items_of(plan):
    """Return (row, split, splits, length) of each item of a plan."""
    numbers = plan.tolist()
    return [tuple(numbers[PLAN_HEADER + ITEM_SIZE * item :][:ITEM_SIZE]) for item in range(numbers[0])]


def plan_of(lens, device, *, wave_items, fixed_split=0, window_left=-1, live=None):
    """Return (kv_lens, splits of each row, items) of rows that will have `lens` tokens."""
    rows = len(lens)
    items = work_items(rows, wave_items, -(-max([*lens, 1]) // fixed_split) if fixed_split else 0)
    kv_lens = torch.full((rows,), -1, dtype=torch.int32, device=device)
    plan = torch.full((plan_size(items),), -1, dtype=torch.int32, device=device)
    before = torch.tensor(lens, dtype=torch.int32, device=device) - 1
    live_rows = torch.tensor([rows if live is None else live], dtype=torch.int32, device=device)
    attention_plan_triton(kv_lens, plan, before, live_rows, PlanSizes(wave_items, fixed_split, window_left))
    result = items_of(plan)
    assert len(result) <= items
    splits = [0] * rows
    for row, *_ in result:
        splits[row] += 1
    return kv_lens.tolist(), splits, result


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=24), st.integers(1, 140))
@settings(max_examples=40)
def test_items_cover_the_rows_in_order_and_fit_the_grid(lens, wave_items):
    kv_lens, splits, items = plan_of(lens, "cpu", wave_items=wave_items)
    assert kv_lens == lens
    assert items == [(row, split, splits[row], n) for row, n in enumerate(lens) for split in range(splits[row])]
    assert all((count == 0) == (n == 0) for count, n in zip(splits, lens, strict=True))


@pytest.mark.parametrize("lens", [[100_000], [32_768] * 8, [4096] * 32, [100_000, 512, 512, 512]])
def test_one_wave_fills_the_chip_and_none_of_it_waits(lens, device):
    wave_items = 33  # an H200 with 8 kv heads, two programs a processor
    _, splits, items = plan_of(lens, device, wave_items=wave_items)
    longest = max(-(-n // count) for n, count in zip(lens, splits, strict=True))
    ideal = sum(lens) / wave_items
    assert len(items) <= wave_items
    assert longest <= max(ideal * wave_items / (wave_items - len(lens)), max(lens) / MOST_SPLITS) + PLAN_TILE


def test_long_rows_are_split_more_and_short_ones_not(device):
    _, splits, _ = plan_of([100_000, 50_000, 700, 1], device, wave_items=33)
    assert splits[0] > splits[1] > splits[2] >= splits[3] == 1


def test_a_long_row_among_many_is_split(device):
    _, splits, items = plan_of([512] * 127 + [65_536], device, wave_items=33)
    assert splits[:127] == [1] * 127
    assert splits[127] == MOST_SPLITS
    assert len(items) <= work_items(128, 33)


@pytest.mark.parametrize(("rows", "wave_items"), [(64, 33), (64, 49), (256, 33)])
def test_equal_rows_that_fill_the_chip_are_not_split(rows, wave_items, device):
    _, splits, _ = plan_of([4096] * rows, device, wave_items=wave_items)
    assert splits == [1] * rows


def test_padding_rows_get_no_work_whatever_their_lengths_say(device):
    kv_lens, splits, _ = plan_of([500, 600, 2**31 - 1, -5], device, wave_items=8, live=2)
    assert kv_lens == [500, 600, 0, 0]
    assert splits[2:] == [0, 0]


def test_window_limits_the_work_that_is_planned(device):
    _, splits, _ = plan_of([100_000, 300], device, wave_items=16, window_left=255)
    assert splits == [4, 4]


def test_fixed_splits_depend_on_the_row_alone(device):
    draw = random.Random(0)
    lens = [draw.randrange(1, 5000) for _ in range(9)]
    _, splits, _ = plan_of(lens, device, wave_items=5, fixed_split=256)
    assert splits == [min(-(-n // 256), MOST_SPLITS) for n in lens]


def test_rows_past_the_batch_have_no_items(device):
    indptr = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
    last = torch.tensor([1, 4], dtype=torch.int32, device=device)
    kv_lens = torch.full((6,), -1, dtype=torch.int32, device=device)
    plan = torch.full((plan_size(work_items(6, 4)),), -1, dtype=torch.int32, device=device)
    paged_attention_plan_triton(kv_lens, plan, indptr, last, PlanSizes(4, page_size=4))
    assert kv_lens.tolist() == [5, 4, 0, 0, 0, 0]
    assert items_of(plan) == [(0, 0, 1, 5), (1, 0, 1, 4)]


@pytest.mark.parametrize("live", [0, 2, 3])
def test_torch_version_sets_the_same_lengths(live, device):
    before = torch.tensor([4, 0, 2**31 - 1], dtype=torch.int32)
    kv_lens, expected = torch.full((2, 3), -1, dtype=torch.int32)
    plan = torch.zeros(plan_size(16), dtype=torch.int32)
    before[2] = 9 if live == 3 else before[2]
    attention_plan_torch(expected, plan, before, torch.tensor([live], dtype=torch.int32), *PlanSizes(16))
    on_device = [tensor.to(device) for tensor in (kv_lens, plan, before, torch.tensor([live], dtype=torch.int32))]
    attention_plan_triton(*on_device, PlanSizes(16))
    assert on_device[0].tolist() == expected.tolist()


def test_fixed_splits_of_long_rows_become_longer_and_the_grid_of_many_rows_stays_small(device):
    lens = [128 * 1024, 1024, 0, 16 * 1024, 16 * 1024 + 1]
    _, splits, items = plan_of(lens, device, wave_items=5, fixed_split=1024)
    assert splits == [MOST_SPLITS, 1, 0, 16, 16]
    assert [row for row, *_ in items] == [0] * 16 + [1] + [3] * 16 + [4] * 16
    assert work_items(256, 33, 128) == 256 * MOST_SPLITS  # 128k tokens and 256 rows
    # bytes of partial results
    assert work_items(256, 33, 128) * 32 * 128 * 4 <= 64 << 20
