"""Memory of devices: total, available, and given back to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from graphdecode.errors import NotSupportedError

_DONTNEED = 4  # MADV_DONTNEED: the memory is zeros when it is next touched
_ASSUMED_FREE_BYTES = 4 * 2**30  # without /proc/meminfo
_BOUNDLESS = 2**63


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would scan all of torch's objects several times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def collector_spared() -> Iterator[None]:
    """Keep the collector from what is loaded by now: a scan of it would take as long as several steps."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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


def give_back(tensors: Iterable[Tensor]) -> int:
    """Give tensors' memory back to the system, and return by how many bytes this process became smaller.

    Addresses stay reserved: the memory is zeros when it is next touched. Pages that a tensor shares with others are
    kept, as are opaque layouts.

    Raises:
        NotSupportedError: a tensor is not on a CPU, or the system is not Linux.
    """
    tensors = list(tensors)
    other = next((each.device.type for each in tensors if each.device.type != "cpu"), None)
    if other is not None or sys.platform != "linux":
        raise NotSupportedError(
            f"memory is given back only on a CPU under Linux, and this is {other or sys.platform}: torch's CUDA "
            "allocator cannot unmap memory and keep its addresses; close() frees all of it"
        )
    size, before = os.sysconf("SC_PAGE_SIZE"), resident_bytes()
    pages = ((-(-begin // size) * size, end // size * size) for begin, end in storage_spans(tensors))
    advise((span for span in pages if span[0] < span[1]), _DONTNEED)
    return max(before - resident_bytes(), 0)


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory (Linux), counted page by page."""
    return 1024 * _numbers(Path("/proc/self/smaps_rollup")).get("Rss", 0)


class Memory(NamedTuple):
    """Bytes of a device that this process may use."""

    total: int
    available: int  # now, including the page cache, which can be evicted


def total_bytes(device: torch.device) -> int:
    """Return a device's total memory for this process, in bytes."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory().total


def free_bytes(device: torch.device) -> int:
    """Return a device's available memory, in bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory().available


def host_memory(root: Path = Path("/")) -> Memory:
    """Return the machine's memory within the limits of control groups; `root` has Linux's `proc` and `sys`."""
    meminfo, total = _numbers(root / "proc/meminfo"), _BOUNDLESS
    with suppress(AttributeError, ValueError, OSError):
        total = 1024 * meminfo.get("MemTotal", 0) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = 1024 * meminfo["MemAvailable"] if "MemAvailable" in meminfo else min(_ASSUMED_FREE_BYTES, total)
    for limit, used in _limits(root):
        total, available = min(total, limit), min(available, limit - used)
    return Memory(total, max(available, 0))


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group around this process, and its use without the page cache, in bytes."""
    groups = root / "sys/fs/cgroup"
    text = ""
    with suppress(OSError):
        text = (root / "proc/self/cgroup").read_text()
    for line in text.splitlines():
        number, kinds, path = line.split(":", 2)
        if number == "0":  # cgroup v2
            base, limit, usage, files = groups, "memory.max", "memory.current", ("inactive_file", "active_file")
        elif "memory" in kinds.split(","):
            base, limit, usage = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            files = ("total_inactive_file", "total_active_file")
        else:
            continue
        own = base / path.lstrip("/")  # missing in a container whose own group is mounted as the root
        for group in (own, *own.parents):
            with suppress(ValueError, OSError):  # the file is missing, or it says "max"
                most = int((group / limit).read_text())
                stat = _numbers(group / "memory.stat")
                yield most, int((group / usage).read_text()) - sum(stat.get(name, 0) for name in files)
            if group == base:
                break


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines are a name and a number; {} if it does not exist."""
    with suppress(OSError):
        return {name: int(value) for name, value in re.findall(r"^(\w+):?\s+(\d+)", path.read_text(), re.MULTILINE)}
    return {}
