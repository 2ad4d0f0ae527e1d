"""Appending to pages: each token to its place, and nothing else touched."""

import math

import pytest
import torch
from key_mixing import mixing

from graphdecode import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from graphdecode.kernels.attention.attention_records import QKNormRope
from graphdecode.kernels.cache.kv_format import PageScales
from graphdecode.kernels.cache.rope_append import rope_append, rope_append_triton
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.surfaces.cache_append import paged_append_triton

paged_append_torch = versions("paged_append").torch

PAGE, HEADS, DIM = 4, 3, 24
NEW, LENS = [5, 0, 1, 7], [9, 3, 1, 7]  # tokens appended, tokens afterwards


def metadata(device):
    pages = [-(-n // PAGE) for n in LENS]
    order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(0))
    indptr = torch.tensor([0, *pages]).cumsum(0).to(torch.int32)
    indices = order[: sum(pages)].to(torch.int32)
    last = torch.tensor([(n - 1) % PAGE + 1 for n in LENS], dtype=torch.int32)
    return indices.to(device), indptr.to(device), last.to(device)


def test_batch_indices_and_positions_follow_the_lengths(device):
    indptr = torch.tensor([0, *NEW]).cumsum(0).to(torch.int32).to(device)
    lens = torch.tensor(LENS, dtype=torch.int32, device=device)
    rows, positions = get_batch_indices_positions(indptr, lens, sum(NEW) + 3)
    expected = [(row, n - new + i) for row, (new, n) in enumerate(zip(NEW, LENS, strict=True)) for i in range(new)]
    assert list(zip(rows.tolist(), positions.tolist(), strict=True)) == [*expected, *[(-1, 0)] * 3]
    assert rows.dtype == positions.dtype == torch.int32


def test_batch_indices_and_positions_are_written_into_outputs(device):
    indptr, lens = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, 1, 3], [5, 4]))
    arguments = [torch.zeros(4, dtype=torch.int32, device=device) for _ in range(2)]
    result = get_batch_indices_positions(indptr, lens, 4, *arguments)
    assert all(ours is theirs for ours, theirs in zip(result, arguments, strict=True))
    assert [each.tolist() for each in arguments] == [[0, 1, 1, -1], [4, 2, 3, 0]]
    with pytest.raises(ValueError, match="positions"):
        get_batch_indices_positions(indptr, lens, 4, None, arguments[1][:3])


def test_seq_lens_count_whole_pages_and_the_last_one(device):
    indptr = torch.tensor([0, 3, 3, 4], dtype=torch.int32, device=device)
    last = torch.tensor([2, 4, 4], dtype=torch.int32, device=device)
    assert get_seq_lens(indptr, last, PAGE).tolist() == [10, 0, 4]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_append_writes_each_token_and_nothing_else(kv_layout, joined, dtype, device):
    indices, indptr, last = metadata(device)
    draw = torch.Generator().manual_seed(1)
    source = torch.float16 if dtype.itemsize == 1 else dtype
    key, value = (torch.randn(sum(NEW) + 2, HEADS, DIM, generator=draw).to(source).to(device) for _ in range(2))
    cumulative = torch.tensor([0, *NEW]).cumsum(0).to(torch.int32).to(device)
    lens = torch.tensor(LENS, dtype=torch.int32, device=device)
    rows, positions = get_batch_indices_positions(cumulative, lens, len(key))
    rows[2] = -1  # skipped
    pool = indices.shape[0] + 2
    sizes = (PAGE, HEADS, DIM) if kv_layout == "NHD" else (HEADS, PAGE, DIM)
    cache = torch.randn(pool, 2, *sizes, generator=draw).to(dtype).to(device)
    expected = cache.float().cpu()
    for token, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        if row < 0:
            continue
        page = indices[indptr[row].item() + position // PAGE].item()
        index = (slice(None), position % PAGE) if kv_layout == "HND" else (position % PAGE,)
        expected[(page, 0, *index)] = key[token].to(dtype).float().cpu()
        expected[(page, 1, *index)] = value[token].to(dtype).float().cpu()
    stacked = cache if joined else (cache[:, 0], cache[:, 1])
    append_paged_kv_cache(key, value, rows, positions, stacked, indices, indptr, last, kv_layout)
    assert torch.equal(cache.float().cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_kernel_equals_the_torch_version(dtype, layout, device):
    indices, indptr, _ = metadata(device)
    draw = torch.Generator().manual_seed(2)
    key, value = (torch.randn(6, HEADS, DIM, generator=draw).to(device) for _ in range(2))
    rows = torch.tensor([0, 3, -1, 2, 9, 1], dtype=torch.int32, device=device)  # 9: no such row
    positions = torch.tensor([8, 6, 2, 40, 0, 1], dtype=torch.int32, device=device)  # 40: past the row's pages
    sizes = (PAGE, HEADS, DIM) if layout == "NHD" else (HEADS, PAGE, DIM)
    results = []
    for version in (paged_append_triton, paged_append_torch):
        caches = torch.zeros(2, 12, *sizes).to(dtype).to(device)
        views = caches if layout == "NHD" else caches.transpose(2, 3)
        version(views[0], views[1], key, value, rows, positions, indices, indptr)
        results.append(caches.float())
    assert torch.equal(*results)
    assert results[0].count_nonzero() > 0


def test_append_refuses_invalid_arguments(device):
    indices, indptr, last = metadata(device)
    cache = torch.zeros(12, 2, PAGE, HEADS, DIM, device=device)
    new = torch.zeros(2, HEADS, DIM, device=device)
    at = torch.zeros(2, dtype=torch.int32, device=device)
    valid = [new, new, at, at, cache, indices, indptr, last]
    for position, invalid, names in (
        (0, new[:, :2], "append_key"),
        (1, new[:, :, :8], "append_value"),
        (2, at[:1], "batch_indices"),
        (3, at.long(), "positions"),
        (4, cache[:, 0], "5 dimensions"),
        (5, indices.long(), "kv_indices"),
        (6, indptr.long(), "kv_indptr"),
        (7, last[:2], "kv_last_page_len"),
    ):
        with pytest.raises(ValueError, match=names):
            append_paged_kv_cache(*valid[:position], invalid, *valid[position + 1 :])
    with pytest.raises(ValueError, match="kv_layout"):
        append_paged_kv_cache(*valid, "NDH")


def rope_append_torch(*arguments, k_scale=1.0, v_scale=1.0, scales=None):
    versions("rope_append").torch(*arguments, k_scale, v_scale, *(scales or (None, None)))


ROPE_HEADS, KV_HEADS, ROPE_PAGE, PAGES, POSITIONS = 6, 2, 4, 12, 40


def with_record(version):
    """Return a version of one record for norm and rotation as one that takes its fields."""
    return lambda *arguments, **others: version(*arguments[:8], QKNormRope(*arguments[8:]), **others)


VERSIONS = {"triton": with_record(rope_append_triton), "torch": rope_append_torch}


def inputs(dim, rotated, dtype, norm, device, tokens=5, live=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    angles = torch.rand(POSITIONS, rotated // 2, generator=draw) * 6
    qkv = torch.randn(tokens, (ROPE_HEADS + 2 * KV_HEADS) * dim, generator=draw).to(dtype)
    counts = (ROPE_HEADS, KV_HEADS) if norm == "of all heads" else (1, 1)
    weights = [1 + 0.3 * torch.randn(count * dim, generator=draw) for count in counts]
    table = torch.full((3, 10), PAGES - 1, dtype=torch.int32)
    table[:, :3] = torch.randperm(PAGES - 1, generator=draw)[:9].view(3, 3)
    caches = [torch.randn(PAGES, ROPE_PAGE, KV_HEADS, dim, generator=draw).to(dtype).to(device) for _ in range(2)]
    return {
        "q_out": torch.full((tokens, ROPE_HEADS, dim), 7.0, dtype=dtype, device=device),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "qkv": qkv.to(device),
        "rows": torch.tensor([2, 0, 1, 0, 1][:tokens], dtype=torch.int32, device=device),
        "positions": torch.tensor([3, 11, 0, 10, 9][:tokens], dtype=torch.int32, device=device),
        "live": torch.tensor([live], dtype=torch.int32, device=device),
        "page_table": table.to(device),
        "cos_sin": torch.stack([angles.cos(), angles.sin()], dim=1).to(device),
        "q_norm": weights[0].to(device) if norm else None,
        "k_norm": weights[1].to(device) if norm else None,
        "eps": 1e-5,
    }


def expected(arguments):
    """Return queries, key cache and value cache in float64."""
    q_out, k_cache, v_cache = (arguments[name].double().cpu() for name in ("q_out", "k_cache", "v_cache"))
    dim = q_out.shape[-1]
    half = arguments["cos_sin"].shape[-1]
    for token in range(arguments["live"].item()):
        of_token = arguments["qkv"][token].double().cpu().view(-1, dim)
        heads = of_token.clone()
        position = arguments["positions"][token].item()
        cos, sin = arguments["cos_sin"][position].double().cpu()
        for head in range(ROPE_HEADS + KV_HEADS):
            x = of_token[head].clone()
            weight = arguments["q_norm"] if head < ROPE_HEADS else arguments["k_norm"]
            if weight is not None:
                first, count = (0, ROPE_HEADS) if head < ROPE_HEADS else (ROPE_HEADS, KV_HEADS)
                together = of_token[first : first + count] if len(weight) > dim else x
                gain = weight.double().cpu().view(-1, dim)[head - first if len(weight) > dim else 0]
                x = x / math.sqrt((together * together).mean().item() + arguments["eps"]) * gain
            low, high = x[:half].clone(), x[half : 2 * half].clone()
            x[:half], x[half : 2 * half] = low * cos - high * sin, high * cos + low * sin
            heads[head] = x
        page = arguments["page_table"][arguments["rows"][token].item(), position // ROPE_PAGE].item()
        q_out[token] = heads[:ROPE_HEADS]
        k_cache[page, position % ROPE_PAGE] = heads[ROPE_HEADS : ROPE_HEADS + KV_HEADS]
        v_cache[page, position % ROPE_PAGE] = heads[ROPE_HEADS + KV_HEADS :]
    return q_out, k_cache, v_cache


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("norm", ["", "of each head", "of all heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (80, 80), (32, 16), (16, 0)])
def test_queries_and_cache_agree_with_float64(version, norm, dtype, dim, rotated, device):
    arguments = inputs(dim, rotated, dtype, norm, device if version == "triton" else "cpu")
    reference = expected(arguments)
    VERSIONS[version](*arguments.values())
    close = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    live = arguments["live"].item()
    torch.testing.assert_close(arguments["q_out"][:live].double().cpu(), reference[0][:live], atol=close, rtol=close)
    torch.testing.assert_close(arguments["k_cache"].double().cpu(), reference[1], atol=close, rtol=close)
    assert torch.equal(arguments["v_cache"].double().cpu(), reference[2])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_entries_of_8_bits_are_those_of_float64_over_their_scales(version, kind, device):
    arguments = inputs(64, 64, torch.float32, "of each head", device if version == "triton" else "cpu")
    for name in ("k_cache", "v_cache"):
        arguments[name].zero_()
    queries, *reference = expected(arguments)
    arguments |= {
        name: torch.zeros_like(arguments[name], dtype=torch.uint8).view(kind) for name in ("k_cache", "v_cache")
    }
    if kind == torch.int8:
        shape = (PAGES, KV_HEADS, ROPE_PAGE)
        scales = PageScales(
            *(torch.zeros(shape, dtype=torch.bfloat16, device=arguments["live"].device) for _ in range(2))
        )
        VERSIONS[version](*arguments.values(), scales=scales)
        queries, reference[0] = queries @ mixing(64), reference[0] @ mixing(64)
        units = [scale.cpu().double().transpose(1, 2)[..., None] for scale in scales]
        close = units  # half a step of the code, and of the largest code half a step for what the scale lost in bf16
    else:
        VERSIONS[version](*arguments.values(), k_scale=0.02, v_scale=0.5)
        units = [0.02, 0.5]
        close = [entries.abs() / 16 + 2.0**-9 * unit for unit, entries in zip(units, reference, strict=True)]
    live = arguments["live"].item()
    torch.testing.assert_close(arguments["q_out"][:live].double().cpu(), queries[:live], atol=1e-5, rtol=1e-5)
    for name, unit, entries, error in zip(("k_cache", "v_cache"), units, reference, close, strict=True):
        assert bool(((arguments[name].cpu().double() * unit - entries).abs() <= error).all())


@pytest.mark.parametrize("version", [*VERSIONS, "as it is called"])
def test_mixed_queries_stay_in_the_range_of_fp16(version, device):
    arguments = inputs(64, 0, torch.float16, "", device if version == "triton" else "cpu")
    arguments["qkv"].fill_(60000.0)
    arguments |= {name: torch.zeros_like(arguments[name], dtype=torch.int8) for name in ("k_cache", "v_cache")}
    scales = torch.zeros(2, PAGES, KV_HEADS, ROPE_PAGE, dtype=torch.bfloat16, device=arguments["live"].device)
    VERSIONS.get(version, with_record(rope_append))(*arguments.values(), scales=PageScales(*scales))
    first, others = arguments["q_out"][: arguments["live"].item()].cpu().split((1, 63), dim=-1)
    assert (first == 65504).all()
    assert (others == 0).all()


@pytest.mark.parametrize("version", [*VERSIONS, "native"])
@pytest.mark.parametrize("heads", [ROPE_HEADS, 0])
def test_keys_are_appended_where_values_have_no_heads(version, heads, device):
    append = VERSIONS.get(version, with_record(rope_append))
    arguments = inputs(48, 16, torch.bfloat16, "", device if version == "triton" else "cpu")
    saved = {name: arguments[name].clone() for name in ("q_out", "k_cache", "v_cache")}
    append(*(arguments | saved).values())
    first = (ROPE_HEADS - heads) * 48  # with no query heads the keys come first
    qkv = arguments["qkv"][:, first : (ROPE_HEADS + KV_HEADS) * 48].contiguous()
    arguments |= {
        "q_out": arguments["q_out"][:, :heads].contiguous(),
        "v_cache": arguments["v_cache"][:, :, :0],
        "qkv": qkv,
    }
    append(*arguments.values())
    assert torch.equal(arguments["q_out"], saved["q_out"][:, :heads])
    assert torch.equal(arguments["k_cache"], saved["k_cache"])


@pytest.mark.parametrize("version", VERSIONS)
def test_an_fp8_cache_rounds_to_even_and_never_overflows(version, device):
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = every[every.isfinite()].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    nudged = [between * (1 + sign * 2.0**-20) for sign in (-1, 1)]
    large = torch.tensor([math.nan, 449.0, 464.0, 1e4, 3e38, math.inf, -1e4, -math.inf, 1e-9, -1e-9, 1e-40])
    values = torch.cat([finite, between, *nudged, large])
    values = torch.cat([values, values.new_zeros(-len(values) % (2 * KV_HEADS * 16))]).view(-1, 2 * KV_HEADS * 16)
    tokens, dim = len(values), 16
    arguments = inputs(dim, 0, torch.float32, "", "cpu", tokens=5)
    arguments["q_out"] = torch.zeros(tokens, ROPE_HEADS, dim)
    arguments["qkv"] = torch.cat([torch.zeros(tokens, ROPE_HEADS * dim), values], dim=1)
    arguments["k_cache"], arguments["v_cache"] = (
        torch.zeros(PAGES, ROPE_PAGE, KV_HEADS, dim).to(torch.float8_e4m3fn) for _ in range(2)
    )
    at = torch.arange(tokens, dtype=torch.int32)
    arguments |= {"rows": at * 0, "positions": at, "live": torch.tensor([tokens], dtype=torch.int32)}
    arguments["page_table"] = torch.arange(PAGES - 1, dtype=torch.int32)[None]
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }
    VERSIONS[version](*arguments.values())
    reference = values.clamp(-448.0, 448.0)
    nearest = (reference[..., None] - finite).abs().amin(-1)
    caches = (arguments["k_cache"], arguments["v_cache"])
    result = torch.cat([cache.cpu().float().view(-1, KV_HEADS * dim)[:tokens] for cache in caches], dim=1)
    assert torch.equal(result.isnan(), values.isnan())
    assert torch.equal((result - reference).abs().nan_to_num(), nearest.nan_to_num())
    codes = torch.cat([cache.cpu().view(torch.uint8).view(-1, KV_HEADS * dim)[:tokens] for cache in caches], dim=1)
    ties = (reference[..., None] - finite).abs().eq(nearest[..., None]).sum(-1) > 1
    assert not (codes[ties & (reference != 0)] & 1).any(), "a tie goes to the even neighbour"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("live", [0, 1, 3])
def test_hostile_padding_changes_no_bit_of_live_tokens_or_pages(version, live, device):
    """Law 4: NaN and huge integers past the live tokens."""
    device = device if version == "triton" else "cpu"
    clean, hostile = (inputs(32, 32, torch.float32, "of all heads", device, live=live) for _ in range(2))
    hostile["qkv"][live:] = math.nan
    hostile["rows"][live:] = 2**31 - 1
    hostile["positions"][live:] = -(2**31)
    for arguments in (clean, hostile):
        VERSIONS[version](*arguments.values())
    assert torch.equal(clean["q_out"][:live], hostile["q_out"][:live])
    assert torch.equal(clean["k_cache"][:-1], hostile["k_cache"][:-1])
    assert torch.equal(clean["v_cache"][:-1], hostile["v_cache"][:-1])
