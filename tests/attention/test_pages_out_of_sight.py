"""Pages that no query sees are not read: what is in them, and what the page table names in their place, is all one."""

import pytest
import torch

from graphdecode.kernels.attention import append_attention, extend_attention  # noqa: F401 - registers them
from graphdecode.kernels.attention.attention_records import AttentionOptions
from graphdecode.kernels.native.registration import versions

PAGE, PAGES, WINDOW = 16, 6, 20
TRASH = PAGES  # full of NaN


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
    keys[TRASH] = values[TRASH] = torch.nan
    q = torch.randn(queries, 2, 32, generator=generator).to(dtype)
    options = AttentionOptions(0.2, WINDOW).scaled(32)
    first = (length - queries - WINDOW) // PAGE  # page that the first query sees
    table = torch.arange(PAGES, dtype=torch.int32)[None]
    cut = table.clone()
    cut[:, :first] = TRASH
    assert first >= 3
    found = []
    for pages in (table, cut):
        out = torch.zeros_like(q)
        ends_q, ends_kv = (torch.tensor([0, end], dtype=torch.int32) for end in (queries, length))
        given = (out, None, q, keys, values, ends_q, ends_kv, pages, *options, 1.0, None, None)
        run("extend_attention", version, *given)
        found.append(out)
    if version == "native" and not found[0].any():
        pytest.skip("no compiled kernels")
    assert found[0].any()
    assert found[0].isfinite().all()
    assert torch.equal(*found)
    one = []
    plan = torch.tensor([1, 0, 0, 0, 0, 0, 1, length], dtype=torch.int32)
    turn = torch.stack([torch.ones(128, 4), torch.zeros(128, 4)], 1)
    qkv = torch.cat([q[-1].flatten(), torch.ones(64, dtype=dtype)])[None]
    for pages in (table, cut):
        out, caches = torch.zeros_like(q[-1:]), (keys.clone(), values.clone())
        workspace = torch.zeros(1, 1, 2, 32), torch.zeros(1, 1, 2), torch.zeros(2, dtype=torch.int32)
        ends = torch.tensor([length], dtype=torch.int32)
        given = (out, *caches, qkv, pages, ends, plan, *workspace, turn, None, None, 0.0, 1, *options, 1.0, 1.0)
        run("append_attention", version, *given, None, None)
        one.append(out)
    assert one[0].any()
    assert one[0].isfinite().all()
    assert torch.equal(*one)
