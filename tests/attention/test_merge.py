"""Merging states: attention over parts, merged, is attention over all."""

import math

import pytest
import torch

from graphdecode import merge_state, merge_state_in_place, merge_states
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.surfaces.merge_states import merge_state_in_place_triton, merge_states_triton

merge_state_in_place_torch = versions("merge_state_in_place").torch
merge_states_torch = versions("merge_states").torch

ROWS, HEADS, DIM = 5, 3, 40


def states(count, device, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    v = torch.randn(ROWS, count, HEADS, DIM, generator=draw)
    s = 20 * torch.randn(ROWS, count, HEADS, generator=draw)
    s[0] = -math.inf  # nothing but empty states
    s[1, 0] = -math.inf
    v[1, 0] = math.nan  # what an empty state holds is nothing
    return v.to(dtype).to(device), s.to(device)


def expected(v, s):
    v, s = v.double().cpu(), s.double().cpu()
    total = torch.logsumexp(s * math.log(2.0), 1) / math.log(2.0)
    weights = torch.exp2(s - torch.where(total == -math.inf, 0.0, total).unsqueeze(1)).unsqueeze(-1)
    return torch.where(weights > 0, v * weights, 0.0).sum(1), total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_merge_states_weighs_by_the_log_sum_exps(count, dtype, device):
    v, s = states(count, device, dtype)
    merged, total = merge_states(v, s)
    assert merged.dtype == dtype
    wanted, wanted_total = expected(v, s)
    close = 1e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(merged.double().cpu(), wanted, atol=close, rtol=close)
    torch.testing.assert_close(total.double().cpu(), wanted_total, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("version", [merge_states_triton, merge_states_torch])
def test_a_state_that_is_no_number_leaves_none(version, device):
    v, s = states(3, device)
    v[2, 1, 0], s[2, 1, 0] = math.nan, math.nan
    v[3, 0, 1, 7] = math.nan
    wanted, wanted_total = expected(v, s)
    wanted[2, 0], wanted_total[2, 0] = math.nan, math.nan
    wanted[3, 1, 7] = math.nan
    merged, total = torch.empty(ROWS, HEADS, DIM, device=device), torch.empty(ROWS, HEADS, device=device)
    version(merged, total, v, s)
    torch.testing.assert_close(merged.double().cpu(), wanted, atol=1e-5, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(total.double().cpu(), wanted_total, atol=1e-5, rtol=1e-5, equal_nan=True)
    version = merge_state_in_place_torch if version is merge_states_torch else merge_state_in_place_triton
    two, both = v[:, 0].clone(), s[:, 0].clone()
    version(two, both, v[:, 1].contiguous(), s[:, 1].contiguous(), None)
    assert two[2].isnan().all(-1).tolist() == both[2].isnan().tolist() == [True, False, False]


def test_merge_state_is_merge_states_of_two(device):
    v, s = states(2, device)
    merged, total = merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    wanted, wanted_total = expected(v, s)
    torch.testing.assert_close(merged.double().cpu(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total.double().cpu(), wanted_total, atol=1e-5, rtol=1e-5)


def test_merging_in_place_leaves_masked_rows_alone(device):
    v, s = states(2, device, seed=1)
    mine, sums = v[:, 0].contiguous(), s[:, 0].contiguous()
    before, sums_before = mine.clone(), sums.clone()
    mask = torch.tensor([True, False, True, False, True], device=device)
    merge_state_in_place(mine, sums, v[:, 1], s[:, 1], mask)
    wanted, wanted_total = expected(v, s)
    torch.testing.assert_close(mine[mask].double().cpu(), wanted[mask.cpu()], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums[mask].double().cpu(), wanted_total[mask.cpu()], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine[~mask], before[~mask], atol=0, rtol=0, equal_nan=True)
    assert torch.equal(sums[~mask], sums_before[~mask])
    merge_state_in_place(mine, sums, v[:, 1], s[:, 1])
    assert not torch.equal(mine[3], before[3])


def test_kernels_agree_with_the_torch_versions(device):
    v, s = states(4, device, seed=2)
    outs = [(torch.empty(ROWS, HEADS, DIM, device=device), torch.empty(ROWS, HEADS, device=device)) for _ in range(4)]
    merge_states_triton(*outs[0], v, s)
    merge_states_torch(*outs[1], v, s)
    torch.testing.assert_close(outs[0], outs[1])
    pair = [part.contiguous() for part in (v[:, 0], s[:, 0], v[:, 1], s[:, 1])]
    mask = torch.tensor([1, 1, 0, 1, 0], dtype=torch.uint8, device=device)
    for version, (out, total) in zip((merge_state_in_place_triton, merge_state_in_place_torch), outs[2:], strict=True):
        out.copy_(pair[0])
        total.copy_(pair[1])
        out[~mask.bool()], total[~mask.bool()] = 7.0, 7.0
        version(out, total, pair[2], pair[3], mask)
    torch.testing.assert_close(outs[2], outs[3])
    assert (outs[2][0][2] == 7.0).all()


def test_merges_refuse_shapes_that_do_not_fit(device):
    v, s = states(2, device)
    with pytest.raises(ValueError, match="the states"):
        merge_states(v[:, 0], s)
    with pytest.raises(ValueError, match="state b"):
        merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1, :1])
    with pytest.raises(ValueError, match="one shape"):
        merge_state(v[:, 0], s[:, 0], v[:3, 1], s[:3, 1])
    with pytest.raises(ValueError, match="contiguous"):
        merge_state_in_place(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    with pytest.raises(ValueError, match="mask"):
        merge_state_in_place(v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1], s[:, 1], torch.ones(2, device=device))
