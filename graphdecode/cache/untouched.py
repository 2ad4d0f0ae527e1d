"""Zeros that take memory where they are written to, and not before."""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_HUGE_FROM = 32 * 2**20  # bytes from which on a huge page, 2 MiB, is a small part


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros that have not been written: on a CPU, pages of the system that are zero until they are used.

    `torch.zeros` writes each byte, so that all of it is resident from the first moment. Memory that is mapped and bears
    no file is zero by the system's promise, and takes room page by page, with what is written; much of it huge pages,
    where there are some, for reading here and there takes a walk through the page table each time. Whoever writes to it
    where there is no room left is ended by the system, as with any memory that it grants beyond what it has.

    Args:
        shape: no size is 0.
        dtype: of the tensor.
        device: on any but a CPU this is `torch.zeros`.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    mapped = mmap.mmap(-1, prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)  # no other process sees what we write
    if len(mapped) >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system that was built without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(dtype).view(tuple(shape))
