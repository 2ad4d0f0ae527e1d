"""Append and attention in one launch: against float64, and against the operators that it joins."""

import math
import os

import numpy as np
import pytest
import torch
from attention_oracle import Options, attend
from compiled_kernels import NATIVE, compiled
from covering import pairwise, with_chunks
from key_mixing import mixing
from paged_rows import DTYPES, int8_codes, tolerance

from graphdecode.attention import PagedDecodeAttention, QKNormRope
from graphdecode.cache import CacheScales
from graphdecode.kernels.attention import append_attention, extend_attention  # noqa: F401 - registers them
from graphdecode.kernels.attention import append_attention as append_attention_module
from graphdecode.kernels.attention.append_attention import append_attention_triton
from graphdecode.kernels.attention.attention_plan import PlanSizes, attention_plan_triton, plan_size, work_items
from graphdecode.kernels.attention.attention_records import AttentionOptions
from graphdecode.kernels.attention.attention_torch import Positions
from graphdecode.kernels.attention.decode_attention import decode_attention_triton
from graphdecode.kernels.attention.work_item import SplitPlan
from graphdecode.kernels.cache.kv_format import PageScales
from graphdecode.kernels.cache.rope_append import rope_append_triton
from graphdecode.kernels.native.registration import versions

append_attention_torch = versions("append_attention").torch
append_attention_native = versions("append_attention").native

WAVE_ITEMS, EPS, POSITIONS = 6, 1e-5, 512
UNITS = {torch.float8_e4m3fn: (0.03, 0.25)}  # what divides keys and values
CHOICES = {
    "dtype": tuple(DTYPES),
    "group": (1, 3, 8),
    "kv_heads": (1, 2),
    "head_dim": (16, 64, 80),
    "rotated": (1.0, 0.5, 0.0),
    "norm": ("", "of each head", "of all heads"),
    "page_size": (1, 3, 16),
    "window_left": (-1, 0, 70),
    "soft_cap": (0.0, 3.0),
    "sinks": (False, True),
    # the first token of a row, the first of a page, the first of a tile and of a split; more rows than a wave
    "lens": ((1, 17, 131), (129, 64), (5, 200, 2, 1, 4, 65, 3)),
    "padding": (0, 2),
}
CASES = with_chunks(pairwise(CHOICES))
NATIVE_CASES = with_chunks(pairwise({**CHOICES, "head_dim": (16, 64, 128), "lens": (*CHOICES["lens"], (500,))}))


def takes_whole(version):
    """Whether a version takes scales as one argument, as Triton's do; the others take them one by one."""
    return version in (append_attention_triton, two_launches)


def as_integers(cache):
    """The cache itself, as bytes where torch cannot index its type."""
    return cache.view(torch.uint8) if cache.itemsize == 1 else cache


def normed(heads, weight):
    """RMSNorm of heads [n, d] in float64, of each by itself or of all together, as the weight is long."""
    if weight is None:
        return heads
    together = heads.view(1, -1) if len(weight) > heads.shape[1] else heads
    scale = 1.0 / (together.square().mean(-1, keepdim=True) + EPS).sqrt()
    return (together * scale * weight.double()).view(heads.shape)


def turned(heads, angles):
    """Heads [n, d] rotated half-split by angles [2, rot / 2], as complex numbers."""
    half = angles.shape[-1]
    pairs = torch.complex(heads[:, :half], heads[:, half : 2 * half]) * torch.complex(*angles.double())
    return torch.cat([pairs.real, pairs.imag, heads[:, 2 * half :]], dim=-1)


class Problem:
    """Rows about to be given a token each, over pages whose unused places hold NaN."""

    def __init__(self, case, device, seed):
        draw = torch.Generator().manual_seed(seed)
        self.case, self.device, self.lens = case, device, list(case["lens"])
        (self.dtype, self.kv_dtype), dim, kv_heads = DTYPES[case["dtype"]], case["head_dim"], case["kv_heads"]
        self.heads = kv_heads * case["group"]
        self.rows = len(self.lens) + case["padding"]
        page_size, most = case["page_size"], max(self.lens)
        width = -(-most // page_size)
        pages = width * len(self.lens) + 1
        half = int(dim * case["rotated"]) // 2
        self.angles = torch.rand(POSITIONS, half, generator=draw) * 6
        self.cos_sin = torch.stack([self.angles.cos(), self.angles.sin()], dim=1)
        counts = (self.heads, kv_heads) if case["norm"] == "of all heads" else (1, 1)
        gains = [1 + 0.3 * torch.randn(count * dim, generator=draw) for count in counts]
        self.gains = gains if case["norm"] else [None, None]
        self.sinks = 2 * torch.randn(self.heads, generator=draw) if case["sinks"] else None
        self.qkv = torch.randn(self.rows, (self.heads + 2 * kv_heads) * dim, generator=draw)
        if seed % 2:  # of the others, products give float32
            self.qkv = self.qkv.to(self.dtype)
        self.table = torch.full((self.rows, width), pages - 1, dtype=torch.int32)
        order = torch.randperm(pages - 1, generator=draw).to(torch.int32)
        shape = (pages, page_size, kv_heads, dim)
        empty = -127 if self.kv_dtype == torch.int8 else math.nan
        self.caches = [torch.full(shape, empty).to(self.kv_dtype) for _ in range(2)]
        self.scales = [torch.full((pages, kv_heads, page_size), math.nan).to(torch.bfloat16) for _ in range(2)]
        self.units = UNITS.get(self.kv_dtype, (1.0, 1.0))
        self.old = []
        for row, length in enumerate(self.lens):
            self.table[row] = order[row * width : (row + 1) * width]
            at = torch.arange(length - 1)
            positions = self.table[row, at // page_size].long(), at % page_size
            self.old.append([])
            for drawn, cache, scales, unit in zip(
                torch.randn(2, length - 1, kv_heads, dim, generator=draw),
                self.caches,
                self.scales,
                self.units,
                strict=True,
            ):
                codes, part = self.stored(drawn, unit)
                as_integers(cache)[positions] = as_integers(codes.to(self.kv_dtype))
                scales[positions[0], :, positions[1]] = part[..., 0].to(torch.bfloat16)
                self.old[-1].append(codes.double() * part)
        self.options = Options(
            dim**-0.5, window_left=case["window_left"], soft_cap=case["soft_cap"], sinks=self.sinks,
            is_chunked=case.get("is_chunked", False),
        )  # fmt: skip

    def stored(self, x, unit):
        """Return what is kept of heads [..., d], and what it is multiplied with."""
        if self.kv_dtype == torch.int8:
            return int8_codes(x)
        codes = (x.double() / unit).clamp(-448, 448) if self.kv_dtype.itemsize == 1 else x
        return codes.float().to(self.kv_dtype), torch.full((*x.shape[:-1], 1), unit).double()

    def widened(self, caches, scales):
        """Return the caches as numbers, in float64."""
        if self.kv_dtype == torch.int8:
            return [
                codes.double() * part.double().transpose(1, 2)[..., None]
                for codes, part in zip(caches, scales, strict=True)
            ]
        return [codes.double() * unit for codes, unit in zip(caches, self.units, strict=True)]

    def expected(self):
        """Return output, and the caches, in float64."""
        dim, kv_heads = self.case["head_dim"], self.case["kv_heads"]
        out = torch.zeros(self.rows, self.heads, dim, dtype=torch.float64)
        caches = self.widened(self.caches, self.scales)
        for row, length in enumerate(self.lens):
            q, k, v = self.qkv[row].double().view(-1, dim).split((self.heads, kv_heads, kv_heads))
            q, k = (turned(normed(x, w), self.cos_sin[length - 1]) for x, w in zip((q, k), self.gains, strict=True))
            if self.kv_dtype == torch.int8:
                q, k = q @ mixing(dim), k @ mixing(dim)
            saved = [self.stored(x, unit) for x, unit in zip((k, v), self.units, strict=True)]
            new = [codes.double() * unit for codes, unit in saved]
            for cache, entry in zip(caches, new, strict=True):
                position = self.table[row, (length - 1) // self.case["page_size"]]
                cache[position, (length - 1) % self.case["page_size"]] = entry
            keys, values = (torch.cat([old.double(), x[None]]) for old, x in zip(self.old[row], new, strict=True))
            out[row] = attend(q.to(self.dtype)[None], keys, values, self.options)[0]
        return out, caches

    def plan(self, fixed_split=0, window_left=-1):
        """Return lengths and plan, as a GPU makes them, what both are sized for, and a workspace full of NaN."""
        items = work_items(self.rows, WAVE_ITEMS, -(-max(self.lens) // fixed_split) if fixed_split else 0)
        lens = torch.full((self.rows,), 2**31 - 1, dtype=torch.int32)
        lens[: len(self.lens)] = torch.tensor(self.lens, dtype=torch.int32) - 1
        live = torch.tensor([len(self.lens)], dtype=torch.int32)
        kv_lens, plan = torch.zeros(self.rows, dtype=torch.int32), torch.full((plan_size(items),), 2**30)
        tensors = [tensor.to(self.device).to(torch.int32) for tensor in (kv_lens, plan, lens, live)]
        attention_plan_triton(*tensors, PlanSizes(WAVE_ITEMS, fixed_split, window_left))
        dim = self.case["head_dim"]
        partial = torch.full((items, 1, self.heads, dim), math.nan, device=self.device)
        sums = torch.full((items, 1, self.heads, 2), math.nan, device=self.device)
        counters = torch.zeros(self.rows * self.heads, dtype=torch.int32, device=self.device)
        return tensors[0], tensors[1], items, (partial, sums, counters)

    def run(self, version, fixed_split=0, plan_window=-1):
        """Return output and caches of one version."""
        kv_lens, plan, items, workspace = self.plan(fixed_split, plan_window)
        out = torch.full((self.rows, self.heads, self.case["head_dim"]), math.nan, dtype=self.dtype)
        arguments = (out, *(cache.clone() for cache in self.caches), self.qkv, self.table)
        arguments = [tensor.to(self.device) for tensor in arguments]
        constants = [None if t is None else t.to(self.device) for t in (self.cos_sin, *self.gains)]
        scales = [part.clone().to(self.device) for part in self.scales] if self.kv_dtype == torch.int8 else [None, None]
        sinks = None if self.sinks is None else self.sinks.to(self.device)
        of_layer = self.options
        options = (of_layer.sm_scale, of_layer.window_left, of_layer.soft_cap, sinks, of_layer.is_chunked)
        options = (AttentionOptions(*options),) if takes_whole(version) else options
        of_pages = (PageScales(*scales) if scales[0] is not None else None,) if takes_whole(version) else scales
        work, rope = (kv_lens, plan, *workspace), (*constants, EPS)
        if takes_whole(version):
            work, rope = (SplitPlan(*work),), (QKNormRope(*rope),)
        version(*arguments, *work, *rope, items, *options, *self.units, *of_pages)
        assert not workspace[-1].any(), "the next launch counts from 0"
        return arguments[0].cpu(), self.widened(
            *([x.cpu() for x in some if x is not None] for some in (arguments[1:3], scales))
        )

    def check(self, version, **split):
        out, caches = self.run(version, **split)
        expected, expected_caches = self.expected()
        # a key that was rounded the other way is an eighth of itself away
        close = 0.1 if self.kv_dtype.itemsize == 1 else tolerance(self.dtype, self.dtype)
        torch.testing.assert_close(out.double(), expected, atol=close, rtol=close)
        steps = {
            torch.float32: 1e-5,
            torch.float16: 2e-3,
            torch.bfloat16: 2e-2,
            torch.float8_e4m3fn: 0.13,
            torch.int8: 0.03,
        }
        one_step = steps[self.kv_dtype]
        for cache, reference in zip(caches, expected_caches, strict=True):
            torch.testing.assert_close(cache.double(), reference, atol=one_step, rtol=one_step, equal_nan=True)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_kernel_agrees_with_float64_on_every_pair_of_options(number, device):
    case = CASES[number]
    split = {"fixed_split": 64} if number % 3 == 0 else {"plan_window": case["window_left"] if number % 3 == 1 else -1}
    is_int8 = case["dtype"].endswith("int8")
    Problem(case, device, number).check(two_launches if is_int8 else append_attention_triton, **split)


def two_launches(out, k_cache, v_cache, qkv, table, work, rope, items, options, *others):
    """`append_attention` as an append and an attention."""
    kv_lens, scales = work.kv_lens, others[-1]
    q, at = torch.empty_like(out), torch.arange(len(out), dtype=torch.int32, device=out.device)
    live = (kv_lens[: len(out)] > 0).sum().to(torch.int32).view(1)
    rope_append_triton(q, k_cache, v_cache, qkv, at, kv_lens - 1, live, table, rope, scales=scales)
    decode_attention_triton(
        out, None, q, k_cache, v_cache, table, None, work, 1, items, options, 1.0, Positions(), scales
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_launches_over_an_int8_cache_equal_one(dtype, monkeypatch):
    """As a GPU has it, with the operators of the processor that is here."""
    draw = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, page, rows = 6, 2, 64, 4, 3
    sizes = {"page_size": page, "max_pages_per_row": 5, "dtype": dtype, "kv_dtype": torch.int8, "device": "cpu"}
    lens, live = torch.tensor([0, 7, 19], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    table = torch.randperm(15, generator=draw).view(rows, 5).to(torch.int32)
    angles = torch.rand(20, dim // 2, generator=draw)
    turn = QKNormRope(torch.stack([angles.cos(), angles.sin()], dim=1))
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=draw).to(dtype)
    codes = torch.randint(-127, 128, (2, 16, page, kv_heads, dim), generator=draw).to(torch.int8)
    result = []
    for is_separate in (False, True):
        monkeypatch.setattr(PagedDecodeAttention, "SEPARATE_APPEND_DEVICES", {"cpu"} if is_separate else set())
        attention = PagedDecodeAttention(
            max_batch_size=rows, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim, **sizes
        )
        scales = PageScales(*torch.full((2, 16, kv_heads, page), 0.01, dtype=torch.bfloat16))
        keys, values = codes.clone()
        attention.plan(lens, live)
        out = torch.empty(rows, heads, dim, dtype=dtype)
        attention.append_and_run(out, qkv, keys, values, table, turn, scales=CacheScales(pages=scales))
        result.append((out, keys, values, *scales))
    for one, two in zip(*result, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_torch_version_agrees_with_float64_on_every_pair_of_options(number):
    Problem(CASES[number], "cpu", number).check(append_attention_torch)


@compiled
@pytest.mark.parametrize("number", range(len(NATIVE_CASES)))
def test_compiled_version_agrees_with_float64_on_every_pair_of_options(number):
    def run(*arguments):
        append_attention_native(*arguments)()

    Problem(NATIVE_CASES[number], "cpu", number).check(run)


BASE = {
    "dtype": "fp32", "group": 4, "kv_heads": 2, "head_dim": 64, "rotated": 1.0, "norm": "of each head",
    "page_size": 16, "window_left": -1, "soft_cap": 0.0, "sinks": False,
    "lens": (200, 129, 1), "padding": 1,
}  # fmt: skip


@pytest.mark.parametrize("window_left", [-1, 66])
def test_one_launch_equals_append_and_attention(window_left, device):
    problem = Problem({**BASE, "window_left": window_left}, device, 3)
    together, caches = problem.run(append_attention_triton)

    expected, expected_caches = problem.run(two_launches)
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)
    for cache, reference in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache[:-1], reference[:-1], atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("version", ["triton", "torch", NATIVE])
def test_hostile_padding_changes_no_bit_of_a_live_row_or_page(version, device):
    """Law 4: rows past the live ones may hold anything, and come out as 0."""
    if version != "triton" and device == "cuda":
        pytest.skip("the plan is made by Triton's kernel, which does not read a CPU's tensors there")
    run = {
        "triton": append_attention_triton,
        "torch": append_attention_torch,
        "native": lambda *arguments: append_attention_native(*arguments)(),
    }[version]
    results = []
    for hostile in (False, True):
        problem = Problem({**BASE, "padding": 2}, device if version == "triton" else "cpu", 5)
        if hostile:
            problem.qkv[len(problem.lens) :] = math.nan
            problem.table[len(problem.lens) :] = -(2**31)
        results.append(problem.run(run))
    (out, caches), (hostile_out, hostile_caches) = results
    assert torch.equal(out, hostile_out)
    assert not out[-2:].any()
    for cache, other in zip(caches, hostile_caches, strict=True):
        torch.testing.assert_close(cache, other, atol=0, rtol=0, equal_nan=True)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="watches what the interpreter asks for")
def test_prefetch_reads_each_line_of_live_rows_once_and_no_other(monkeypatch):
    """Programs without work, and places past a row's last older key, would all ask for page 0."""
    problem, prefetched = Problem({**BASE, "padding": 2}, "cpu", 5), []

    def prefetch(positions, is_active):
        expected = np.broadcast_to(is_active.handle.data.astype(bool), positions.handle.data.shape)
        prefetched.extend(positions.handle.data[expected].tolist())

    monkeypatch.setattr(append_attention_module, "early_start_options", lambda _: {"PDL": True})
    monkeypatch.setattr(append_attention_module, "wait_and_trigger", lambda: None)
    monkeypatch.setattr(append_attention_module, "prefetch", prefetch)
    caches = [None, None]

    def version(*arguments):
        caches[:] = arguments[1:3]
        append_attention_triton(*arguments)

    monkeypatch.setitem(globals(), "takes_whole", lambda _: True)
    problem.run(version)
    allowed = set()
    for cache in caches:
        page_bytes, token_bytes = cache.stride(0) * cache.itemsize, cache.stride(1) * cache.itemsize
        for row, length in enumerate(problem.lens):
            for at in range(length - 1):
                page = int(problem.table[row, at // problem.case["page_size"]])
                begin = cache.data_ptr() + page * page_bytes + at % problem.case["page_size"] * token_bytes
                allowed |= set(range(begin, begin + token_bytes))
    assert prefetched
    assert set(prefetched) <= allowed
    assert len(set(prefetched)) == len(prefetched)


def test_a_group_larger_than_a_tile_appends_one_token(device):
    Problem({**BASE, "group": 70, "kv_heads": 1, "head_dim": 16, "lens": (70, 1)}, device, 7).check(
        append_attention_triton
    )


PAGE, PAGES, WINDOW = 16, 6, 20
NULL_PAGE = PAGES  # full of NaN


def run(operator: str, version: str, *arguments: object) -> None:
    call = getattr(versions(operator), version)(*arguments)
    if call is not None:  # the version in C returns what is to be called
        call()


@pytest.mark.parametrize("version", ["torch", "native", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [PAGE * PAGES, PAGE * PAGES - 9])
@pytest.mark.parametrize("queries", [1, 10])
def test_pages_out_of_sight_are_not_read(version: str, dtype: torch.dtype, length: int, queries: int) -> None:
    generator = torch.Generator().manual_seed(length)
    keys, values = (torch.randn(PAGES + 1, PAGE, 1, 32, generator=generator).to(dtype) for _ in range(2))
    keys[NULL_PAGE] = values[NULL_PAGE] = torch.nan
    q = torch.randn(queries, 2, 32, generator=generator).to(dtype)
    options = AttentionOptions(0.2, WINDOW).scaled(32)
    first = (length - queries - WINDOW) // PAGE  # page that the first query sees
    table = torch.arange(PAGES, dtype=torch.int32)[None]
    cut = table.clone()
    cut[:, :first] = NULL_PAGE
    assert first >= 3
    result = []
    for pages in (table, cut):
        out = torch.zeros_like(q)
        ends_q, ends_kv = (torch.tensor([0, end], dtype=torch.int32) for end in (queries, length))
        arguments = (out, None, q, keys, values, ends_q, ends_kv, pages, *options, 1.0, None, None)
        run("extend_attention", version, *arguments)
        result.append(out)
    if version == "native" and not result[0].any():
        pytest.skip("no compiled kernels")
    assert result[0].any()
    assert result[0].isfinite().all()
    assert torch.equal(*result)
    one = []
    plan = torch.tensor([1, 0, 0, 0, 0, 0, 1, length], dtype=torch.int32)
    turn = torch.stack([torch.ones(128, 4), torch.zeros(128, 4)], 1)
    qkv = torch.cat([q[-1].flatten(), torch.ones(64, dtype=dtype)])[None]
    for pages in (table, cut):
        out, caches = torch.zeros_like(q[-1:]), (keys.clone(), values.clone())
        workspace = torch.zeros(1, 1, 2, 32), torch.zeros(1, 1, 2), torch.zeros(2, dtype=torch.int32)
        ends = torch.tensor([length], dtype=torch.int32)
        arguments = (out, *caches, qkv, pages, ends, plan, *workspace, turn, None, None, 0.0, 1, *options, 1.0, 1.0)
        run("append_attention", version, *arguments, None, None)
        one.append(out)
    assert one[0].any()
    assert one[0].isfinite().all()
    assert torch.equal(*one)
