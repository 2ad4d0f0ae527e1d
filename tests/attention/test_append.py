"""Appending to pages: each token to its place, and nothing else touched."""

import pytest
import torch

from graphdecode import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
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


def test_seq_lens_count_whole_pages_and_the_last_one(device):
    indptr = torch.tensor([0, 3, 3, 4], dtype=torch.int32, device=device)
    last = torch.tensor([2, 4, 4], dtype=torch.int32, device=device)
    assert get_seq_lens(indptr, last, PAGE).tolist() == [10, 0, 4]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_each_token_goes_to_its_place_and_nothing_else_changes(kv_layout, joined, dtype, device):
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
        place = (slice(None), position % PAGE) if kv_layout == "HND" else (position % PAGE,)
        expected[(page, 0, *place)] = key[token].to(dtype).float().cpu()
        expected[(page, 1, *place)] = value[token].to(dtype).float().cpu()
    both = cache if joined else (cache[:, 0], cache[:, 1])
    append_paged_kv_cache(key, value, rows, positions, both, indices, indptr, last, kv_layout)
    assert torch.equal(cache.float().cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_kernel_writes_what_the_torch_version_writes(dtype, layout, device):
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


def test_append_refuses_what_does_not_fit(device):
    indices, indptr, last = metadata(device)
    cache = torch.zeros(12, 2, PAGE, HEADS, DIM, device=device)
    new = torch.zeros(2, HEADS, DIM, device=device)
    at = torch.zeros(2, dtype=torch.int32, device=device)
    good = [new, new, at, at, cache, indices, indptr, last]
    for place, bad, names in (
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
            append_paged_kv_cache(*good[:place], bad, *good[place + 1 :])
    with pytest.raises(ValueError, match="kv_layout"):
        append_paged_kv_cache(*good, "NDH")
