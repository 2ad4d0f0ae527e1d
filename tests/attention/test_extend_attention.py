"""Extend attention: ragged, causal from the bottom right, over pages or contiguous rows, in every format."""

import math
from collections import OrderedDict

import pytest
import torch
from attention_oracle import Options, attend
from compiled_kernels import compiled
from covering import pairwise, with_chunks
from paged_rows import DTYPES, PagedRows, tolerance

from graphdecode import InferenceParams
from graphdecode.attention import cached_attention
from graphdecode.kernels.attention.attention_records import AttentionOptions
from graphdecode.kernels.attention.extend_attention import extend_attention_triton
from graphdecode.kernels.cache.kv_format import PageScales
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.registration import versions

extend_attention_torch = versions("extend_attention").torch
native_extend_attention = versions("extend_attention").native

CHOICES = {
    "dtype": ("fp16", "bf16", "fp32", "fp16-e4m3", "bf16-int8", "fp32-int8"),
    "group": (1, 3, 8),
    "kv_heads": (1, 2),
    "head_dim": (16, 64, 80, 128),
    "page_size": (1, 3, 16, 0),  # 0: contiguous rows
    "layout": ("NHD", "HND"),
    "window_left": (-1, 0, 9),
    "soft_cap": (0.0, 3.0),
    "packed": (True, False),
    "q_lens": ((5, 0, 9, 1), (20,), (1, 1, 17)),
    "before": (0, 1, 33),
    "sinks": (False, True),
}
CASES = with_chunks(pairwise(CHOICES))
NATIVE_CASES = with_chunks(
    pairwise(
        {
            **CHOICES,
            "dtype": tuple(DTYPES),
            "page_size": (1, 3, 16),
            "layout": ("NHD",),
            "packed": (True,),
            "window_left": (-1, 0, 9, 40),
            "q_lens": ((5, 0, 9, 1), (20,), (1, 1, 17), (70, 33)),
            "before": (0, 1, 33, 200),
        }
    )
)


def as_arguments(version, options, v_scale, scales):
    """Return a version's last arguments: records, or what the dispatcher makes of them."""
    if version is extend_attention_triton:
        return AttentionOptions(*options), v_scale, scales
    return *options, v_scale, *(scales or (None, None))


def check(version, case, device, seed, with_lse=True):
    q_dtype, kv_dtype = DTYPES[case["dtype"]]
    q_lens = list(case["q_lens"])
    lens = [n + case["before"] * (row + 1) if n else 0 for row, n in enumerate(q_lens)]
    contiguous = case["page_size"] == 0
    shape = {"kv_heads": case["kv_heads"], "head_dim": case["head_dim"], "dtype": kv_dtype, "device": device}
    shape |= {"value_dim": case.get("value_dim"), "is_latent": "value_dim" in case}
    shape |= {"is_in_parts": case.get("is_in_parts", False)}
    rows = PagedRows.random(
        lens, page_size=max(lens) + 2 if contiguous else case["page_size"], layout=case["layout"], seed=seed, **shape
    )
    k_cache, v_cache, table, scales = rows.k_cache, rows.v_cache, rows.table, rows.scales
    if contiguous:
        order = table[:, 0].long()
        as_bytes = kv_dtype.itemsize == 1
        k_cache, v_cache = (
            (cache.view(torch.uint8)[order].view(kv_dtype) if as_bytes else cache[order])
            for cache in (k_cache, v_cache)
        )
        table = None
        scales = None if scales is None else PageScales(*(part[order] for part in scales))
    heads, width = case["kv_heads"] * case["group"], max(q_lens)
    draw = torch.Generator().manual_seed(seed)
    if case["packed"]:
        q = torch.randn(sum(q_lens) + 2, heads, case["head_dim"], generator=draw).to(q_dtype).to(device)
    else:
        q = torch.randn(width, len(q_lens), heads, case["head_dim"], generator=draw).to(q_dtype).to(device)
        q = q.transpose(0, 1)
    out = torch.full((*q.shape[:-1], rows.v_cache.shape[-1]), 7.0, dtype=q_dtype, device=device)
    lse = torch.full(q.shape[:-1], 7.0, device=device) if with_lse else None
    cu_q, cu_kv = (torch.tensor([0, *n]).cumsum(0).to(torch.int32).to(device) for n in (q_lens, lens))
    sinks = 2 * torch.randn(heads, generator=draw) if case["sinks"] else None
    window, is_chunked = case["window_left"], case.get("is_chunked", False)
    options = Options(
        0.2, 0.5 if seed % 2 else 1.0, window, soft_cap=case["soft_cap"], sinks=sinks, is_chunked=is_chunked
    )
    sinks = None if sinks is None else sinks.to(device)
    arguments = (options.sm_scale, options.window_left, options.soft_cap, sinks, is_chunked)
    arguments = as_arguments(version, arguments, options.v_scale, scales)
    version(out, lse, q, k_cache, v_cache, cu_q, cu_kv, table, *arguments)
    close = tolerance(q_dtype, kv_dtype)
    touched = torch.zeros(q.shape[:-2], dtype=torch.bool)
    for row, n in enumerate(q_lens):
        begin = sum(q_lens[:row])
        part = (slice(begin, begin + n),) if case["packed"] else (row, slice(0, n))
        touched[part] = True
        expected, expected_lse = attend(q[part], rows.keys[row], rows.values[row], options)
        torch.testing.assert_close(out[part].double().cpu(), expected, atol=close, rtol=close)
        if lse is not None:
            torch.testing.assert_close(lse[part].double().cpu(), expected_lse, atol=close, rtol=close)
    assert (out.cpu()[~touched] == 7.0).all()


@pytest.mark.parametrize("number", range(len(CASES)))
def test_kernel_agrees_with_float64_on_every_pair_of_options(number, device):
    check(extend_attention_triton, CASES[number], device, number)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_torch_version_agrees_with_float64_on_every_pair_of_options(number):
    check(extend_attention_torch, CASES[number], "cpu", number)


@compiled
@pytest.mark.parametrize("number", range(len(NATIVE_CASES)))
@pytest.mark.parametrize("threads", [1, 3])
def test_compiled_kernel_agrees_with_float64_on_every_pair_of_options(number, threads):
    torch.set_num_threads(threads)
    check(lambda *arguments: native_extend_attention(*arguments)(), NATIVE_CASES[number], "cpu", number, with_lse=False)


def extend_attention_native(*arguments):
    native_extend_attention(*arguments)()


LATENT = {"kv_heads": 1, "layout": "NHD", "soft_cap": 0.0, "packed": True, "before": 33}
LATENT_CASES = [
    {"dtype": "bf16", "group": 16, "head_dim": 96, "value_dim": 64, "page_size": 16, "q_lens": (5, 0, 9, 1)},
    {"dtype": "fp32", "group": 5, "head_dim": 80, "value_dim": 48, "page_size": 3, "q_lens": (20,)},
    {"dtype": "fp16", "group": 8, "head_dim": 64, "value_dim": 32, "page_size": 8, "q_lens": (1, 1, 17)},
    {"dtype": "bf16", "group": 3, "head_dim": 576, "value_dim": 512, "page_size": 16, "q_lens": (9, 2)},
]


@pytest.mark.parametrize("name", ["triton", "torch", pytest.param("native", marks=compiled)])
@pytest.mark.parametrize("number", range(len(LATENT_CASES)))
def test_values_may_be_the_last_channels_of_latent_keys(name, number, device):
    versions = {"triton": extend_attention_triton, "torch": extend_attention_torch, "native": extend_attention_native}
    case = LATENT | LATENT_CASES[number] | {"window_left": -1 + 10 * (number % 2), "sinks": number == 1}
    check(versions[name], case, device if name == "triton" else "cpu", number, with_lse=name != "native")


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_latent_keys_may_be_in_parts(name, device):
    version = extend_attention_triton if name == "triton" else extend_attention_torch
    case = LATENT | LATENT_CASES[0] | {"window_left": 9, "sinks": True, "is_in_parts": True}
    check(version, case, device if name == "triton" else "cpu", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("version", [extend_attention_triton, extend_attention_torch, extend_attention_native])
def test_a_query_that_is_no_number_stays_so_and_spoils_no_other(version, dtype, device):
    if version is extend_attention_native and native.library() is None:
        pytest.skip(f"no compiled kernels: {native.unavailable_reason()}")
    device = device if version is extend_attention_triton else "cpu"
    rows = PagedRows.random([5, 40], page_size=16, kv_heads=2, head_dim=64, dtype=dtype, device=device)
    q = torch.randn(45, 4, 64, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    cu_q = torch.tensor([0, 5, 45], dtype=torch.int32, device=device)
    arguments = as_arguments(version, (0.125, -1, 0.0, None, False), 1.0, None)
    result = []
    lost = torch.zeros(q.shape, dtype=torch.bool)
    for spoilt in (None, (3, 1), (25, 2)):
        if spoilt is not None:
            q[*spoilt, 7] = math.nan
            lost[spoilt] = True
        out = torch.zeros_like(q)
        version(out, None, q, rows.k_cache, rows.v_cache, cu_q, cu_q, rows.table, *arguments)
        result.append(out.cpu())
        assert torch.equal(result[-1].isnan(), lost)
        assert torch.equal(result[-1][~lost], result[0][~lost])


@compiled
@pytest.mark.parametrize("window_left", [-1, 70])
def test_a_prompts_logits_may_grow_from_key_to_key(window_left):
    """Sums are rescaled within blocks of keys and between them, for one query or many."""
    tokens, group, dim = 401, 3, 64
    rows = PagedRows.random([tokens], page_size=16, kv_heads=2, head_dim=dim, dtype=torch.bfloat16, seed=5)
    growth = torch.linspace(0, 60, tokens)[:, None, None].bfloat16()
    toward = torch.sign(torch.randn(2, dim, generator=torch.Generator().manual_seed(1)))
    rows.keys[0][:] = (rows.keys[0] / 4 + growth * toward / dim).bfloat16()
    for token in range(tokens):
        rows.k_cache[rows.table[0, token // 16].item(), token % 16] = rows.keys[0][token].bfloat16()
    q = torch.randn(tokens, 2 * group, dim, generator=torch.Generator().manual_seed(2))
    q = (q / 4 + torch.tensor([1.0, -1.0, 0.2] * 2)[:, None] * toward.repeat_interleave(group, 0)).bfloat16()
    cu_q, out = torch.tensor([0, tokens], dtype=torch.int32), torch.empty_like(q)
    native_extend_attention(
        out,
        None,
        q,
        rows.k_cache,
        rows.v_cache,
        cu_q,
        cu_q,
        rows.table,
        1.0,
        window_left,
        0.0,
        None,
        False,
        1.0,
        None,
        None,
    )()
    expected, _ = attend(q, rows.keys[0], rows.values[0], Options(1.0, 1.0, window_left))
    close = tolerance(torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(out.double(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("version", [extend_attention_triton, extend_attention_torch])
def test_queries_without_visible_keys_get_zero(version, device):
    device = device if version is extend_attention_triton else "cpu"
    rows = PagedRows.random([2], page_size=4, kv_heads=1, head_dim=16, dtype=torch.float32, device=device)
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0)).to(device)
    out, lse = torch.empty_like(q), torch.empty(3, 2, device=device)
    cu_q = torch.tensor([0, 3], dtype=torch.int32, device=device)
    version(
        out,
        lse,
        q,
        rows.k_cache,
        rows.v_cache,
        cu_q,
        rows.indptr * 2,
        rows.table,
        *as_arguments(version, (0.25, -1, 0.0, None, False), 1.0, None),
    )
    expected, expected_lse = attend(q, rows.keys[0], rows.values[0], Options(0.25))
    torch.testing.assert_close(out.double().cpu(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("is_paged", [True, False])
def test_a_layer_over_the_cache_attends_to_all_tokens_so_far(qkv_format, is_paged, device):
    """Rows join, leave and change places; each sequence is compared with its whole history."""
    heads, kv_heads, dim = 4, 2, 16
    draw = torch.Generator().manual_seed(0)
    params = InferenceParams(
        max_batch_size=3,
        max_sequence_length=32,
        num_heads_kv=kv_heads,
        head_dim_k=dim,
        dtype=torch.float32,
        is_paged=is_paged,
        total_num_pages=24 if is_paged else None,
        page_size=4 if is_paged else None,
        max_ctx_len=32,
        qkv_format=qkv_format,
        device=device,
    )
    params.allocate_memory(1)
    history = {}
    for new in ({7: 5, 42: 3}, {42: 1, 7: 1}, {42: 2, 9: 4}, {9: 1, 42: 1}):
        steps = OrderedDict(new)
        params.pre_step(steps)
        width, total = max(new.values()), sum(new.values())
        sizes = {"bshd": (len(new), width), "sbhd": (width, len(new)), "thd": (total + 2,)}[qkv_format]
        q = torch.randn(*sizes, heads, dim, generator=draw).to(device)
        k, v = (torch.randn(*sizes, kv_heads, dim, generator=draw).to(device) for _ in range(2))
        k_cache, v_cache, cu_q, cu_kv, _, out_format = params.step(1, k, v, qkv_format)
        table = params.cache_manager.page_table if is_paged else None
        out = cached_attention(q, k_cache, v_cache, cu_q, cu_kv, qkv_format=out_format, page_table=table)
        assert out.shape == q.shape
        begin = 0
        for row, (name, count) in enumerate(new.items()):
            part = {
                "bshd": (row, slice(0, count)),
                "sbhd": (slice(0, count), row),
                "thd": (slice(begin, begin + count),),
            }[qkv_format]
            begin += count
            old = history.get(name, (k.new_zeros(0, kv_heads, dim), v.new_zeros(0, kv_heads, dim)))
            history[name] = tuple(torch.cat([past, now[part]]) for past, now in zip(old, (k, v), strict=True))
            expected, _ = attend(q[part], *history[name], Options(dim**-0.5))
            torch.testing.assert_close(out[part].double().cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd_2bshd"])
@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize(("window_left", "soft_cap"), [(-1, 0.0), (4, 3.0)])
def test_one_token_a_row_is_split_and_means_the_same(qkv_format, is_paged, window_left, soft_cap, device):
    """Rows without a new token get 0, wherever they stand, whatever the cache holds of them."""
    lens, new, heads, kv_heads, dim, value_dim, page = [9, 5, 30, 0, 1], [1, 0, 1, 0, 1], 4, 2, 16, 24, 8
    draw = torch.Generator().manual_seed(3)
    longest = 32
    keys = torch.randn(5, longest, kv_heads, dim, generator=draw).to(device)
    values = torch.randn(5, longest, kv_heads, value_dim, generator=draw).to(device)
    q = torch.randn(5, heads, dim, generator=draw).to(device)
    cu_q, cu_kv = (torch.tensor([0, *n, 0, 0], device=device).cumsum(0).int() for n in (new, lens))  # capacity is more
    caches, table = (keys, values), None
    if is_paged:
        order = torch.randperm(5 * longest // page, generator=draw).to(device)
        caches = tuple(torch.empty_like(t.view(-1, page, *t.shape[2:])) for t in (keys, values))
        for pages, rows in zip(caches, (keys, values), strict=True):
            pages[order] = rows.view(-1, page, *rows.shape[2:])
        table = torch.zeros(7, longest // page, dtype=torch.int32, device=device)
        table[:5] = order.view(5, -1)
    shaped = q.unsqueeze(0 if qkv_format == "sbhd_2bshd" else 1)
    options = {"window_left": window_left, "logits_soft_cap": soft_cap, "sm_scale": 0.3}
    out = cached_attention(shaped, *caches, cu_q, cu_kv, qkv_format=qkv_format, page_table=table, **options)
    assert out.shape == (*shaped.shape[:-1], value_dim)
    for row, result in enumerate(out.view(5, heads, value_dim)):
        if not new[row]:
            assert not result.any()
            continue
        part = (t[row, : lens[row]] for t in (keys, values))
        expected, _ = attend(q[row : row + 1], *part, Options(0.3, window_left=window_left, soft_cap=soft_cap))
        torch.testing.assert_close(result.double().cpu(), expected[0], atol=1e-5, rtol=1e-5)


def test_cached_attention_refuses_invalid_arguments(device):
    cache = torch.zeros(2, 8, 2, 16, device=device)
    cu = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    q = torch.zeros(2, 1, 4, 16, device=device)
    with pytest.raises(ValueError, match="qkv_format"):
        cached_attention(q, cache, cache, cu, cu, qkv_format="bhsd")
    with pytest.raises(ValueError, match="q .*3"):
        cached_attention(q, cache, cache, cu, cu, qkv_format="thd_2bshd")
    with pytest.raises(ValueError, match="q "):
        cached_attention(q[:, :, :3], cache, cache, cu, cu, qkv_format="bshd")
    with pytest.raises(ValueError, match="q .*3"):
        cached_attention(q[:1].expand(3, 1, 4, 16), cache, cache, cu, cu, qkv_format="bshd")
    assert math.isfinite(cached_attention(q, cache, cache, cu, cu, qkv_format="bshd").sum().item())
