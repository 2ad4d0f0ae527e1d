"""Attention's operators keep what their schemas promise, and the step's attention its laws."""

import math

import pytest
import torch
from attention_oracle import Options
from paged_rows import PagedRows
from torch.library import opcheck

import graphdecode.attention
from graphdecode import merge_state, merge_state_in_place, merge_states
from graphdecode.attention import AttentionOptions, PagedDecodeAttention
from graphdecode.attention.paged_decode import new_split_plan
from graphdecode.kernels.attention.attention_plan import PlanSizes, plan_size
from graphdecode.kernels.attention.attention_torch import flash_attention, math_attention
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.surfaces import query_rows  # noqa: F401 (it registers the operator)
from graphdecode.kernels.surfaces.merge_states import merge_state_in_place_triton, merge_states_triton

OPERATORS = torch.ops.graphdecode
CHECKS = ("test_schema", "test_faketensor")
HEADS, KV_HEADS, DIM, PAGE, WIDTH = 4, 2, 32, 4, 20


@pytest.fixture
def rows(device):
    return PagedRows.random(
        [9, 0, 21], page_size=PAGE, kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32, device=device
    )


def test_operators_pass_opcheck(rows, device):
    kv_lens = torch.zeros(3, dtype=torch.int32, device=device)
    plan = torch.zeros(plan_size(8), dtype=torch.int32, device=device)
    lens = torch.tensor(rows.lens, dtype=torch.int32, device=device)
    live = torch.tensor([3], dtype=torch.int32, device=device)
    opcheck(OPERATORS.attention_plan.default, (kv_lens, plan, lens, live, *PlanSizes(8)), test_utils=CHECKS)
    sizes = PlanSizes(8, page_size=PAGE)
    arguments = (kv_lens, plan, rows.indptr, rows.last_page_len, *sizes, rows.indices.shape[0])
    opcheck(OPERATORS.paged_attention_plan.default, arguments, test_utils=CHECKS)
    opcheck(OPERATORS.query_rows.default, (*torch.zeros_like(kv_lens.expand(2, 3)), rows.indptr, rows.indptr, lens,
                                           rows.indices.shape[0], PAGE, True), test_utils=CHECKS)  # fmt: skip
    q = torch.randn(3, HEADS, DIM, device=device)
    lse = torch.zeros(3, HEADS, device=device)
    workspace = new_split_plan(torch.device(device), 3, 8, HEADS, DIM)[2:]
    caches = (rows.k_cache.nan_to_num(), rows.v_cache.nan_to_num())
    arguments = (torch.empty_like(q), lse, q, *caches, rows.table, None, lens, plan, *workspace, 1, 8)
    options = (0.2, -1, 0.0, torch.randn(HEADS, device=device), False)
    arguments = (*arguments, *options, 1.0, "NONE", 1.0, 1e4, None, None)
    opcheck(OPERATORS.decode_attention.default, arguments, test_utils=CHECKS)
    cu_q = torch.tensor([0, 1, 1, 3], dtype=torch.int32, device=device)
    cu_kv = torch.tensor([0, *rows.lens], device=device).cumsum(0).to(torch.int32)
    arguments = (torch.zeros_like(q), lse, q, *caches, cu_q, cu_kv, rows.table, *options, 1.0, None, None)
    opcheck(OPERATORS.extend_attention.default, arguments, test_utils=CHECKS)
    at = torch.tensor([0, 2, 2], dtype=torch.int32, device=device)
    new = torch.randn(3, KV_HEADS, DIM, device=device)
    arguments = (*caches, new, new, at, at, rows.indices, rows.indptr)
    opcheck(OPERATORS.paged_append.default, arguments, test_utils=CHECKS)
    v, s = torch.randn(3, 2, HEADS, DIM, device=device), torch.randn(3, 2, HEADS, device=device)
    opcheck(OPERATORS.merge_states.default, (torch.empty_like(q), lse, v, s), test_utils=CHECKS)
    pair = [part.contiguous() for part in (v[:, 0], s[:, 0], v[:, 1], s[:, 1])]
    opcheck(OPERATORS.merge_state_in_place.default, (*pair, None), test_utils=CHECKS)
    cos_sin = torch.randn(64, 2, DIM // 2, device=device)
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * DIM, device=device)
    arguments = (
        torch.empty_like(q),
        *caches,
        qkv,
        at,
        at,
        live,
        rows.table,
        cos_sin,
        None,
        None,
        1e-6,
        1.0,
        1.0,
        None,
        None,
    )
    opcheck(OPERATORS.rope_append.default, arguments, test_utils=CHECKS)


def attention(device, **options):
    options = {"max_batch_size": 4, "page_size": PAGE, "max_pages_per_row": WIDTH, **options}
    return PagedDecodeAttention(
        num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32, device=device, **options
    )


@pytest.mark.parametrize("window_left", [-1, 5])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_step_attends_to_the_token_that_it_feeds(window_left, batch_invariant, device):
    rows = PagedRows.random(
        [9, 21, 1], page_size=PAGE, kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32, device=device
    )
    before = torch.tensor([8, 20, 0], dtype=torch.int32, device=device)
    q = torch.randn(3, HEADS, DIM, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.empty_like(q)
    options = AttentionOptions(window_left=window_left, logits_soft_cap=2.0)
    step = attention(device, windows=[window_left], batch_invariant=batch_invariant)
    step.plan(before, torch.tensor([3], dtype=torch.int32, device=device))
    step.run(out, q, rows.k_cache, rows.v_cache, rows.table, options)
    expected, _ = rows.expected(q, 1, Options(DIM**-0.5, window_left=window_left, soft_cap=2.0))
    torch.testing.assert_close(out.double().cpu(), expected, atol=1e-5, rtol=1e-5)
    step.run(out, q, rows.k_cache, rows.v_cache, rows.table, options._replace(window_left=2))
    expected, _ = rows.expected(q, 1, Options(DIM**-0.5, window_left=2, soft_cap=2.0))
    torch.testing.assert_close(out.double().cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lens", [[9, 21, 4], [9, 90, 33, 7, 50, 2, 2]])
def test_hostile_padding_changes_no_bit_of_a_live_row(lens, device):
    """Law 4: rows past the live ones may hold anything, and come out as 0."""
    rows = PagedRows.random(
        [*lens, 3], page_size=PAGE, kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32, device=device
    )
    size, live = len(lens) + 1, torch.tensor([len(lens)], dtype=torch.int32, device=device)
    q = torch.randn(size, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(device)
    before = torch.tensor([*lens, 3], dtype=torch.int32, device=device) - 1
    step, outs = attention(device, max_batch_size=8, max_pages_per_row=rows.table.shape[1]), []
    for hostile in (False, True):
        if hostile:
            q[-1] = math.nan
            before[-1] = 2**31 - 1
            rows.table[-1] = -(2**31)
        step.plan(before, live)
        out = torch.full_like(q, math.nan)
        step.run(out, q, rows.k_cache, rows.v_cache, rows.table)
        outs.append(out)
    assert torch.equal(*outs)
    assert (outs[0][-1] == 0).all()
    expected, _ = rows.expected(q, 1, Options(DIM**-0.5))
    torch.testing.assert_close(outs[0][:-1].double().cpu(), expected[:-1], atol=1e-5, rtol=1e-5)


def test_workspace_never_moves(device):
    step = attention(device)
    addresses = [tensor.data_ptr() for tensor in step.workspace]
    step.plan(torch.zeros(4, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device))
    assert [tensor.data_ptr() for tensor in step.workspace] == addresses


@pytest.mark.parametrize(
    ("change", "names"),
    [({"max_batch_size": 0}, "max_batch_size"), ({"page_size": 0}, "page_size"), ({"max_pages_per_row": 0}, "pages")],
)
def test_impossible_sizes_are_refused(change, names, device):
    with pytest.raises(ValueError, match=names):
        attention(device, **change)


def test_heads_must_divide(device):
    with pytest.raises(ValueError, match=r"num_qo_heads=5.*num_kv_heads=2"):
        PagedDecodeAttention(
            max_batch_size=1, num_qo_heads=5, num_kv_heads=2, head_dim=16, page_size=1, max_pages_per_row=1,
            dtype=torch.float32, device=device,
        )  # fmt: skip


def test_the_package_exports_its_names():
    for name in graphdecode.attention.__all__:
        assert getattr(graphdecode.attention, name).__doc__


merge_state_in_place_torch = versions("merge_state_in_place").torch
merge_states_torch = versions("merge_states").torch

ROWS, MERGED_HEADS, MERGED_DIM = 5, 3, 40


def states(count, device, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    v = torch.randn(ROWS, count, MERGED_HEADS, MERGED_DIM, generator=draw)
    s = 20 * torch.randn(ROWS, count, MERGED_HEADS, generator=draw)
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
    reference, expected_total = expected(v, s)
    close = 1e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(merged.double().cpu(), reference, atol=close, rtol=close)
    torch.testing.assert_close(total.double().cpu(), expected_total, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("version", [merge_states_triton, merge_states_torch])
def test_a_state_that_is_no_number_leaves_none(version, device):
    v, s = states(3, device)
    v[2, 1, 0], s[2, 1, 0] = math.nan, math.nan
    v[3, 0, 1, 7] = math.nan
    reference, expected_total = expected(v, s)
    reference[2, 0], expected_total[2, 0] = math.nan, math.nan
    reference[3, 1, 7] = math.nan
    merged, total = (
        torch.empty(ROWS, MERGED_HEADS, MERGED_DIM, device=device),
        torch.empty(ROWS, MERGED_HEADS, device=device),
    )
    version(merged, total, v, s)
    torch.testing.assert_close(merged.double().cpu(), reference, atol=1e-5, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(total.double().cpu(), expected_total, atol=1e-5, rtol=1e-5, equal_nan=True)
    version = merge_state_in_place_torch if version is merge_states_torch else merge_state_in_place_triton
    two, joined = v[:, 0].clone(), s[:, 0].clone()
    version(two, joined, v[:, 1].contiguous(), s[:, 1].contiguous(), None)
    assert two[2].isnan().all(-1).tolist() == joined[2].isnan().tolist() == [True, False, False]


def test_merge_state_is_merge_states_of_two(device):
    v, s = states(2, device)
    merged, total = merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    reference, expected_total = expected(v, s)
    torch.testing.assert_close(merged.double().cpu(), reference, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total.double().cpu(), expected_total, atol=1e-5, rtol=1e-5)


def test_merging_in_place_leaves_masked_rows_alone(device):
    v, s = states(2, device, seed=1)
    mine, sums = v[:, 0].contiguous(), s[:, 0].contiguous()
    before, sums_before = mine.clone(), sums.clone()
    mask = torch.tensor([True, False, True, False, True], device=device)
    merge_state_in_place(mine, sums, v[:, 1], s[:, 1], mask)
    reference, expected_total = expected(v, s)
    torch.testing.assert_close(mine[mask].double().cpu(), reference[mask.cpu()], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums[mask].double().cpu(), expected_total[mask.cpu()], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine[~mask], before[~mask], atol=0, rtol=0, equal_nan=True)
    assert torch.equal(sums[~mask], sums_before[~mask])
    merge_state_in_place(mine, sums, v[:, 1], s[:, 1])
    assert not torch.equal(mine[3], before[3])


def test_kernels_agree_with_the_torch_versions(device):
    v, s = states(4, device, seed=2)
    outs = [
        (torch.empty(ROWS, MERGED_HEADS, MERGED_DIM, device=device), torch.empty(ROWS, MERGED_HEADS, device=device))
        for _ in range(4)
    ]
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
    with pytest.raises(ValueError, match="the other state"):
        merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1, :1])
    with pytest.raises(ValueError, match="shape"):
        merge_state(v[:, 0], s[:, 0], v[:3, 1], s[:3, 1])
    with pytest.raises(ValueError, match="contiguous"):
        merge_state_in_place(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    with pytest.raises(ValueError, match="mask"):
        merge_state_in_place(v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1], s[:, 1], torch.ones(2, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "keys", "options"), [(1, 37, {}), (9, 9, {"is_causal": True}), (5, 23, {"mask": 1})]
)
def test_math_attention_equals_the_fused_operator(dtype, queries, keys, options):
    torch.manual_seed(0)
    q = torch.randn(2, 3, queries, 32).to(dtype)
    k, v = torch.randn(2, 2, 3, keys, 32).to(dtype)
    if "mask" in options:
        options = {"attn_mask": torch.randn(queries, keys).to(dtype)}
    fused, base = (attend(q, k, v, scale=0.2, **options) for attend in (flash_attention, math_attention))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(base, fused, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
