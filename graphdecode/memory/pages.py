"""Pages of this process: released to the system, or joined to huge pages."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterable
from threading import Thread
from threading import enumerate as enumerate_threads

import torch
from torch import Tensor

from graphdecode.errors import NotSupportedError
from graphdecode.memory.available import resident_bytes

HUGE_PAGE = 2 << 20
_LEAST_SHARE = 0.75  # of a huge page that weights must fill; the rest is wasted
_THREAD_NAME = "graphdecode-huge-pages"
_COLLAPSE = 25  # MADV_COLLAPSE (Linux 6.1) is synchronous, and works if huge pages are only on request
_DONTNEED = 4  # MADV_DONTNEED: the memory is zeros when it is next touched


def advise(spans: Iterable[tuple[int, int]], advice: int) -> None:
    """Call Linux's `madvise` for spans of addresses; errors are ignored."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in spans:
        madvise(begin, end - begin, advice)


def storage_spans(tensors: Iterable[Tensor]) -> set[tuple[int, int]]:
    """Return the begin and end of tensors' memory, except for opaque layouts."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided)
    return {(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages}


def check_can_release(device: torch.device) -> None:
    """Raise NotSupportedError if `release_memory` cannot give memory of a device back."""
    if device.type != "cpu" or sys.platform != "linux":
        system = sys.platform if device.type == "cpu" else device.type
        raise NotSupportedError(
            f"memory is released only on a CPU under Linux, and this is {system}: CUDA needs enable_sleep_mode=True "
            "when the model is loaded; close() frees all of it"
        )


def release_memory(tensors: Iterable[Tensor]) -> int:
    """Give tensors' memory back to the system, and return by how many bytes this process became smaller.

    Addresses stay reserved: the memory is zeros when it is next touched. Pages that a tensor shares with others are
    kept, as are opaque layouts.

    Raises:
        NotSupportedError: a tensor is not on a CPU, or the system is not Linux.
    """
    tensors = list(tensors)
    for tensor in tensors:
        check_can_release(tensor.device)
    size, before = os.sysconf("SC_PAGE_SIZE"), resident_bytes()
    pages = ((-(-begin // size) * size, end // size * size) for begin, end in storage_spans(tensors))
    advise((span for span in pages if span[0] < span[1]), _DONTNEED)
    return max(before - resident_bytes(), 0)


def trim_heap() -> None:
    """Return freed heap memory to the system; packing weights leaves holes of up to a fifth of the model."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)


def join_pages(tensors: Iterable[Tensor]) -> None:
    """Back CPU tensors with huge pages if the system supports them; values and addresses do not change."""
    if sys.platform != "linux" or HUGE_PAGE % os.sysconf("SC_PAGE_SIZE"):
        return
    advise(filled_pages(storage_spans(tensors)), _COLLAPSE)


def filled_pages(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans of huge pages that address spans fill, or nearly fill."""
    filled: Counter[int] = Counter()
    for begin, end in spans:
        for page in range(begin // HUGE_PAGE, -(-end // HUGE_PAGE)):
            filled[page] += min(end, (page + 1) * HUGE_PAGE) - max(begin, page * HUGE_PAGE)
    joined: list[tuple[int, int]] = []
    for page in sorted(page for page, count in filled.items() if count >= _LEAST_SHARE * HUGE_PAGE):
        begin = page * HUGE_PAGE
        is_next = joined and joined[-1][1] == begin
        joined.append((joined.pop()[0] if is_next else begin, begin + HUGE_PAGE))
    return joined


def start_joining_pages(tensors: list[Tensor]) -> None:
    """Call `join_pages` in a thread, since the system copies only half a gigabyte per second."""
    Thread(target=join_pages, args=(tensors,), name=_THREAD_NAME, daemon=True).start()


def wait_for_joined_pages() -> None:
    """Wait for the threads of `start_joining_pages`, which make memory resident."""
    for thread in enumerate_threads():
        if thread.name == _THREAD_NAME:
            thread.join()
