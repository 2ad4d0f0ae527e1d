"""Weights in huge pages: which pages are taken, and that values and addresses stay."""

import sys
from pathlib import Path

import pytest
import torch

from graphdecode.models.load import HUGE_PAGE, filled_pages, join_pages

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_only_pages_that_are_nearly_filled_are_taken():
    page = HUGE_PAGE
    whole = (3 * page - 100, 6 * page + 100)
    assert filled_pages([whole]) == [(3 * page, 6 * page)]
    halves = [(8 * page, 8 * page + page // 2), (8 * page + page // 2 + 4096, 9 * page)]
    assert filled_pages(halves[:1]) == []
    assert filled_pages([whole, *halves]) == [(3 * page, 6 * page), (8 * page, 9 * page)]


@pytest.mark.skipif(sys.platform != "linux" or not MODES.exists(), reason="needs Linux with huge pages")
def test_tensors_in_huge_pages_are_what_and_where_they_were():
    before = _huge_bytes()  # the system may give some of them huge pages by itself
    held = [torch.arange(700_000, dtype=torch.int32) + place for place in range(8)]  # of 2.8 MB
    addresses = [tensor.data_ptr() for tensor in held]
    join_pages(held)
    assert [tensor.data_ptr() for tensor in held] == addresses
    for place, tensor in enumerate(held):
        assert torch.equal(tensor, torch.arange(700_000, dtype=torch.int32) + place)
    if "[never]" not in MODES.read_text() and _has_collapse():
        assert _huge_bytes() - before >= 4 * HUGE_PAGE


def _has_collapse() -> bool:
    major, minor = (int(part) for part in Path("/proc/sys/kernel/osrelease").read_text().split(".")[:2])
    return (major, minor) >= (6, 1)


def _huge_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0
