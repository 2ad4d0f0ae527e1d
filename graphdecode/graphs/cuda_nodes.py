"""What a captured CUDA graph holds, as the driver tells it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from graphdecode.graphs.step_graph import Node

try:
    from cuda.bindings import driver, runtime
except ImportError:  # without cuda-python graphs are captured and replayed all the same
    driver = runtime = None

_TYPE_PREFIX = "cudaGraphNodeType"


def nodes_of(raw_graph: int) -> tuple[Counter[str], list[Node]]:
    """Return how many nodes of each kind a `cudaGraph_t` has, and the nodes; nothing without cuda-python.

    Kernels are named by their function, other nodes by their kind. Triton's kernels are known to the driver interface
    only: the runtime's would fail on them.

    Raises:
        RuntimeError: the driver refused to answer.
    """
    kinds: Counter[str] = Counter()
    nodes: list[Node] = []
    if runtime is None:
        return kinds, nodes
    _, count = _checked(runtime.cudaGraphGetNodes(raw_graph, numNodes=0))
    handles, _ = _checked(runtime.cudaGraphGetNodes(raw_graph, numNodes=count)) if count else ([], 0)
    for handle in handles:
        (node_type,) = _checked(runtime.cudaGraphNodeGetType(handle))
        kind = node_type.name.removeprefix(_TYPE_PREFIX).lower()
        kinds[kind] += 1
        nodes.append(Node(_kernel_name(handle) if kind == "kernel" else kind))
    return kinds, nodes


def _kernel_name(handle: Any) -> str:
    (parameters,) = _checked(driver.cuGraphKernelNodeGetParams(driver.CUgraphNode(init_value=int(handle))))
    if int(parameters.func):
        (name,) = _checked(driver.cuFuncGetName(parameters.func))
    else:
        (name,) = _checked(driver.cuKernelGetName(parameters.kern))
    return name.decode() if isinstance(name, bytes) else str(name)


def _checked(answer: tuple) -> tuple:
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"the CUDA driver refused to describe a graph: {error.name}")
    return tuple(values)
