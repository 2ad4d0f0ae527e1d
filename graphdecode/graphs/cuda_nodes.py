"""What a captured CUDA graph holds, as the driver tells it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from graphdecode.graphs.step_graph import Argument, Node

try:
    from cuda.bindings import driver, runtime
except ImportError:  # without cuda-python graphs are captured and replayed all the same
    driver = runtime = None

_TYPE_PREFIX = "cudaGraphNodeType"
_WORD_BYTES = 8
_LOWEST_ADDRESS = 1 << 20  # smaller numbers are sizes and counts


def is_mapped(address: int) -> bool:
    """Whether the driver knows of memory at an address; without cuda-python, False."""
    if driver is None or address < _LOWEST_ADDRESS:
        return False
    error, _ = driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    return int(error) == 0


def nodes_of(
    raw_graph: int, owner_at: Callable[[int], str | None], is_ownerless: Callable[[int], bool] = lambda _: False
) -> list[Node]:
    """Return the nodes of a `cudaGraph_t`; none without cuda-python.

    Kernels are named by their function, other nodes by their kind. Kernels are asked for through the driver's
    interface, for the runtime's does not know Triton's. A kernel's arguments are those 8-byte words of its parameters
    that are an address, whether somebody owns it or nobody does.

    Args:
        raw_graph: the handle.
        owner_at: says who owns an address; None if nobody does, or it is none.
        is_ownerless: whether it is an address, and nobody owns it.

    Raises:
        RuntimeError: the driver refused to answer.
    """
    if runtime is None:
        return []
    _, count = _checked(runtime.cudaGraphGetNodes(raw_graph, numNodes=0))
    handles, _ = _checked(runtime.cudaGraphGetNodes(raw_graph, numNodes=count)) if count else ([], 0)
    nodes = []
    for handle in handles:
        (node_type,) = _checked(runtime.cudaGraphNodeGetType(handle))
        kind = node_type.name.removeprefix(_TYPE_PREFIX).lower()
        if kind == "kernel":
            (parameters,) = _checked(driver.cuGraphKernelNodeGetParams(driver.CUgraphNode(init_value=int(handle))))
            words = [(name, word, owner_at(word)) for name, word in _words(parameters)]
            arguments = tuple(
                Argument(name, word, owner) for name, word, owner in words if owner is not None or is_ownerless(word)
            )
            nodes.append(Node(_kernel_name(parameters), kind, arguments=arguments))
        else:
            nodes.append(Node(kind, kind))
    return nodes


def _kernel_name(parameters: Any) -> str:
    if int(parameters.func):
        (name,) = _checked(driver.cuFuncGetName(parameters.func))
    else:
        (name,) = _checked(driver.cuKernelGetName(parameters.kern))
    return name.decode() if isinstance(name, bytes) else str(name)


def _words(parameters: Any) -> Iterator[tuple[str, int]]:
    """Yield the 8-byte words of a kernel's parameters; a parameter may be a struct of several."""
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
                yield f"{index}+{begin}", ctypes.c_uint64.from_address(values + begin).value
        index += 1


def _checked(answer: tuple) -> tuple:
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"the CUDA driver refused to describe a graph: {error.name}")
    return tuple(values)
