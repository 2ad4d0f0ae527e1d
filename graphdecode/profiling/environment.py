"""The environment of a measurement, and the device's read bandwidth."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import torch

from graphdecode.extensions import version_of
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.instructions import instructions

_GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")


def describe_environment(device: torch.device | str) -> dict[str, str | int | float]:
    """Return the facts needed to judge a figure: device, driver, versions, commit, clocks, threads.

    `cache_bytes` is the size of the last-level cache (0: unknown); `instructions` are those of compiled kernels.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    # a report compiles nothing
    has_kernels = native.unavailable_reason() is None if native.LOADED else native.is_expected(None)
    cpu = _cpu_fields()
    name = torch.cuda.get_device_name(device) if on_gpu else cpu.get("model name")
    facts: dict[str, str | int | float] = {
        "device": device.type,
        "device_name": name or platform.processor() or platform.machine(),
        "cache_bytes": cache_bytes(device),
        "cpu_mhz": cpu.get("cpu MHz", "unknown"),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else "unknown",
        "instructions": instructions().name if has_kernels and not on_gpu else "none",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "transformers": version_of("transformers"),
        "commit": _commit(),
    }
    if on_gpu:
        printed = _run("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader")
        values = [value.strip() for value in printed.partition("\n")[0].split(",")] if printed else []
        facts |= {f"gpu_{name.replace('.', '_')}": value for name, value in zip(_GPU_FIELDS, values, strict=False)}
    return facts


def _cpu_fields() -> dict[str, str]:
    """Return the fields of the last core in /proc/cpuinfo (Linux)."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cache_bytes(device: torch.device) -> int:
    """Return the size of a device's last-level cache, for a CPU the largest cache of the first core; 0: unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 2**10, "M": 2**20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)


def _run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return result.stdout.strip() if result.returncode == 0 else ""


def _commit() -> str:
    commit = _run("git", "rev-parse", "--short=12", "HEAD")
    changed = _run("git", "status", "--porcelain", "--untracked-files=no")
    return (commit + "+changes" if changed else commit) or "unknown"


def read_bandwidth(device: torch.device | str, *, size_bytes: int | None = None, repeats: int = 7) -> float:
    """Return the median read bandwidth of a device in bytes per second, from sums of a tensor with torch's threads.

    The tensor has 1 GiB on a CPU, and on a GPU 4 GiB or half of what is free, if `size_bytes` is None.
    """
    device = torch.device(device)
    if size_bytes is None:
        size_bytes = min(4 << 30, torch.cuda.mem_get_info(device)[0] // 2) if device.type == "cuda" else 1 << 30
    data = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    seconds = sorted(_timed_sum(data) for _ in range(repeats + 1))
    return data.nbytes / seconds[len(seconds) // 2]


def _timed_sum(data: torch.Tensor) -> float:
    if data.is_cuda:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        data.sum()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000
    began = time.perf_counter()
    data.sum()
    return time.perf_counter() - began
