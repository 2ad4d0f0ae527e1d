"""Decode attention: every option against float64, in both versions; whatever the split, the batch and the padding."""

import math
import random

import pytest
import torch
from attention_oracle import Options
from compiled_kernels import compiled
from covering import pairwise, with_chunks
from paged_rows import DTYPES, PagedRows, tolerance

from graphdecode.kernels.attention.attention_plan import PlanSizes, plan_size, work_items
from graphdecode.kernels.attention.attention_plan import paged_attention_plan_triton as plan_triton
from graphdecode.kernels.attention.attention_records import AttentionOptions
from graphdecode.kernels.attention.attention_torch import Positions, to_float32
from graphdecode.kernels.attention.decode_attention import decode_attention_triton
from graphdecode.kernels.attention.work_item import SplitPlan
from graphdecode.kernels.native.instructions import instructions
from graphdecode.kernels.native.registration import versions

paged_attention_plan_torch = versions("paged_attention_plan").torch
decode_attention_torch = versions("decode_attention").torch


def decode_attention_native(*arguments):
    versions("decode_attention").native(*arguments)()


WAVE_ITEMS = 6
KINDS = DTYPES | {"bf16-e5m2": (torch.bfloat16, torch.float8_e5m2), "fp32-fp16": (torch.float32, torch.float16)}
KERNEL_DTYPES = ("fp16", "bf16", "fp32", "fp16-e4m3", "bf16-e5m2", "fp32-fp16", "bf16-int8", "fp32-int8")
CHOICES = {
    "dtype": KERNEL_DTYPES,
    "group": (1, 3, 5, 8),
    "kv_heads": (1, 2),
    "head_dim": (16, 64, 80, 96, 128),
    "page_size": (1, 3, 16),
    "layout": ("NHD", "HND", "joined"),
    "window_left": (-1, 0, 70),
    "soft_cap": (0.0, 3.0),
    "mode": ("NONE", "ROPE_LLAMA", "ALIBI"),
    "q_len": (1, 3),
    "lens": ((5, 0, 131, 16), (40,), (0, 7, 0, 260, 3, 0)),
    "fixed_split": (0, 64),
    "dense": (True, False),
    "v_scale": (1.0, 0.5),
    "sinks": (False, True),
}
KERNEL_CASES = with_chunks(pairwise(CHOICES))
NATIVE_CASES = with_chunks(
    pairwise(
        {
            "dtype": (
                "bf16",
                "fp32",
                "fp16",
                *(f"{q}-{kv}" for kv in ("int8", "e4m3") for q in ("bf16", "fp32", "fp16")),
            ),
            "group": (1, 3, 8),
            "kv_heads": (1, 2),
            "head_dim": (16, 64, 80, 128),
            "page_size": (1, 3, 16, 24),
            "window_left": (-1, 0, 70, 600),
            "soft_cap": (0.0, 3.0),
            "q_len": (1, 3, 5),
            "lens": ((511, 0, 512, 513), (1300,), (0, 7, 0, 260, 3, 0), (130, 1030)),
            "sinks": (False, True),
            "v_scale": (1.0, 0.5),
            "threads": (1, 3),
        }
    )
)


def scales_of(version, rows):
    """The scales as a version takes them: Triton's as one, the others one by one."""
    return (rows.scales,) if version is decode_attention_triton else rows.scales or (None, None)


def run(version, rows: PagedRows, q, options: Options, *, q_len=1, fixed_split=0, dense=False, lse=True):
    """Plan and attend with one version; workspaces start as NaN."""
    device, heads, value_dim = q.device, q.shape[1], rows.v_cache.shape[-1]
    count = len(rows.lens)
    items = work_items(count, WAVE_ITEMS, -(-max(rows.lens, default=1) // fixed_split) if fixed_split else 0)
    kv_lens = torch.full((count,), -7, dtype=torch.int32, device=device)
    plan = torch.full((plan_size(items),), -7, dtype=torch.int32, device=device)
    pages, page_size = rows.indices.shape[0], rows.k_cache.shape[1]
    planner = plan_triton if version is decode_attention_triton else paged_attention_plan_torch
    metadata = (kv_lens, plan, rows.indptr, rows.last_page_len)
    sizes = PlanSizes(WAVE_ITEMS, fixed_split, options.window_left, page_size, q_len)
    planner(*metadata, *((sizes,) if planner is plan_triton else (*sizes, pages)))
    assert version is decode_attention_torch or plan[0].item() <= items
    counters = torch.zeros(count * q_len * heads, dtype=torch.int32, device=device)
    out = torch.full((*q.shape[:2], value_dim), math.nan, dtype=q.dtype, device=device)
    sums = torch.full(q.shape[:2], math.nan, device=device) if lse else None
    sinks = None if options.sinks is None else options.sinks.to(device)
    arguments = (options.sm_scale, options.window_left, options.soft_cap, sinks, options.is_chunked)
    partial = torch.full((items, q_len, heads, value_dim), math.nan, device=device)
    sums_of_splits = torch.full((items, q_len, heads, 2), math.nan, device=device)
    work, positions = (
        (kv_lens, plan, partial, sums_of_splits, counters),
        (options.mode, options.rope_scale, options.rope_theta),
    )
    if version is decode_attention_triton:
        work, arguments, positions = (SplitPlan(*work),), (AttentionOptions(*arguments),), (Positions(*positions),)
    version(
        out,
        sums,
        q,
        rows.k_cache,
        rows.v_cache,
        rows.table if dense else rows.indices,
        None if dense else rows.indptr,
        *work,
        q_len,
        items,
        *arguments,
        options.v_scale,
        *positions,
        *scales_of(version, rows),
    )
    assert not counters.any(), "the next launch counts from 0"
    return out, sums


def check(version, case: dict, device: str, seed: int) -> None:
    q_dtype, kv_dtype = KINDS[case["dtype"]]
    lens, q_len, head_dim = list(case["lens"]), case["q_len"], case["head_dim"]
    rows = PagedRows.random(
        lens,
        page_size=case["page_size"],
        kv_heads=case["kv_heads"],
        head_dim=head_dim,
        value_dim=case.get("value_dim"),
        is_latent=case.get("is_latent", False),
        is_in_parts=case.get("is_in_parts", False),
        dtype=kv_dtype,
        layout=case["layout"],
        device=device,
        seed=seed,
    )
    draw = torch.Generator().manual_seed(seed + 1)
    sinks = 2 * torch.randn(case["kv_heads"] * case["group"], generator=draw) if case["sinks"] else None
    options = Options(
        head_dim**-0.5, case["v_scale"], case["window_left"], case["soft_cap"], case["mode"], 2.0, 1e4, sinks,
        case.get("is_chunked", False),
    )  # fmt: skip
    q = torch.randn(len(lens) * q_len, case["kv_heads"] * case["group"], head_dim, generator=draw).to(q_dtype)
    out, lse = run(
        version,
        rows,
        q.to(device),
        options,
        q_len=q_len,
        fixed_split=case["fixed_split"],
        dense=case["dense"],
        lse=version is not decode_attention_native,
    )
    expected, expected_lse = rows.expected(q, q_len, options)
    close = tolerance(q_dtype, kv_dtype)
    torch.testing.assert_close(out.double().cpu(), expected, atol=close, rtol=close)
    if lse is not None:
        torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=close, rtol=close)


VERSIONS = [decode_attention_triton, decode_attention_torch, pytest.param(decode_attention_native, marks=compiled)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("where", ["query", "last key", "every key", "value"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16-e4m3"])
@pytest.mark.parametrize("length", [5, 200, 1100])
def test_nan_stays_in_its_rows(version, where, dtype, length, device):
    if version is decode_attention_triton and length > 200:
        pytest.skip("a thousand keys take the interpreter a minute")
    device = device if version is decode_attention_triton else "cpu"
    q_dtype, kv_dtype = KINDS[dtype]
    lens = [20, length, 7]
    rows = PagedRows.random(lens, page_size=16, kv_heads=2, head_dim=64, dtype=kv_dtype, device=device)
    q = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(6)).to(q_dtype).to(device)
    has_lse = version is not decode_attention_native
    clean, clean_lse = run(version, rows, q, Options(0.125), dense=True, lse=has_lse)
    out_lost, lse_lost = torch.zeros(3, 4, 64, dtype=torch.bool), torch.zeros(3, 4, dtype=torch.bool)
    pages = rows.table[1].tolist()
    at = {"last key": [length - 1], "every key": range(length)}.get(where, [0])
    if where == "query":
        q[1, 3, 5] = math.nan
        out_lost[1, 3] = lse_lost[1, 3] = True
    else:
        cache = rows.v_cache if where == "value" else rows.k_cache
        for key in at:
            cache[pages[key // 16], key % 16, 1, 9] = math.nan
        out_lost[1, 2:, 9 if where == "value" else slice(None)] = True
        lse_lost[1, 2:] = where != "value"
    out, lse = run(version, rows, q, Options(0.125), dense=True, lse=has_lse)
    if version is decode_attention_native and dtype == "bf16" and instructions().name == "amx":
        # tiles multiply features in pairs, and all heads of a key together: more may be lost, of the same row
        assert out.isnan()[out_lost].all()
        out_lost[1] |= out[1].isnan()
    assert torch.equal(out.isnan().cpu(), out_lost)
    assert torch.equal(out.cpu()[~out_lost], clean.cpu()[~out_lost])
    if has_lse:
        assert torch.equal(lse.isnan().cpu(), lse_lost)
        assert torch.equal(lse.cpu()[~lse_lost], clean_lse.cpu()[~lse_lost])


@pytest.mark.parametrize("number", range(len(KERNEL_CASES)))
def test_kernel_agrees_with_float64_on_every_pair_of_options(number, device):
    check(decode_attention_triton, KERNEL_CASES[number], device, seed=number)


@pytest.mark.parametrize("number", range(len(KERNEL_CASES)))
def test_torch_version_agrees_with_float64_on_every_pair_of_options(number):
    check(decode_attention_torch, KERNEL_CASES[number], "cpu", seed=number)


@compiled
@pytest.mark.parametrize("number", range(len(NATIVE_CASES)))
def test_compiled_kernel_agrees_with_float64_on_every_pair_of_options(number):
    case = NATIVE_CASES[number]
    torch.set_num_threads(case["threads"])
    arguments = {"layout": "NHD", "mode": "NONE", "fixed_split": 0, "dense": True}
    check(decode_attention_native, arguments | case, "cpu", number)


@pytest.mark.parametrize("seed", range(60))
def test_torch_version_agrees_with_float64_on_wider_cases(seed):
    draw = random.Random(seed)
    wide = {
        **CHOICES,
        "group": (1, 2, 3, 5, 7, 8, 16),
        "head_dim": (16, 24, 80, 128, 256, 512),
        "page_size": (1, 5, 16, 128),
    }
    case = {name: draw.choice(values) for name, values in wide.items()}
    case["lens"] = [draw.choice((0, 1, 15, 16, 17, 64, 300, 777)) for _ in range(draw.randint(1, 5))]
    check(decode_attention_torch, case, "cpu", seed)


@pytest.mark.parametrize("group", [64, 7])
@pytest.mark.parametrize("q_len", [1, 4])
def test_kernel_takes_large_groups_in_several_tiles(group, q_len, device):
    case = {name: values[0] for name, values in CHOICES.items()}
    case |= {"dtype": "fp32", "group": group, "q_len": q_len, "head_dim": 64, "lens": (33, 5), "dense": True}
    check(decode_attention_triton, case, device, seed=1)


@pytest.mark.parametrize("version", [decode_attention_triton, decode_attention_torch])
def test_values_may_have_another_head_dim_than_keys(version, device):
    case = {name: values[0] for name, values in CHOICES.items()}
    case |= {"dtype": "fp32", "head_dim": 96, "value_dim": 40}
    check(version, case, device if version is decode_attention_triton else "cpu", seed=2)


LATENT = {"kv_heads": 1, "is_latent": True, "layout": "NHD", "mode": "NONE", "v_scale": 1.0, "dense": True}
LATENT_CASES = [
    {"dtype": "bf16", "group": 16, "head_dim": 96, "value_dim": 64, "page_size": 16, "q_len": 1, "lens": (40, 0, 200)},
    {"dtype": "fp32", "group": 5, "head_dim": 80, "value_dim": 48, "page_size": 3, "q_len": 3, "lens": (131,)},
    {"dtype": "fp16", "group": 8, "head_dim": 64, "value_dim": 32, "page_size": 8, "q_len": 1, "lens": (5, 70)},
    {"dtype": "fp32", "group": 4, "head_dim": 40, "value_dim": 32, "page_size": 8, "q_len": 1, "lens": (5, 70)},
    {"dtype": "bf16-e4m3", "group": 8, "head_dim": 96, "value_dim": 64, "page_size": 5, "q_len": 2, "lens": (33, 70)},
    {"dtype": "bf16", "group": 20, "head_dim": 576, "value_dim": 512, "page_size": 16, "q_len": 1, "lens": (1100, 33)},
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("is_in_parts", [False, True])
@pytest.mark.parametrize("number", range(len(LATENT_CASES)))
def test_values_may_be_the_last_channels_of_latent_keys(version, is_in_parts, number, device):
    case = LATENT | LATENT_CASES[number] | {"window_left": -1 + 8 * (number % 2), "soft_cap": 0.0, "fixed_split": 0}
    case |= {"is_in_parts": is_in_parts, "dense": not is_in_parts}
    if version is decode_attention_native and (case["head_dim"] - case["value_dim"]) % 32:
        pytest.skip("compiled kernels take whole vectors")
    if version is decode_attention_triton and case["head_dim"] > 512:
        case |= {"lens": (70, 33)}
    check(version, case | {"sinks": number == 1}, device if version is decode_attention_triton else "cpu", number)


@pytest.mark.parametrize("version", [decode_attention_triton, decode_attention_torch])
def test_queries_may_be_strided(version, device):
    device = device if version is decode_attention_triton else "cpu"
    rows = PagedRows.random([9, 30], page_size=4, kv_heads=2, head_dim=32, dtype=torch.float32, device=device)
    q = torch.randn(2, 3, 4, 32, generator=torch.Generator().manual_seed(3)).to(device)[:, 1]
    out, _ = run(version, rows, q, Options(0.2))
    expected, _ = rows.expected(q.cpu(), 1, Options(0.2))
    torch.testing.assert_close(out.double().cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("version", [decode_attention_triton, decode_attention_torch])
def test_a_row_does_not_depend_on_its_pages(version, device):
    """The law of padding in small: where a row's tokens stand is not part of its answer."""
    device = device if version is decode_attention_triton else "cpu"
    rows = PagedRows.random([61], page_size=4, kv_heads=2, head_dim=64, dtype=torch.float32, device=device)
    q = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(4)).to(device)
    scattered, _ = run(version, rows, q, Options(0.125))
    part = rows.indices.long()
    pages = len(part)
    side_by_side = PagedRows.random([61], page_size=4, kv_heads=2, head_dim=64, dtype=torch.float32, device=device)
    side_by_side.k_cache[:pages] = rows.k_cache[part]
    side_by_side.v_cache[:pages] = rows.v_cache[part]
    side_by_side.indices = torch.arange(pages, dtype=torch.int32, device=device)
    viewed, _ = run(version, side_by_side, q, Options(0.125))
    assert torch.equal(scattered, viewed)


@pytest.mark.parametrize("lens", [[300], [300, 5, 0, 700, 129]])
def test_fixed_splits_make_a_row_independent_of_the_batch(lens, device):
    rows = PagedRows.random(lens, page_size=16, kv_heads=1, head_dim=16, dtype=torch.float32, device=device, seed=7)
    q = torch.randn(len(lens), 2, 16, generator=torch.Generator().manual_seed(5)).to(device)
    together, sums = run(decode_attention_triton, rows, q, Options(0.25), fixed_split=128)
    for row, length in enumerate(lens):
        begin, end = rows.indptr[row].item(), rows.indptr[row + 1].item()
        alone = PagedRows(
            rows.k_cache,
            rows.v_cache,
            rows.table[row : row + 1],
            rows.indices[begin:end],
            rows.indptr[row : row + 2] - begin,
            rows.last_page_len[row : row + 1],
            [length],
            rows.keys[row : row + 1],
            rows.values[row : row + 1],
        )
        out, lse = run(decode_attention_triton, alone, q[row : row + 1], Options(0.25), fixed_split=128)
        assert torch.equal(out[0], together[row])
        assert torch.equal(lse[0], sums[row])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_widened_exactly_for_every_byte(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    torch.testing.assert_close(to_float32(every), every.float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("length", [5000, 20000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_that_are_widened_in_pieces_agree_with_float64(length, dtype):
    rows = PagedRows.random([length], page_size=64, kv_heads=2, head_dim=64, dtype=dtype)
    q_dtype = torch.float16 if dtype.itemsize == 1 else dtype
    q = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(9)).to(q_dtype)
    out, lse = run(decode_attention_torch, rows, q, Options(0.5))
    expected, expected_lse = rows.expected(q, 1, Options(0.5))
    close = tolerance(q_dtype, dtype)
    torch.testing.assert_close(out.double(), expected, atol=close, rtol=close)
    torch.testing.assert_close(lse.double(), expected_lse, atol=close, rtol=close)


@pytest.mark.parametrize("mode", ["NONE", "ALIBI"])
def test_a_row_of_many_splits_is_merged(mode, device):
    rows = PagedRows.random([3000, 0, 700], page_size=64, kv_heads=1, head_dim=16, dtype=torch.float32, device=device)
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(11)).to(device)
    options = Options(2.0, mode=mode)
    out, lse = run(decode_attention_triton, rows, q, options, fixed_split=128)
    expected, expected_lse = rows.expected(q, 1, options)
    torch.testing.assert_close(out.double().cpu(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=1e-4, rtol=1e-4)
