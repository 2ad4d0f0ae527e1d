"""Memory of a GPU behind fixed addresses, by CUDA's virtual memory management."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from graphdecode.errors import EngineStateError, NotSupportedError
from graphdecode.memory.available import total_bytes
from graphdecode.memory.pages import storage_spans

try:
    from cuda.bindings import driver
except ImportError:  # without cuda-python no memory can be reserved
    driver = None

GRANULE = 2 * 2**20  # bytes by which NVIDIA's GPUs map memory; `ReservedMemory` asks the driver
_ALIGNMENT = 256  # bytes, of tensors in reserved memory, as torch's allocator aligns at least


def check_can_reserve() -> None:
    """Raise NotSupportedError if there can be no `ReservedMemory`."""
    if driver is None:
        raise NotSupportedError("enable_sleep_mode needs cuda-python: pip install cuda-bindings")


class ReservedMemory:
    """Memory of a GPU that can be unmapped and mapped again at the same addresses, so that captured graphs stay valid.

    It reserves a range of addresses as large as the device's memory, and maps what tensors need. CUDA's virtual memory
    management does it, through cuda-python. The memory is freed with the last tensor in it.

    Raises:
        NotSupportedError: cuda-python is missing.
        EngineStateError: a call of the driver fails, as all methods raise it; what was mapped stays as it was.
    """

    def __init__(self, device: torch.device) -> None:
        check_can_reserve()
        self._device = device
        torch.cuda.synchronize(device)  # makes the device's context current in this thread, if none is
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = torch.cuda.current_device() if device.index is None else device.index
        self._kind, self._access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granule = _call("cuMemGetAllocationGranularity", self._kind, least)
        size = _rounded(total_bytes(device), self._granule)
        self._base = int(_call("cuMemAddressReserve", size, 0, 0, 0))
        self._used = 0  # bytes from the base that tensors have
        self._mapped: list[tuple[int, int]] = []  # addresses and bytes, each mapped by one call; empty: unmapped
        self._saved: list[int] = []  # the address in pinned host memory of a copy of all; at most one
        weakref.finalize(self, _release, device, self._base, size, self._mapped, self._saved).atexit = False

    @property
    def _mapped_bytes(self) -> int:
        """Bytes from the base that are mapped."""
        return sum(nbytes for _, nbytes in self._mapped)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, _device: object = None) -> Tensor:
        """Return a new tensor of zeros, as `untouched_zeros` does; no size of the shape is 0."""
        nbytes, mapped = prod(shape) * dtype.itemsize, self._mapped_bytes
        if (missing := self._used + nbytes - mapped) > 0:
            self._map(self._base + mapped, _rounded(missing, self._granule))
        tensor = torch.as_tensor(_Span(self, self._base + self._used, nbytes), device=self._device)
        self._used += _rounded(nbytes, _ALIGNMENT)
        return tensor.view(dtype).view(tuple(shape))

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Move tensors here, and whatever shares memory with them; their old memory goes back to the driver."""
        addresses = {begin for begin, end in storage_spans(tensors) if end > begin}
        sharing: dict[int, list[Tensor]] = defaultdict(list)
        is_frozen = gc.get_freeze_count() > 0
        gc.unfreeze()  # the collector does not list what it is spared
        for each in (*tensors, *gc.get_objects()):
            if type(each) in (Tensor, torch.nn.Parameter) and each.layout == torch.strided:
                sharing[each.untyped_storage().data_ptr()].append(each)
        if is_frozen:
            gc.freeze()
        with torch.no_grad():
            for begin in addresses:
                old = sharing[begin][0].untyped_storage()
                new = self.zeros((old.nbytes(),), torch.uint8).untyped_storage().copy_(old)
                for each in sharing.pop(begin):
                    each.set_(new, each.storage_offset(), each.shape, each.stride())  # type: ignore[call-overload]
                del old
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def save(self) -> None:
        """Copy all into pinned host memory, from which `map` restores it; nothing if it is unmapped."""
        if self._mapped:
            if not self._saved:
                self._saved.append(int(_call("cuMemHostAlloc", self._used, 0)))
            try:
                _call("cuMemcpyDtoH", self._saved[0], self._base, self._used)
            except EngineStateError:
                self.forget()
                raise

    def forget(self) -> None:
        """Drop the copy of `save`."""
        while self._saved:
            _call("cuMemFreeHost", self._saved.pop())

    def cancel(self) -> None:
        """Drop the copy of `save`, unless nothing else is left."""
        if self._mapped:
            self.forget()

    def unmap(self) -> int:
        """Give the memory back to the driver, and return the bytes; the device must be idle."""
        nbytes = 0
        while self._mapped:
            _call("cuMemUnmap", *self._mapped[-1])
            nbytes += self._mapped.pop()[1]
        return nbytes

    def map(self) -> None:
        """Map what is unmapped again: with what `save` has copied, else zeros."""
        mapped, size = self._mapped_bytes, _rounded(self._used, self._granule)
        if mapped >= size:
            return
        self._map(self._base + mapped, size - mapped)
        if self._saved:
            try:
                _call("cuMemcpyHtoD", self._base, self._saved[0], self._used)
            except EngineStateError:
                self.unmap()
                raise
            self.forget()
        torch.cuda.synchronize(self._device)

    def _map(self, address: int, nbytes: int) -> None:
        """Map zeros."""
        with torch.cuda.device(self._device):
            try:
                handle = _call("cuMemCreate", nbytes, self._kind, 0)
            except EngineStateError:  # torch may keep what was freed
                torch.cuda.empty_cache()
                handle = _call("cuMemCreate", nbytes, self._kind, 0)
            try:
                _call("cuMemMap", address, nbytes, 0, handle, 0)
            finally:
                _call("cuMemRelease", handle)  # the mapping alone keeps the memory
            try:
                _call("cuMemSetAccess", address, nbytes, [self._access], 1)
                _call("cuMemsetD8", address, 0, nbytes)
            except EngineStateError:
                driver.cuMemUnmap(address, nbytes)
                raise
            self._mapped.append((address, nbytes))


class _Span:
    """A part of reserved memory, as `torch.as_tensor` takes it without a copy; the tensor keeps this object."""

    def __init__(self, memory: ReservedMemory, address: int, nbytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _call(name: str, *arguments: Any) -> Any:
    """Call the driver and return its result; an EngineStateError if it fails."""
    error, *values = getattr(driver, name)(*arguments)
    if int(error) != 0:
        numbers = ", ".join(str(each) for each in arguments if isinstance(each, int))
        raise EngineStateError(f"the CUDA driver refused {name}({numbers}): {error.name}")
    return values[0] if values else None


def _release(device: torch.device, base: int, size: int, mapped: list[tuple[int, int]], saved: list[int]) -> None:
    """Free reserved memory that no tensor uses."""
    with suppress(RuntimeError):  # of a device that is lost, or while another engine captures
        torch.cuda.synchronize(device)
    for span in mapped:
        driver.cuMemUnmap(*span)
    driver.cuMemAddressFree(base, size)
    for address in saved:
        driver.cuMemFreeHost(address)


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
