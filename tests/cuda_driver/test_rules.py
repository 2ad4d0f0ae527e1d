"""The stand-in itself: it keeps the driver's rules, and complains of what the driver leaves undefined."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from cuda.bindings import driver as cuda
from cuda_driver.calls import (
    Code,
    add_kernel,
    ask,
    conditional,
    context,
    int32_at,
    kernel_params,
    memory_copy,
    memory_set,
    run_once,
)
from cuda_driver.stand_in import Driver, device_code

NODE_TYPES = {
    "kernel": "KERNEL",
    "memcpy": "MEMCPY",
    "memset": "MEMSET",
    "child": "GRAPH",
    "conditional": "CONDITIONAL",
    "record": "EVENT_RECORD",
    "wait": "WAIT_EVENT",
    "host": "HOST",
    "empty": "EMPTY",
}


class Parts:
    """A graph with a node of each kind, in a chain, and what these need."""

    def __init__(self, driver: Driver) -> None:
        self.told: list[str] = []
        self.memory = ask(cuda.cuMemAlloc, 64)
        self.event = ask(cuda.cuEventCreate, 0)
        self.graph, self.child = ask(cuda.cuGraphCreate, 0), ask(cuda.cuGraphCreate, 0)
        self.handle = ask(cuda.cuGraphConditionalHandleCreate, self.graph, context(), 1, 1)
        self.kernel = driver.kernel("told", lambda words: self.told.append(f"kernel {words[0]}"), 1)
        self.host = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _data: self.told.append("host"))
        add_kernel(self.child, [], self.kernel, 2)
        self.last: list[Any] = []
        self.nodes = {name: self.add(name) for name in NODE_TYPES}

    def add(self, name: str) -> Any:
        graph, after, count = self.graph, self.last, len(self.last)
        if name == "kernel":
            node = add_kernel(graph, after, self.kernel, 1)
        elif name == "memcpy":
            copy = memory_copy(int(self.memory) + 32, self.memory, 4)
            node = ask(cuda.cuGraphAddMemcpyNode, graph, after, count, copy, context())
        elif name == "memset":
            node = ask(cuda.cuGraphAddMemsetNode, graph, after, count, memory_set(self.memory, 7), context())
        elif name == "child":
            node = ask(cuda.cuGraphAddChildGraphNode, graph, after, count, self.child)
        elif name == "conditional":
            node = ask(cuda.cuGraphAddNode, graph, after, None, count, conditional(self.handle, "IF"))
        elif name == "record":
            node = ask(cuda.cuGraphAddEventRecordNode, graph, after, count, self.event)
        elif name == "wait":
            node = ask(cuda.cuGraphAddEventWaitNode, graph, after, count, self.event)
        elif name == "host":
            params = cuda.CUDA_HOST_NODE_PARAMS()
            params.fn = cuda.CUhostFn(ctypes.cast(self.host, ctypes.c_void_p).value)
            node = ask(cuda.cuGraphAddHostNode, graph, after, count, params)
        else:
            node = ask(cuda.cuGraphAddEmptyNode, graph, after, count)
        self.last = [node]
        return node

    def destroy(self) -> None:
        for graph in (self.graph, self.child):
            ask(cuda.cuGraphDestroy, graph)
        ask(cuda.cuEventDestroy, self.event)
        ask(cuda.cuMemFree, self.memory)


def test_nodes_of_every_kind_are_built_looked_at_and_run(driver: Driver) -> None:
    parts = Parts(driver)
    nodes, count = ask(cuda.cuGraphGetNodes, parts.graph, len(NODE_TYPES))
    assert count == len(NODE_TYPES)
    kinds = [ask(cuda.cuGraphNodeGetType, node).name.removeprefix("CU_GRAPH_NODE_TYPE_") for node in nodes]
    assert kinds == list(NODE_TYPES.values())
    assert ask(cuda.cuGraphMemsetNodeGetParams, parts.nodes["memset"]).value == 7
    assert ask(cuda.cuGraphMemcpyNodeGetParams, parts.nodes["memcpy"]).WidthInBytes == 4
    assert ask(cuda.cuGraphKernelNodeGetParams, parts.nodes["kernel"]).gridDimX == 1
    from_nodes, to_nodes, _, edges = ask(cuda.cuGraphGetEdges, parts.graph, len(NODE_TYPES))
    assert edges == len(NODE_TYPES) - 1
    assert [int(node) for node in to_nodes[: edges - 1]] == [int(node) for node in from_nodes[1:edges]]
    run_once(parts.graph)
    assert parts.told == ["kernel 1", "kernel 2", "host"]
    assert int32_at(parts.memory) == 7
    parts.destroy()


def test_a_child_graph_is_a_copy_of_the_moment(driver: Driver) -> None:
    told: list[int] = []
    kernel = driver.kernel("told", lambda words: told.append(words[0]), 1)
    child, outer = ask(cuda.cuGraphCreate, 0), ask(cuda.cuGraphCreate, 0)
    first = add_kernel(child, [], kernel, 1)
    ask(cuda.cuGraphAddChildGraphNode, outer, None, 0, child)
    add_kernel(child, [first], kernel, 2)
    ask(cuda.cuGraphDestroy, child)
    run_once(outer)
    assert told == [1]
    ask(cuda.cuGraphDestroy, outer)


@pytest.mark.parametrize("seed", range(1, 12))
def test_nodes_run_in_any_order_that_their_edges_allow(driver: Driver, seed: int) -> None:
    told: list[int] = []
    kernel = driver.kernel("told", lambda words: told.append(words[0]), 1)
    graph = ask(cuda.cuGraphCreate, 0)
    first = add_kernel(graph, [], kernel, 1)
    branches = [add_kernel(graph, [first], kernel, number) for number in (2, 3)]
    add_kernel(graph, branches, kernel, 4)
    driver.seed(seed)
    run_once(graph)
    assert told in ([1, 2, 3, 4], [1, 3, 2, 4])
    ask(cuda.cuGraphDestroy, graph)


def test_both_orders_of_two_branches_come_about(driver: Driver) -> None:
    told: list[int] = []
    kernel = driver.kernel("told", lambda words: told.append(words[0]), 1)
    graph = ask(cuda.cuGraphCreate, 0)
    for number in (1, 2):
        add_kernel(graph, [], kernel, number)
    orders = set()
    for seed in range(1, 12):
        told.clear()
        driver.seed(seed)
        run_once(graph)
        orders.add(tuple(told))
    assert orders == {(1, 2), (2, 1)}
    ask(cuda.cuGraphDestroy, graph)


def refused(driver: Driver, wrong: str) -> list[tuple[Any, ...]]:
    """Return calls that break one rule, and the code that each is answered with."""
    invalid, missing = Code.CUDA_ERROR_INVALID_VALUE, Code.CUDA_ERROR_NOT_SUPPORTED
    graph, other = ask(cuda.cuGraphCreate, 0), ask(cuda.cuGraphCreate, 0)
    kernel = driver.kernel("nothing", lambda words: None, 0)
    node, elsewhere = add_kernel(graph, [], kernel), add_kernel(other, [], kernel)
    handle = ask(cuda.cuGraphConditionalHandleCreate, graph, context(), 1, 1)
    foreign = ask(cuda.cuGraphConditionalHandleCreate, other, context(), 1, 1)
    pageable = ctypes.create_string_buffer(16)
    if wrong == "a node of another graph":
        return [(cuda.cuGraphAddEmptyNode, graph, [elsewhere], 1, invalid)]
    if wrong == "a node named twice":
        return [(cuda.cuGraphAddEmptyNode, graph, [node, node], 2, invalid)]
    if wrong == "an empty grid":
        params = kernel_params(kernel)
        params.gridDimY = 0
        return [(cuda.cuGraphAddKernelNode, graph, None, 0, params, invalid)]
    if wrong == "a grid too high":
        params = kernel_params(kernel)
        params.gridDimY = 65536
        return [(cuda.cuGraphAddKernelNode, graph, None, 0, params, invalid)]
    if wrong == "a fill of memory that is not the device's":
        fill = memory_set(cuda.CUdeviceptr(ctypes.addressof(pageable)), 1)
        return [(cuda.cuGraphAddMemsetNode, graph, None, 0, fill, context(), invalid)]
    if wrong == "a copy of nothing":
        return [(cuda.cuGraphAddMemcpyNode, graph, None, 0, memory_copy(0, 0, 0), context(), invalid)]
    if wrong == "a condition of another graph":
        return [(cuda.cuGraphAddNode, graph, None, None, 0, conditional(foreign), invalid)]
    if wrong == "a condition of two nodes":
        ask(cuda.cuGraphAddNode, graph, None, None, 0, conditional(handle))
        return [(cuda.cuGraphAddNode, graph, None, None, 0, conditional(handle), invalid)]
    if wrong == "a loop with two bodies":
        return [(cuda.cuGraphAddNode, graph, None, None, 0, conditional(handle, size=2), invalid)]
    if wrong == "a condition without a node":
        return [(cuda.cuGraphInstantiate, graph, 0, invalid)]
    ask(cuda.cuGraphAddNode, other, None, None, 0, conditional(foreign))
    if wrong == "a child graph with a condition":
        return [(cuda.cuGraphAddChildGraphNode, graph, None, 0, other, missing)]
    params = conditional(handle)
    ask(cuda.cuGraphAddNode, graph, None, None, 0, params)
    body = params.conditional.phGraph_out[0]
    if wrong == "a body launched by itself":
        return [(cuda.cuGraphInstantiate, body, 0, invalid)]
    if wrong == "a body with a node for the host":
        host = cuda.CUDA_HOST_NODE_PARAMS()
        host.fn = cuda.CUhostFn(1)
        ask(cuda.cuGraphAddHostNode, body, None, 0, host)
    elif wrong == "a body with an event":
        ask(cuda.cuGraphAddEventRecordNode, body, None, 0, ask(cuda.cuEventCreate, 0))
    elif wrong == "a body with a copy from pageable memory":
        copy = memory_copy(ask(cuda.cuMemAlloc, 16), 0, 16)
        copy.srcMemoryType, copy.srcHost = cuda.CUmemorytype.CU_MEMORYTYPE_HOST, ctypes.addressof(pageable)
        ask(cuda.cuGraphAddMemcpyNode, body, None, 0, copy, context())
    elif wrong == "a body with an event in a child graph":
        child = ask(cuda.cuGraphCreate, 0)
        ask(cuda.cuGraphAddEventRecordNode, child, None, 0, ask(cuda.cuEventCreate, 0))
        ask(cuda.cuGraphAddChildGraphNode, body, None, 0, child)
    elif wrong == "a body with a kernel of another device":
        ask(cuda.cuCtxSetCurrent, ask(cuda.cuDevicePrimaryCtxRetain, 1))
        foreign_kernel = driver.kernel("elsewhere", lambda words: None, 0)
        add_kernel(body, [], foreign_kernel)
        return [(cuda.cuGraphInstantiate, graph, 0, invalid)]
    else:
        raise ValueError(wrong)
    return [(cuda.cuGraphInstantiate, graph, 0, missing)]


RULES = [
    "a node of another graph",
    "a node named twice",
    "an empty grid",
    "a grid too high",
    "a fill of memory that is not the device's",
    "a copy of nothing",
    "a condition of another graph",
    "a condition of two nodes",
    "a loop with two bodies",
    "a condition without a node",
    "a child graph with a condition",
    "a body launched by itself",
    "a body with a node for the host",
    "a body with an event",
    "a body with a copy from pageable memory",
    "a body with an event in a child graph",
    "a body with a kernel of another device",
]


@pytest.mark.parametrize("wrong", RULES)
def test_what_the_driver_refuses_is_refused(bare_driver: Driver, wrong: str) -> None:
    for function, *arguments, code in refused(bare_driver, wrong):
        ask(function, *arguments, wants=code)
    assert bare_driver.complaints() == []


COUNT_DOWN = """
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned int value);
extern "C" __global__ void count_down(cudaGraphConditionalHandle handle, int *left) {
    *left -= 1;
    cudaGraphSetConditional(handle, *left > 0);
}
"""


@pytest.mark.parametrize(("kind", "left", "behind"), [("WHILE", 5, 0), ("WHILE", 1, 0), ("IF", 5, 4)])
def test_a_kernel_of_a_module_decides_how_often_a_body_runs(driver, tmp_path, kind, left, behind):
    module = ask(cuda.cuModuleLoadData, device_code(COUNT_DOWN, {"count_down": [8, 8]}, tmp_path))
    function = ask(cuda.cuModuleGetFunction, module, b"count_down")
    assert ask(cuda.cuFuncGetName, function) == b"count_down"
    assert ask(cuda.cuFuncGetParamInfo, function, 1) == [8, 8]
    ask(cuda.cuFuncGetParamInfo, function, 2, wants=Code.CUDA_ERROR_INVALID_VALUE)
    memory = ask(cuda.cuMemAlloc, 4)
    graph = ask(cuda.cuGraphCreate, 0)
    handle = ask(cuda.cuGraphConditionalHandleCreate, graph, context(), 1, 1)
    params = conditional(handle, kind)
    ask(cuda.cuGraphAddNode, graph, None, None, 0, params)
    add_kernel(params.conditional.phGraph_out[0], [], int(function), int(handle), int(memory))
    for _ in range(2):  # the condition begins anew in each launch
        ctypes.c_int32.from_address(int(memory)).value = left
        run_once(graph)
        assert int32_at(memory) == behind
    ask(cuda.cuGraphDestroy, graph)
    ask(cuda.cuModuleUnload, module)
    ask(cuda.cuMemFree, memory)


def test_whatever_is_used_after_it_was_destroyed_is_complained_of(bare_driver: Driver) -> None:
    kernel = bare_driver.kernel("reads", lambda words: None, 1)
    graph, memory = ask(cuda.cuGraphCreate, 0), ask(cuda.cuMemAlloc, 64)
    add_kernel(graph, [], kernel, int(memory) + 8)
    launched = ask(cuda.cuGraphInstantiate, graph, 0)
    ask(cuda.cuGraphDestroy, graph)
    ask(cuda.cuGraphLaunch, launched, 0)  # what is fit to launch lives on by itself
    assert bare_driver.complaints() == []
    ask(cuda.cuGraphGetNodes, graph, 0, wants=Code.CUDA_ERROR_INVALID_VALUE)
    ask(cuda.cuMemFree, memory)
    ask(cuda.cuGraphLaunch, launched, 0)
    ask(cuda.cuMemFree, memory, wants=Code.CUDA_ERROR_INVALID_VALUE)
    ask(cuda.cuGraphExecDestroy, launched)
    ask(cuda.cuGraphLaunch, launched, 0, wants=Code.CUDA_ERROR_INVALID_VALUE)
    assert bare_driver.complaints() == [
        "cuGraphGetNodes: graph 1 was destroyed",
        "reads: touches memory 1, which was freed",
        f"cuMemFree: {int(memory):#x} was freed already",
        "cuGraphLaunch: exec 1 was destroyed",
    ]


def test_what_is_not_freed_is_reported(bare_driver: Driver) -> None:
    Parts(bare_driver)
    assert sorted(bare_driver.alive()) == ["event 1", "graph 1", "graph 2", "memory 1"]


def test_a_call_can_be_made_to_fail(bare_driver: Driver) -> None:
    bare_driver.fail("cuGraphCreate", behind=1)
    ask(cuda.cuGraphCreate, 0)
    ask(cuda.cuGraphCreate, 0, wants=Code.CUDA_ERROR_NOT_SUPPORTED)
    bare_driver.fail(None)
    ask(cuda.cuGraphCreate, 0)
