"""Launches CUDA C++ kernels into torch's current stream, also while it is captured."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .nvrtc import Defines, architecture, compiled

try:
    from cuda.bindings import driver
except ImportError:
    driver = None

_SHARED_BY_DEFAULT = 48 << 10  # bytes that a block may have unasked
Argument = Tensor | int | float | None  # a pointer, int, float, or null pointer


class Kernel:
    """A kernel that is loaded on a device.

    Args:
        code: its cubin.
        name: of the function.
    """

    def __init__(self, code: bytes, name: str) -> None:
        self.name = name
        _bind_context()
        (self._module,) = _call(driver.cuModuleLoadData, code)
        (self._function,) = _call(driver.cuModuleGetFunction, self._module, name.encode())
        self._shared_bytes = _SHARED_BY_DEFAULT

    def launch(
        self,
        grid: tuple[int, ...],
        threads: int,
        arguments: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        starts_early: bool = False,
        cluster: int = 1,
    ) -> None:
        """Launch into the current stream of the current device; without blocks nothing is launched.

        Args:
            grid: blocks, up to three numbers.
            threads: of a block.
            arguments: in the kernel's order.
            shared_bytes: dynamic shared memory of a block.
            starts_early: it may start before the previous kernel ends, when that one's blocks allow it.
            cluster: blocks of a cluster, which divide the grid's first number.
        """
        if 0 in grid:
            return
        _bind_context()
        if shared_bytes > self._shared_bytes:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _call(driver.cuFuncSetAttribute, self._function, limit, shared_bytes)
            self._shared_bytes = shared_bytes
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs = [*_early_start() * starts_early, *_cluster_of(cluster)]
        config.numAttrs = len(config.attrs)
        values, types = zip(*map(_parameter, arguments), strict=True)
        _call(driver.cuLaunchKernelEx, config, self._function, (values, types), 0)

    def unload(self) -> None:
        """Give its code back, when no launch or graph uses it; else it stays for the life of the process."""
        _call(driver.cuModuleUnload, self._module)


@functools.cache
def loaded(source: str, name: str, defines: tuple[tuple[str, int | str], ...], device: int) -> Kernel:
    """Return a kernel of a source of this folder for the current device, compiled and loaded once; see `compiled`."""
    macros: Defines = dict(defines)
    return Kernel(compiled(source, macros, architecture(torch.cuda.get_device_capability(device))), name)


def _bind_context() -> None:
    """Make the current device's context current; in a new thread torch does it with the first call that needs one."""
    (context,) = _call(driver.cuCtxGetCurrent)
    if not int(context):
        (context,) = _call(driver.cuDevicePrimaryCtxRetain, torch.cuda.current_device())
        _call(driver.cuCtxSetCurrent, context)


def _parameter(value: Argument) -> tuple[Any, Any]:
    if isinstance(value, int):
        return value, ctypes.c_int
    if isinstance(value, float):
        return value, ctypes.c_float
    return (0 if value is None else value.data_ptr()), ctypes.c_void_p


def _early_start() -> list[Any]:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return [attribute]


def _cluster_of(blocks: int) -> list[Any]:
    if blocks == 1:
        return []
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = blocks, 1, 1
    return [attribute]


def _call(function: Any, *arguments: Any) -> tuple[Any, ...]:
    error, *values = function(*arguments)
    if int(error) != 0:
        raise RuntimeError(f"{function.__name__}: {error.name}")
    return tuple(values)
