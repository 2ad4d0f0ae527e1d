"""Calls of the driver's for tests: what they are asked with, and the code that each has to answer with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cuda

Code = cuda.CUresult


def ask(function: Callable[..., tuple], *arguments: Any, wants: Any = Code.CUDA_SUCCESS) -> Any:
    """Call, expect a code, and return the value, or the values."""
    error, *values = function(*arguments)
    assert error == wants, error
    return values[0] if len(values) == 1 else values


def context() -> Any:
    return ask(cuda.cuCtxGetCurrent)


def kernel_params(handle: int, *words: int, as_kernel: bool = False) -> Any:
    params = cuda.CUDA_KERNEL_NODE_PARAMS()
    if as_kernel:
        params.kern = cuda.CUkernel(handle)
    else:
        params.func = cuda.CUfunction(handle)
    for size in ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"):
        setattr(params, size, 1)
    params.kernelParams = (words, (ctypes.c_uint64,) * len(words))
    return params


def add_kernel(graph: Any, after: list[Any], handle: int, *words: int) -> Any:
    return ask(cuda.cuGraphAddKernelNode, graph, after, len(after), kernel_params(handle, *words))


def memory_set(address: Any, value: int, elements: int = 1) -> Any:
    fill = cuda.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.value, fill.elementSize, fill.width, fill.height = address, value, 4, elements, 1
    return fill


def memory_copy(target: Any, source: Any, size: int) -> Any:
    copy = cuda.CUDA_MEMCPY3D()
    copy.srcMemoryType = copy.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = source, target
    copy.WidthInBytes, copy.Height, copy.Depth = size, 1, 1
    return copy


def int32_at(address: Any) -> int:
    return ctypes.c_int32.from_address(int(address)).value


def conditional(handle: Any, kind: str = "WHILE", size: int = 1) -> Any:
    params = cuda.CUgraphNodeParams()
    params.type = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = handle
    params.conditional.type = getattr(cuda.CUgraphConditionalNodeType, f"CU_GRAPH_COND_TYPE_{kind}")
    params.conditional.size = size
    params.conditional.ctx = context()
    return params


def run_once(graph: Any, stream: Any = None) -> None:
    launched = ask(cuda.cuGraphInstantiate, graph, 0)
    ask(cuda.cuGraphLaunch, launched, stream or 0)
    ask(cuda.cuCtxSynchronize)
    ask(cuda.cuGraphExecDestroy, launched)
