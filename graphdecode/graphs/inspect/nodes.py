"""What a captured CUDA graph holds, as the driver tells it."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from typing import Any

from graphdecode.graphs.inspect.memory import AddressMap
from graphdecode.graphs.step_graph import Argument, Node

try:
    from cuda.bindings import driver
except ImportError:  # without cuda-python graphs are captured and replayed all the same
    driver = None

_TYPE_PREFIX = "CU_GRAPH_NODE_TYPE_"
_WORD_BYTES = 8


def described(raw_graph: int, memory: AddressMap) -> list[Node]:
    """Return the nodes of a `cudaGraph_t`; none, and a warning, where the driver does not tell."""
    try:
        return nodes_of(raw_graph, memory)
    except RuntimeError as error:  # a graph that cannot be described can be launched all the same
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return []


def nodes_of(raw_graph: int, memory: AddressMap) -> list[Node]:
    """Return the nodes of a `cudaGraph_t`, given its handle; none without cuda-python.

    Kernels are named by their function, other nodes by their kind. All is asked of the driver, for the runtime's
    interface does not know Triton's kernels. The arguments of a node are the addresses of a copy or a fill, and those
    8-byte words of a kernel's parameters that are an address, whether somebody owns it or nobody does.

    Raises:
        RuntimeError: the driver refused to answer.
    """
    if driver is None:
        return []
    graph = driver.CUgraph(init_value=raw_graph)
    _, count = _checked(driver.cuGraphGetNodes(graph, 0))
    handles, _ = _checked(driver.cuGraphGetNodes(graph, count)) if count else ([], 0)
    return [_described_node(handle, memory) for handle in handles]


def _described_node(handle: Any, memory: AddressMap) -> Node:
    (node_type,) = _checked(driver.cuGraphNodeGetType(handle))
    kind = name = node_type.name.removeprefix(_TYPE_PREFIX).replace("_", "").lower()
    arguments: list[Argument] = []
    if kind == "kernel":
        (parameters,) = _checked(driver.cuGraphKernelNodeGetParams(handle))
        name = _kernel_name(parameters)
        for place, word, is_whole in _words(parameters):
            owner = memory.owner_at(word)
            is_certain = owner is not None and (is_whole or memory.declares(owner))
            arguments.append(Argument(place, word, owner, is_certain=is_certain))
    elif kind == "memcpy":
        (copy,) = _checked(driver.cuGraphMemcpyNodeGetParams(handle))
        for side in ("src", "dst"):
            address = _copied_at(copy, side)
            arguments.append(Argument(side, address, memory.owner_at(address), is_written=side == "dst"))
    elif kind == "memset":
        (fill,) = _checked(driver.cuGraphMemsetNodeGetParams(handle))
        arguments.append(Argument("dst", int(fill.dst), memory.owner_at(int(fill.dst)), is_written=True))
    known = tuple(a for a in arguments if a.owner is not None or memory.is_ownerless(a.address or 0))
    return Node(name, kind, arguments=known)


def _copied_at(copy: Any, side: str) -> int:
    """Return where one side of a copy begins."""
    on_host = getattr(copy, f"{side}MemoryType") == driver.CUmemorytype.CU_MEMORYTYPE_HOST
    x, y, z, pitch, height = (int(getattr(copy, side + n)) for n in ("XInBytes", "Y", "Z", "Pitch", "Height"))
    return int(getattr(copy, side + ("Host" if on_host else "Device"))) + (z * height + y) * pitch + x


def _kernel_name(parameters: Any) -> str:
    if int(parameters.func):
        (name,) = _checked(driver.cuFuncGetName(parameters.func))
    else:
        (name,) = _checked(driver.cuKernelGetName(parameters.kern))
    return name.decode() if isinstance(name, bytes) else str(name)


def _words(parameters: Any) -> Iterator[tuple[str, int, bool]]:
    """Yield the 8-byte words of a kernel's parameters, and whether one is all of a parameter or a part of a struct."""
    if not int(parameters.kernelParams):
        return
    is_function = bool(int(parameters.func))
    info = driver.cuFuncGetParamInfo if is_function else driver.cuKernelGetParamInfo
    handle = parameters.func if is_function else parameters.kern
    index = 0
    while True:
        error, _, size = info(handle, index)
        if error == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
            return  # past the last one
        _checked((error,))
        values = ctypes.c_uint64.from_address(int(parameters.kernelParams) + index * _WORD_BYTES).value
        if values:
            for begin in range(0, size - _WORD_BYTES + 1, _WORD_BYTES):
                yield f"{index}+{begin}", ctypes.c_uint64.from_address(values + begin).value, size == _WORD_BYTES
        index += 1


def _checked(answer: tuple) -> tuple:
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"the CUDA driver refused to describe a graph: {error.name}")
    return tuple(values)
