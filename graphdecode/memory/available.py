"""How much memory a device has, and how much of it is available."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

_ASSUMED_FREE_BYTES = 4 * 2**30  # without /proc/meminfo
_BOUNDLESS = 2**63


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
        group_path = base / path.lstrip("/")  # missing in a container whose own group is mounted as the root
        for group in (group_path, *group_path.parents):
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
