"""Huge pages for tensors on a CPU."""

import os
import sys
from collections import Counter
from collections.abc import Iterable
from threading import Thread
from threading import enumerate as enumerate_threads

from torch import Tensor

from .release import advise, storage_spans

HUGE_PAGE = 2 << 20
_LEAST_SHARE = 0.75  # of a huge page that weights must fill; the rest is wasted
_THREAD_NAME = "graphdecode-huge-pages"
_COLLAPSE = 25  # MADV_COLLAPSE (Linux 6.1) is synchronous, and works if huge pages are only on request


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
