"""Memory on a CPU, released to the system: of tensors whose addresses stay reserved, and what the heap has free."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from graphdecode.errors import NotSupportedError
from graphdecode.memory.available import resident_bytes

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
        where = sys.platform if device.type == "cpu" else device.type
        raise NotSupportedError(
            f"memory is given back only on a CPU under Linux, and this is {where}: CUDA needs enable_sleep_mode=True "
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
