"""A cache takes memory where it is written to."""

import os
import sys
from pathlib import Path

import pytest
import torch

from graphdecode.cache import PagedKVCache, untouched_zeros

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
