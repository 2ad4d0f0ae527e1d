"""Huge pages for weights on a CPU, which are read faster where fewer pages have to be looked up."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
_LEAST_SHARE = 0.75  # of a page that is filled: holes between weights cost memory from then on
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1: now, and where huge pages are for those who ask, too


def join_pages(tensors: Iterable[Tensor]) -> None:
    """Let memory that tensors fill have huge pages where the system has them; values and addresses stay.

    Args:
        tensors: on a CPU. Where they stand apart and are small, or a library packed them, nothing is done.
    """
    if sys.platform != "linux" or HUGE_PAGE % os.sysconf("SC_PAGE_SIZE"):
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided)
    for begin, end in filled_pages({(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages}):
        advise(begin, end - begin, _COLLAPSE)  # what cannot be had stays as it is


def filled_pages(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans of huge pages that spans of addresses fill, or nearly so."""
    filled: Counter[int] = Counter()
    for begin, end in spans:
        for page in range(begin // HUGE_PAGE, -(-end // HUGE_PAGE)):
            filled[page] += min(end, (page + 1) * HUGE_PAGE) - max(begin, page * HUGE_PAGE)
    found: list[tuple[int, int]] = []
    for page in sorted(page for page, count in filled.items() if count >= _LEAST_SHARE * HUGE_PAGE):
        begin, end = page * HUGE_PAGE, (page + 1) * HUGE_PAGE
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found
