"""What is particular to CUDA graphs: nodes and pointers from the driver, and captures that the driver refuses."""

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from graphdecode import CaptureError, GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch
from graphdecode.graphs import StalePointerError, cuda_nodes
from graphdecode.graphs.audit import stale_pointers
from graphdecode.graphs.cuda import CudaStepGraph
from graphdecode.graphs.cuda_memory import NOT_OF_TORCH, OTHERS, POOL, AddressMap
from graphdecode.graphs.owners import Owners

CAPACITY = 8


def make_buffers(device: str) -> StepBuffers:
    slots = [Slot("x", ("batch", 64), torch.float32), Slot("y", ("batch", 64), torch.float32)]
    return StepBuffers(slots, max_batch_size=CAPACITY, device=device)


def test_an_address_belongs_to_a_slot_a_constant_the_pool_or_others() -> None:
    buffers, weight = make_buffers("cpu"), torch.zeros(16)
    base = 1 << 40
    blocks = [
        {"size": 512, "state": "active_allocated"},
        {"size": 512, "state": "inactive"},
        {"size": 1024, "state": "active_allocated"},
    ]
    segments = [
        {"address": base + 8192, "total_size": 4096, "segment_pool_id": (0, 3), "blocks": []},
        {"address": base, "total_size": 2048, "segment_pool_id": (0, 0), "blocks": blocks},
    ]
    memory = AddressMap(Owners(buffers, [weight]), (0, 3), segments)
    assert memory.owner_at(buffers.y.data_ptr()) == "y"
    assert memory.owner_at(buffers.y[3].data_ptr() + 4) == "y"
    assert memory.owner_at(weight.data_ptr() + weight.nbytes - 1) == "constants[0]"
    owners = {offset: memory.owner_at(base + offset) for offset in (-1, 0, 511, 512, 1023, 1024, 2047, 2048)}
    assert owners == {-1: None, 0: OTHERS, 511: OTHERS, 512: None, 1023: None, 1024: OTHERS, 2047: OTHERS, 2048: None}
    assert [memory.owner_at(base + offset) for offset in (8191, 8192, 12287, 12288)] == [None, POOL, POOL, None]
    assert memory.owner_at(7) is None
    ownerless = [offset for offset in (0, 511, 512, 513, 1023, 1024, 2048, 8192) if memory.is_ownerless(base + offset)]
    assert ownerless == [512, 513, 1023]
    assert not memory.is_ownerless(7)


def test_memory_of_other_libraries_is_known_to_the_driver_alone() -> None:
    base, segment = 1 << 40, {"address": 1 << 40, "total_size": 512, "segment_pool_id": (0, 0), "blocks": []}
    memory = AddressMap(Owners(make_buffers("cpu")), (0, 3), [segment], lambda address: address >= base)
    assert [memory.owner_at(base + offset) for offset in (-1, 0, 512)] == [None, None, NOT_OF_TORCH]
    assert memory.is_ownerless(base + 8)
    assert not memory.is_ownerless(base + 512)


class FakeDriver:
    """Two nodes as the driver would describe them: a copy, and a kernel with a pointer, a number and a struct."""

    def __init__(self, pointer: int, in_struct: int) -> None:
        self.values = [
            ctypes.c_uint64(pointer),
            ctypes.c_int32(5),
            (ctypes.c_uint64 * 3)(9, in_struct, 11),
        ]
        self.table = (ctypes.c_uint64 * 3)(*(ctypes.addressof(value) for value in self.values))
        self.sizes = [8, 4, 24]
        self.CUresult = SimpleNamespace(CUDA_ERROR_INVALID_VALUE=1)
        self.CUgraphNode = lambda init_value: init_value
        kinds = {100: "cudaGraphNodeTypeMemcpy", 101: "cudaGraphNodeTypeKernel"}
        self.cudaGraphGetNodes = lambda graph, numNodes: (0, list(kinds) if numNodes else None, len(kinds))
        self.cudaGraphNodeGetType = lambda node: (0, SimpleNamespace(name=kinds[node]))
        parameters = SimpleNamespace(func=1, kern=0, kernelParams=ctypes.addressof(self.table))
        self.cuGraphKernelNodeGetParams = lambda node: (0, parameters)
        self.cuFuncGetName = lambda function: (0, b"decode_kernel")
        self.CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2)
        self.cuPointerGetAttribute = lambda attribute, address: (0 if address == pointer else 1, None)

    def cuFuncGetParamInfo(self, function: int, index: int) -> tuple:
        return (0, 0, self.sizes[index]) if index < len(self.sizes) else (1, None, None)


def test_a_kernel_is_described_by_its_name_and_the_addresses_in_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = make_buffers("cpu")
    fake = FakeDriver(buffers.x.data_ptr(), buffers.y.data_ptr() + 16)
    monkeypatch.setattr(cuda_nodes, "driver", fake)
    monkeypatch.setattr(cuda_nodes, "runtime", fake)
    memory = AddressMap(Owners(buffers), (0, 1), [])
    copy, kernel = cuda_nodes.nodes_of(1, memory.owner_at)
    assert (copy.name, copy.kind, copy.arguments) == ("memcpy", "memcpy", ())
    assert (kernel.name, kernel.kind) == ("decode_kernel", "kernel")
    found = [(argument.name, argument.address, argument.owner) for argument in kernel.arguments]
    assert found == [("0+0", buffers.x.data_ptr(), "x"), ("2+8", buffers.y.data_ptr() + 16, "y")]
    assert memory.bytes_touched([copy, kernel, kernel]) == 2 * (buffers.x.nbytes + buffers.y.nbytes)


def test_an_address_that_nobody_owns_is_kept_and_a_number_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = 3 << 40
    fake = FakeDriver(lost, 77)
    monkeypatch.setattr(cuda_nodes, "driver", fake)
    monkeypatch.setattr(cuda_nodes, "runtime", fake)
    segment = {"address": lost - 512, "total_size": 2048, "segment_pool_id": (0, 0), "blocks": []}
    memory = AddressMap(Owners(make_buffers("cpu")), (0, 1), [segment], cuda_nodes.is_mapped)
    _, kernel = cuda_nodes.nodes_of(1, memory.owner_at, memory.is_ownerless)
    assert [(argument.name, argument.address, argument.owner) for argument in kernel.arguments] == [("0+0", lost, None)]
    graph = object.__new__(CudaStepGraph)
    monkeypatch.setattr(graph, "_addresses", lambda owners: memory, raising=False)
    graph.nodes = [kernel]
    (found,) = stale_pointers(4, graph, Owners(make_buffers("cpu")))
    assert str(found) == f"bucket 4: decode_kernel, argument 0+0 ({lost:#x}): nobody owned the memory there at capture"
    assert cuda_nodes.is_mapped(lost)
    assert not cuda_nodes.is_mapped(lost + 1)
    assert not cuda_nodes.is_mapped(5)


def test_a_driver_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusal(int):
        name = "CUDA_ERROR_NOT_SUPPORTED"

    fake = FakeDriver(0, 0)
    fake.cudaGraphNodeGetType = lambda node: (Refusal(801), None)
    monkeypatch.setattr(cuda_nodes, "driver", fake)
    monkeypatch.setattr(cuda_nodes, "runtime", fake)
    with pytest.raises(RuntimeError, match="refused to describe a graph: CUDA_ERROR_NOT_SUPPORTED"):
        cuda_nodes.nodes_of(1, lambda address: None)


@torch.library.custom_op("graphdecode_tests::synchronising", mutates_args={"x"})
def synchronising(x: Tensor) -> None:
    """Do, where no observer looks, what no capture allows."""
    x.add_(1.0)
    torch.cuda.synchronize()


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(64, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))


@pytest.fixture
def step(weight: Tensor) -> Callable[[Batch], None]:
    def run(batch: Batch) -> None:
        batch.y.copy_(torch.tanh(batch.x @ weight))

    return run


@pytest.mark.gpu
def test_the_report_counts_kernels_and_names_them(step, weight: Tensor) -> None:
    graphs = GraphManager(step, make_buffers("cuda"), [1, CAPACITY], constants=[weight])
    for bucket in graphs.capture(progress=False).buckets:
        assert bucket.nodes["kernel"] >= 2
        assert any("tanh" in name for name in bucket.kernels)
        assert bucket.instantiate_ms > 0


@pytest.mark.gpu
def test_a_capture_that_the_driver_refuses_names_the_line_and_leaves_the_process_fit(step, weight: Tensor) -> None:
    def broken(batch: Batch) -> None:
        step(batch)
        synchronising(batch.x)

    buffers = make_buffers("cuda")
    running = GraphManager(step, buffers, [CAPACITY], constants=[weight])
    running.capture(progress=False)
    stream = torch.cuda.current_stream()
    for _ in range(3):
        with pytest.raises(CaptureError) as caught:
            GraphManager(broken, buffers, [CAPACITY], constants=[weight]).capture(progress=False)
        assert caught.value.file == __file__
        assert caught.value.line == broken.__code__.co_firstlineno + 2
        assert torch.cuda.current_stream() == stream
        assert not torch.cuda.is_current_stream_capturing()
        running.replay(CAPACITY)
        assert torch.isfinite(torch.randn(64, 64, device="cuda") @ weight).all()
    again = GraphManager(step, buffers, [1, CAPACITY], constants=[weight])
    again.capture(progress=False)
    again.replay(3)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_hundred_captures_leave_no_memory_behind(step, weight: Tensor) -> None:
    buffers = make_buffers("cuda")

    def capture_and_close() -> int:
        graphs = GraphManager(step, buffers, [1, 2, CAPACITY], constants=[weight])
        graphs.capture(progress=False)
        graphs.replay(2)
        torch.cuda.synchronize()
        graphs.close()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    after_a_few = [capture_and_close() for _ in range(5)][-1]
    assert [capture_and_close() for _ in range(100)][-1] <= after_a_few


@pytest.mark.gpu
def test_a_capture_beside_a_thread_that_allocates(step, weight: Tensor) -> None:
    stop, failures = threading.Event(), []

    def allocate() -> None:
        while not stop.is_set():
            try:
                torch.randn(1 << 20, device="cuda").sum().item()
            except RuntimeError as error:
                failures.append(error)
                return

    other = threading.Thread(target=allocate)
    other.start()
    try:
        for _ in range(10):
            GraphManager(step, make_buffers("cuda"), [1, CAPACITY], constants=[weight]).capture(progress=False)
    finally:
        stop.set()
        other.join()
    assert not failures


@pytest.mark.gpu
def test_the_audit_names_a_kernel_whose_slot_was_moved(step, weight: Tensor) -> None:
    buffers = make_buffers("cuda")
    graphs = GraphManager(step, buffers, [CAPACITY], constants=[weight])
    graphs.capture(progress=False)
    assert graphs.audit() == []
    buffers.y.data = torch.zeros_like(buffers.y)
    assert {pointer.owner for pointer in graphs.audit()} == {"y"}


@pytest.mark.gpu
def test_the_audit_names_memory_that_was_freed_and_strict_graphs_refuse_it(weight: Tensor) -> None:
    undeclared = [torch.ones(1 << 20, device="cuda")]  # too large to share its segment

    def step(batch: Batch) -> None:
        batch.y.copy_(batch.x + undeclared[0][:64])

    graphs = GraphManager(step, make_buffers("cuda"), [CAPACITY], strict=True)
    graphs.capture(progress=False)
    graphs.replay(CAPACITY)
    assert graphs.audit() == []
    undeclared.clear()
    torch.cuda.synchronize()
    assert {pointer.owner for pointer in graphs.audit()} == {OTHERS}
    with pytest.raises(StalePointerError, match="nothing is there now"):
        graphs.replay(CAPACITY)


@pytest.mark.gpu
def test_a_hundred_captures_leave_the_drivers_memory_as_it_was(step, weight: Tensor) -> None:
    buffers = make_buffers("cuda")

    def capture_and_close() -> int:
        graphs = GraphManager(step, buffers, [1, CAPACITY], constants=[weight])
        graphs.capture(progress=False)
        graphs.replay(1)
        torch.cuda.synchronize()
        graphs.close()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    after_a_few = [capture_and_close() for _ in range(10)][-1]
    assert [capture_and_close() for _ in range(100)][-1] >= after_a_few - (2 << 20)
