"""The cache's device operators: each version against a definition written out in loops, and as registered."""

import os
import sys
from pathlib import Path

import pytest
import torch

from graphdecode.cache import PagedKVCache, untouched_zeros
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.surfaces.cache_append import cache_append, cache_append_triton
from graphdecode.kernels.surfaces.cache_moves import (
    PLAN_HEADER,
    move_rows,
    move_rows_triton,
    plan_row_moves,
    plan_row_moves_triton,
    plan_words,
)
from graphdecode.kernels.surfaces.page_gather import page_gather

cache_append_torch = versions("cache_append").torch
move_rows_torch = versions("move_rows").torch
plan_row_moves_torch = versions("plan_row_moves").torch
page_gather_torch = versions("page_gather").torch

HOSTILE = 2**31 - 1


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def sums(lengths, rows):
    total = [0]
    for n in list(lengths) + [0] * (rows - len(lengths)):
        total.append(total[-1] + n)
    return int32(total)


def append_case(paged, packed, dtype=torch.float32, hostile=False):
    """Three live rows of five, page size 4; row 1 starts inside a page, row 2 is new."""
    generator = torch.Generator().manual_seed(7)
    steps, befores = [1, 3, 2], [5, 2, 0]
    rows, heads, dim_k, dim_v, page, width = 5, 3, 5, 6, 4, 3
    cu_q = sums(steps, rows)
    cu_kv = sums([s + b for s, b in zip(steps, befores, strict=True)], rows)
    table = None
    if paged:
        pages = 9
        table = torch.full((rows, width), pages, dtype=torch.int32)
        table[0, :2], table[1, :2], table[2, :1] = int32([7, 2]), int32([0, 5]), int32([4])
        if hostile:
            table[3:] = HOSTILE
        shape = (pages + 1, page)
    else:
        shape = (rows, page * width)
    k_cache = torch.randn(*shape, heads, dim_k, generator=generator).to(dtype)
    v_cache = torch.randn(*shape, heads, dim_v, generator=generator).to(dtype)
    lead = (sum(steps) + 2,) if packed else (4, 3)
    new_k = torch.randn(*lead, heads, dim_k, generator=generator).to(dtype)
    new_v = torch.randn(*lead, heads, dim_v, generator=generator).to(dtype)
    if hostile:
        (new_k[sum(steps) :] if packed else new_k[3:]).fill_(float("nan"))

    expected = k_cache.clone(), v_cache.clone()
    for row, (step, before) in enumerate(zip(steps, befores, strict=True)):
        for i in range(step):
            position = before + i
            slot, place = (int(table[row, position // page]), position % page) if paged else (row, position)
            source = (int(cu_q[row]) + i,) if packed else (row, i)
            expected[0][slot, place], expected[1][slot, place] = new_k[source], new_v[source]
    return [k_cache, v_cache, new_k, new_v, cu_q, cu_kv, table], expected


@pytest.mark.parametrize("version", [cache_append_torch, cache_append_triton, cache_append])
@pytest.mark.parametrize("hostile", [False, True], ids=["clean", "hostile"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_append_writes_the_new_tokens_and_nothing_else(version, paged, packed, hostile, device):
    arguments, expected = append_case(paged, packed, hostile=hostile)
    arguments = [a if a is None else a.to(device) for a in arguments]
    version(*arguments)
    assert torch.equal(arguments[0].cpu(), expected[0])
    assert torch.equal(arguments[1].cpu(), expected[1])


@pytest.mark.parametrize("version", [cache_append_torch, cache_append_triton])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_append_copies_low_precision_bit_for_bit(version, dtype, device):
    arguments, expected = append_case(True, False, dtype)
    arguments = [a.to(device) for a in arguments]
    version(*arguments)
    assert torch.equal(arguments[0].cpu().float(), expected[0].float())


@pytest.mark.parametrize("version", [cache_append_torch, cache_append_triton])
def test_append_takes_strided_tokens(version, device):
    arguments, expected = append_case(True, False)
    packed = torch.cat([arguments[2], arguments[3]], dim=-1)  # keys and values side by side, as a projection makes them
    arguments[2], arguments[3] = packed.to(device).split([5, 6], dim=-1)
    arguments = [a.to(device) for a in arguments]
    version(*arguments)
    assert torch.equal(arguments[0].cpu(), expected[0])
    assert torch.equal(arguments[1].cpu(), expected[1])


def moves_case(wanted, origins, owners, dtype=torch.float32, length=6, capacity=8):
    rows = len(owners)
    generator = torch.Generator().manual_seed(rows)
    k_cache = torch.randn(rows, capacity, 2, 3, generator=generator).to(dtype)
    v_cache = torch.randn(rows, capacity, 2, 4, generator=generator).to(dtype)
    expected = k_cache.clone(), v_cache.clone()
    for row, (tag, origin) in enumerate(zip(wanted, origins, strict=True)):
        if tag == 0:
            continue
        source = owners.index(tag) if tag in owners else owners.index(origin) if origin and origin in owners else row
        for new, old in zip(expected, (k_cache, v_cache), strict=True):
            new[row, :length] = old[source, :length]
    live = [length + 1 if tag else 0 for tag in wanted]
    cu_q, cu_kv = sums([min(n, 1) for n in live], rows), sums(live, rows)
    return k_cache, v_cache, int32(wanted), int32(origins), int32(owners), cu_q, cu_kv, expected


MOVES = {
    "nothing": ([1, 2, 3], [0, 0, 0], [1, 2, 3]),
    "new rows": ([1, 9, 0], [0, 0, 0], [1, 2, 3]),
    "one leaves": ([2, 3, 4, 0], [0, 0, 0, 0], [1, 2, 3, 4]),
    "swap": ([2, 1, 0], [0, 0, 0], [1, 2, 3]),
    "cycle of three": ([3, 1, 2, 4], [0, 0, 0, 0], [1, 2, 3, 4]),
    "two cycles": ([2, 1, 5, 3, 4], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]),
    "fork": ([1, 2, 5], [0, 0, 1], [1, 2, 0]),
    "forks read a cycle": ([2, 1, 7, 8, 4, 3], [0, 0, 1, 2, 0, 0], [1, 2, 0, 0, 3, 4]),
    "fork of one who left": ([9, 2, 0], [1, 0, 0], [2, 1, 0]),
    "reversed": ([7, 6, 5, 4, 3, 2, 1], [0] * 7, [1, 2, 3, 4, 5, 6, 7]),
}


@pytest.mark.parametrize("versions", ["torch", "triton", "operator"])
@pytest.mark.parametrize("name", list(MOVES))
def test_rows_arrive_where_their_sequence_is_wanted(name, versions, device):
    plan_version, move_version = {
        "torch": (plan_row_moves_torch, move_rows_torch),
        "triton": (plan_row_moves_triton, move_rows_triton),
        "operator": (plan_row_moves, move_rows),
    }[versions]
    if versions == "torch" and device != "cpu":
        pytest.skip("the torch version of row moves reads the host's memory")
    *tensors, expected = moves_case(*MOVES[name])
    keys, values, wanted, origins, owners, cu_q, cu_kv = (t.to(device) for t in tensors)
    plan = torch.full((plan_words(len(owners)),), HOSTILE, dtype=torch.int32, device=device)
    plan_version(plan, owners, wanted, origins, cu_q, cu_kv)
    move_version(keys, values, plan)
    assert torch.equal(keys.cpu(), expected[0])
    assert torch.equal(values.cpu(), expected[1])
    assert torch.equal(owners, wanted)

    plan_version(plan, owners, wanted, origins, cu_q, cu_kv)
    assert plan[:PLAN_HEADER].tolist() == [0, 0], "a step that runs twice must move nothing twice"


@pytest.mark.parametrize("seed", range(20))
def test_both_planners_plan_random_permutations_and_forks(seed, device):
    generator = torch.Generator().manual_seed(seed)
    rows = 12
    owners = (torch.randperm(rows, generator=generator) + 1).tolist()
    wanted = (torch.randperm(rows, generator=generator) + 1).tolist()
    origins = [0] * rows
    for row in torch.randperm(rows, generator=generator)[:5].tolist():  # some are forks of whoever was there
        wanted[row], origins[row] = 100 + row, owners[int(torch.randint(rows, (), generator=generator))]
    for plan_version, move_version in ((plan_row_moves, move_rows), (plan_row_moves_triton, move_rows_triton)):
        *tensors, expected = moves_case(wanted, origins, owners)
        keys, values, tags, copied, held, cu_q, cu_kv = (t.to(device) for t in tensors)
        plan = torch.zeros(plan_words(rows), dtype=torch.int32, device=device)
        plan_version(plan, held, tags, copied, cu_q, cu_kv)
        move_version(keys, values, plan)
        assert torch.equal(keys.cpu(), expected[0]), f"seed {seed}"
        assert torch.equal(values.cpu(), expected[1]), f"seed {seed}"


def test_moves_of_bf16_are_bit_exact(device):
    *tensors, expected = moves_case(*MOVES["cycle of three"], dtype=torch.bfloat16)
    keys, values, wanted, origins, owners, cu_q, cu_kv = (t.to(device) for t in tensors)
    plan = torch.zeros(plan_words(4), dtype=torch.int32, device=device)
    plan_row_moves_triton(plan, owners, wanted, origins, cu_q, cu_kv)
    move_rows_triton(keys, values, plan)
    assert torch.equal(keys.cpu(), expected[0])


@pytest.mark.parametrize("version", [page_gather_torch, page_gather])
def test_gather_gives_each_rows_tokens_and_zeros_behind_them(version, device):
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(6, 4, 2, 3, generator=generator)
    cache[5] = float("nan")  # the null page
    table, lengths = int32([[3, 1, 5], [0, 5, 5], [HOSTILE, 5, 5]]), [7, 4, 0]
    out = torch.full((3, 10, 2, 3), float("nan"))
    expected = torch.zeros_like(out)
    for row, length in enumerate(lengths):
        for position in range(length):
            expected[row, position] = cache[int(table[row, position // 4]), position % 4]
    out = out.to(device)
    version(out, cache.to(device), table.to(device), sums(lengths, 3).to(device))
    assert torch.equal(out.cpu(), expected)


def test_operators_are_registered_rightly(device):
    for paged in (False, True):
        arguments, _ = append_case(paged, packed=paged)
        torch.library.opcheck(
            torch.ops.graphdecode.cache_append.default, tuple(a if a is None else a.to(device) for a in arguments)
        )
    keys, values, wanted, origins, owners, cu_q, cu_kv, _ = moves_case(*MOVES["swap"])
    keys, values, wanted, origins, owners, cu_q, cu_kv = (
        t.to(device) for t in (keys, values, wanted, origins, owners, cu_q, cu_kv)
    )
    plan = torch.zeros(plan_words(3), dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.graphdecode.plan_row_moves.default, (plan, owners, wanted, origins, cu_q, cu_kv))
    torch.library.opcheck(torch.ops.graphdecode.move_rows.default, (keys, values, plan))
    table = int32([[0, 2]], device)
    out = torch.zeros(1, 16, 2, 3, device=device)
    torch.library.opcheck(torch.ops.graphdecode.page_gather.default, (out, keys, table, sums([3], 1).to(device)))


MIB = 2**20


def resident_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_untouched_zeros_are_zeros_that_can_be_written(dtype: torch.dtype) -> None:
    zeros = untouched_zeros((3, 5, 7), dtype, "cpu")
    assert (zeros.shape, zeros.dtype, zeros.is_contiguous()) == ((3, 5, 7), dtype, True)
    assert not zeros.view(torch.uint8).any()
    zeros[1].view(torch.uint8).fill_(1)
    assert zeros.view(torch.uint8).sum(dtype=torch.int64) == zeros[1].nbytes
    assert zeros.data_ptr() % 64 == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_cache_of_a_gibibyte_is_resident_by_its_written_pages_alone() -> None:
    before = resident_bytes()
    cache = PagedKVCache(
        num_layers=4,
        total_num_pages=1023,
        page_size=16,
        max_pages_per_row=8,
        num_kv_heads=16,
        head_dim=128,
        dtype=torch.float32,
        device="cpu",
    )
    size = sum(tensor.nbytes for layer in cache.layers for tensor in layer)
    assert size == 1024 * MIB
    assert resident_bytes() - before < 8 * MIB
    for layer in cache.layers:
        for tensor in layer:
            tensor[100:200].fill_(1.0)
    assert 90 * MIB < resident_bytes() - before < 120 * MIB
    del cache, layer, tensor
    assert resident_bytes() - before < 16 * MIB


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_does_not_write_into_its_parents_cache() -> None:
    zeros = untouched_zeros((4,), torch.float32, "cpu")
    child = os.fork()
    if child == 0:
        zeros.view(-1)[0] = 1.0
        os._exit(0)
    os.waitpid(child, 0)
    assert zeros.tolist() == [0.0] * 4
