"""The limit that decoding stands next to: how fast this device reads memory."""

from __future__ import annotations

import time

import torch


def read_bandwidth(device: torch.device | str, *, size_bytes: int | None = None, repeats: int = 7) -> float:
    """Measure the read bandwidth of a device, in bytes per second.

    Sums a tensor that no cache holds, `repeats` times, and takes the median; the threads are torch's.

    Args:
        device: CPU or CUDA.
        size_bytes: of the tensor; None means 1 GiB on a CPU, and on a GPU 4 GiB or half of what is free.
        repeats: timed passes, after one that is not counted.
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
