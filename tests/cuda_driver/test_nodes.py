"""What a graph holds, as the driver tells it: kernels by name, and the addresses that each node reads and writes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda
from cuda_driver.allocator import done
from cuda_driver.stand_in import Driver
from cuda_driver.torch_device import Device

from graphdecode import GraphManager, Slot, StepBuffers
from graphdecode.graphs import StalePointerError
from graphdecode.graphs.backend import stale_pointers
from graphdecode.graphs.inspect import nodes as cuda_nodes
from graphdecode.graphs.inspect.nodes import NOT_OF_TORCH, OTHERS, AddressMap, is_mapped
from graphdecode.graphs.inspect.owners import Owners
from graphdecode.graphs.step_graph import Node

CAPACITY = 4
KERNEL_SIZES = [8, 4, 24]  # a pointer, a number, and a struct


def make_buffers() -> StepBuffers:
    slots = [Slot("x", ("batch", 64), torch.float32), Slot("y", ("batch", 64), torch.float32)]
    return StepBuffers(slots, max_batch_size=CAPACITY, device="cpu")


class Captured:
    """A graph of these nodes, at whose memory somebody looks later."""

    def __init__(self, nodes: list[Node], later: AddressMap) -> None:
        self.nodes = nodes
        self.problem_finder = lambda owners: later.problem_of


def segment_of(begin: int, state: str) -> dict:
    blocks = [{"size": 4096, "state": state}]
    return {"address": begin, "total_size": 4096, "segment_pool_id": (0, 0), "blocks": blocks}


@pytest.fixture
def kernel_of(driver: Driver) -> Any:
    """A graph of one kernel, given the pointer and what stands in the middle of its struct."""
    graphs: list[Any] = []

    def make(pointer: int, in_struct: int, *, as_kernel: bool = False) -> int:
        graph = done(cuda.cuGraphCreate(0))
        graphs.append(graph)
        handle = driver.kernel_of("decode_kernel", lambda words: None, KERNEL_SIZES)
        params = cuda.CUDA_KERNEL_NODE_PARAMS()
        if as_kernel:
            params.kern = cuda.CUkernel(handle)
        else:
            params.func = cuda.CUfunction(handle)
        for size in ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"):
            setattr(params, size, 1)
        values = [ctypes.c_uint64(pointer), ctypes.c_int32(5), (ctypes.c_uint64 * 3)(9, in_struct, 11)]
        table = (ctypes.c_uint64 * 3)(*(ctypes.addressof(value) for value in values))
        params.kernelParams = ctypes.addressof(table)
        done(cuda.cuGraphAddKernelNode(graph, None, 0, params))
        return int(graph)

    yield make
    for graph in graphs:
        done(cuda.cuGraphDestroy(graph))


@pytest.mark.parametrize("as_kernel", [False, True])
def test_a_kernel_is_described_by_its_name_and_the_addresses_in_its_parameters(kernel_of, as_kernel):
    buffers = make_buffers()
    graph = kernel_of(buffers.x.data_ptr(), buffers.y.data_ptr() + 16, as_kernel=as_kernel)
    memory = AddressMap(Owners(buffers), (0, 1), [])
    (kernel,) = cuda_nodes.nodes_of(graph, memory)
    assert (kernel.name, kernel.kind) == ("decode_kernel", "kernel")
    found = [(argument.name, argument.address, argument.owner) for argument in kernel.arguments]
    assert found == [("0+0", buffers.x.data_ptr(), "x"), ("2+8", buffers.y.data_ptr() + 16, "y")]
    assert memory.bytes_touched([kernel, kernel]) == 2 * (buffers.x.nbytes + buffers.y.nbytes)


def test_copies_and_fills_are_described_by_the_addresses_that_they_read_and_write(device: Device) -> None:
    buffers, lost = make_buffers(), make_buffers()
    graph, (context,) = done(cuda.cuGraphCreate(0)), (done(cuda.cuCtxGetCurrent()),)
    copy, fill = cuda.CUDA_MEMCPY3D(), cuda.CUDA_MEMSET_NODE_PARAMS()
    copy.srcMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.srcXInBytes, copy.srcY, copy.srcPitch = buffers.x.data_ptr(), 8, 2, 64
    copy.dstMemoryType, copy.dstHost = cuda.CUmemorytype.CU_MEMORYTYPE_HOST, buffers.y.data_ptr()
    copy.WidthInBytes, copy.Height, copy.Depth = 4, 1, 1
    fill.dst, fill.elementSize, fill.width, fill.height = buffers.y.data_ptr() + 4, 4, 1, 1
    done(cuda.cuGraphAddMemcpyNode(graph, None, 0, copy, context))
    done(cuda.cuGraphAddMemsetNode(graph, None, 0, fill, context))
    copied, filled = cuda_nodes.nodes_of(int(graph), AddressMap(Owners(buffers), (0, 1), []))
    source, target = copied.arguments
    assert (source.name, source.address, source.owner) == ("src", buffers.x.data_ptr() + 2 * 64 + 8, "x")
    assert (target.name, target.address, target.owner) == ("dst", buffers.y.data_ptr(), "y")
    assert [a.is_written for a in (source, target, *filled.arguments)] == [False, True, True]
    assert [(a.address, a.owner) for a in filled.arguments] == [(buffers.y.data_ptr() + 4, "y")]
    moved = AddressMap(Owners(lost), (0, 1), [])
    found = list(stale_pointers(4, Captured([copied, filled], moved), Owners(buffers)))
    assert [(pointer.node, pointer.argument, pointer.owner) for pointer in found] == [
        ("memcpy", "src", "x"),
        ("memcpy", "dst", "y"),
        ("memset", "dst", "y"),
    ]
    assert all(pointer.is_certain for pointer in found)
    done(cuda.cuGraphDestroy(graph))


def test_an_address_that_nobody_owns_is_reported_and_a_number_is_not(kernel_of: Callable[..., int]) -> None:
    lost = 3 << 40
    segment = {"address": lost - 512, "total_size": 2048, "segment_pool_id": (0, 0), "blocks": []}
    memory = AddressMap(Owners(make_buffers()), (0, 1), [segment], is_mapped)
    (kernel,) = cuda_nodes.nodes_of(kernel_of(lost, 77), memory)
    assert [(argument.name, argument.address, argument.owner) for argument in kernel.arguments] == [("0+0", lost, None)]
    (found,) = stale_pointers(4, Captured([kernel], memory), Owners(make_buffers()))
    assert str(found) == f"bucket 4: decode_kernel, argument 0+0 ({lost:#x}): the memory had no owner at capture"
    assert not found.is_certain


def test_memory_of_other_libraries_is_known_to_the_driver_alone(kernel_of: Callable[..., int]) -> None:
    address = int(done(cuda.cuMemAlloc(4096)))
    assert is_mapped(address)
    assert is_mapped(address + 4095)
    assert not is_mapped(5)
    memory = AddressMap(Owners(make_buffers()), (0, 1), [], is_mapped)
    (kernel,) = cuda_nodes.nodes_of(kernel_of(address, 77), memory)
    assert [(argument.address, argument.owner) for argument in kernel.arguments] == [(address, NOT_OF_TORCH)]
    done(cuda.cuMemFree(cuda.CUdeviceptr(address)))
    assert not is_mapped(address)


def test_what_may_be_padding_of_a_struct_is_reported_and_only_an_owner_by_name_makes_it_certain(kernel_of):
    """Padding holds what stood there before, an address that was live at capture for instance, and is freed later."""
    live, buffers = 3 << 40, make_buffers()
    at_capture = AddressMap(Owners(buffers), (0, 1), [segment_of(live, "active_allocated")])
    later = AddressMap(Owners(make_buffers()), (0, 1), [segment_of(live, "inactive")])
    certain = {}
    for name, pointer, in_struct in (("others", live, live + 8), ("slots", buffers.x.data_ptr(), buffers.y.data_ptr())):
        (kernel,) = cuda_nodes.nodes_of(kernel_of(pointer, in_struct), at_capture)
        found = stale_pointers(4, Captured([kernel], later), Owners(buffers))
        certain[name] = {pointer.argument: pointer.is_certain for pointer in found}
    assert certain == {"others": {"0+0": True, "2+8": False}, "slots": {"0+0": True, "2+8": True}}


@pytest.mark.parametrize("call", ["cuGraphGetNodes", "cuGraphNodeGetType", "cuFuncGetName", "cuFuncGetParamInfo"])
def test_a_driver_that_refuses_is_quoted(kernel_of: Callable[..., int], driver: Driver, call: str) -> None:
    graph, memory = kernel_of(0, 0), AddressMap(Owners(make_buffers()), (0, 1), [])
    driver.fail(call)
    with pytest.warns(RuntimeWarning, match="refused to describe a graph: CUDA_ERROR_NOT_SUPPORTED"):
        assert cuda_nodes.nodes_of(graph, memory) == []
    driver.fail(None)


@torch.library.custom_op("graphdecode_tests::add_unseen", mutates_args={"y"})
def add_unseen(y: torch.Tensor, x: torch.Tensor) -> None:
    """Read, where no observer looks, memory that is no part of the step."""
    torch.add(x, HIDDEN[0][:64], out=y)


HIDDEN: list[torch.Tensor] = []


def test_the_audit_names_a_kernel_whose_slot_was_moved(device: Device) -> None:
    buffers, weight = make_buffers(), torch.eye(64)
    graphs = GraphManager(lambda batch: batch.y.copy_(batch.x @ weight), buffers, [CAPACITY], constants=[weight])
    graphs.capture(progress=False)
    assert graphs.audit() == []
    held = buffers.y.data
    buffers.y.data = torch.zeros_like(buffers.y)
    assert {(pointer.node, pointer.owner) for pointer in graphs.audit()} == {("aten.copy_.default", "y")}
    del held
    graphs.close()


def test_the_audit_names_memory_that_was_freed_and_strict_graphs_refuse_it(device: Device) -> None:
    HIDDEN.append(torch.ones(1 << 16))  # too large to share its segment
    hidden_at = HIDDEN[0].data_ptr()

    def step(batch: Any) -> None:
        add_unseen(batch.y, batch.x)
        launch_over(device, hidden_at)

    graphs = GraphManager(step, make_buffers(), [CAPACITY], strict=True)
    graphs.capture(progress=False)
    graphs.replay(CAPACITY)
    HIDDEN.clear()
    torch.cuda.empty_cache()
    assert OTHERS in {pointer.owner for pointer in graphs.audit()}
    with pytest.raises(StalePointerError, match="and is nothing now"):
        graphs.replay(CAPACITY)
    graphs.close()


def launch_over(device: Device, address: int) -> None:
    """Launch a kernel of nobody's on an address, as a library of kernels does."""
    kernel = cuda.CUfunction(device.driver.kernel("unseen", lambda words: None, 1))
    sizes = (1, 1, 1, 1, 1, 1, 0)
    done(cuda.cuLaunchKernel(kernel, *sizes, device.current.handle, ((address,), (ctypes.c_uint64,)), 0))
