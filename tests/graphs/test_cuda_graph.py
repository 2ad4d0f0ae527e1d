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
from graphdecode.graphs import StalePointerError, cuda_memory, cuda_nodes
from graphdecode.graphs.audit import stale_pointers
from graphdecode.graphs.cuda_memory import NOT_OF_TORCH, OTHERS, POOL, AddressMap, is_mapped
from graphdecode.graphs.owners import Owners
from graphdecode.graphs.step_graph import Node

real = pytest.importorskip("cuda.bindings.driver")

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
    """A copy, a fill, and a kernel of a pointer, a number and a struct, as the driver would describe them."""

    def __init__(self, pointer: int, in_struct: int) -> None:
        self.values = [
            ctypes.c_uint64(pointer),
            ctypes.c_int32(5),
            (ctypes.c_uint64 * 3)(9, in_struct, 11),
        ]
        self.table = (ctypes.c_uint64 * 3)(*(ctypes.addressof(value) for value in self.values))
        self.sizes = [8, 4, 24]
        self.CUresult, self.CUgraph, self.CUmemorytype = real.CUresult, real.CUgraph, real.CUmemorytype
        kinds = {100: "MEMCPY", 101: "MEMSET", 102: "KERNEL"}
        self.cuGraphGetNodes = lambda graph, count: (0, list(kinds) if count else None, len(kinds))
        self.cuGraphNodeGetType = lambda node: (0, getattr(real.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{kinds[node]}"))
        parameters = SimpleNamespace(func=1, kern=0, kernelParams=ctypes.addressof(self.table))
        self.cuGraphKernelNodeGetParams = lambda node: (0, parameters)
        self.cuFuncGetName = lambda function: (0, b"decode_kernel")
        self.copy, self.fill = real.CUDA_MEMCPY3D(), real.CUDA_MEMSET_NODE_PARAMS()
        self.copy.srcMemoryType = self.copy.dstMemoryType = real.CUmemorytype.CU_MEMORYTYPE_DEVICE
        self.cuGraphMemcpyNodeGetParams = lambda node: (0, self.copy)
        self.cuGraphMemsetNodeGetParams = lambda node: (0, self.fill)
        self.CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2)
        self.cuPointerGetAttribute = lambda attribute, address: (0 if address == pointer else 1, None)

    def cuFuncGetParamInfo(self, function: int, index: int) -> tuple:
        return (0, 0, self.sizes[index]) if index < len(self.sizes) else (real.CUresult.CUDA_ERROR_INVALID_VALUE,) * 3

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for module in (cuda_nodes, cuda_memory):
            patch.setattr(module, "driver", self)


class Captured:
    """A graph of these nodes, at whose memory somebody looks later."""

    def __init__(self, nodes: list[Node], later: AddressMap) -> None:
        self.nodes = nodes
        self.problem_finder = lambda owners: later.problem_of


def segment_of(begin: int, state: str) -> dict:
    blocks = [{"size": 4096, "state": state}]
    return {"address": begin, "total_size": 4096, "segment_pool_id": (0, 0), "blocks": blocks}


def test_a_kernel_is_described_by_its_name_and_the_addresses_in_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = make_buffers("cpu")
    FakeDriver(buffers.x.data_ptr(), buffers.y.data_ptr() + 16).install(monkeypatch)
    memory = AddressMap(Owners(buffers), (0, 1), [])
    copy, fill, kernel = cuda_nodes.nodes_of(1, memory)
    assert (copy.name, copy.kind, copy.arguments) == ("memcpy", "memcpy", ())
    assert (fill.name, fill.kind, fill.arguments) == ("memset", "memset", ())
    assert (kernel.name, kernel.kind) == ("decode_kernel", "kernel")
    found = [(argument.name, argument.address, argument.owner) for argument in kernel.arguments]
    assert found == [("0+0", buffers.x.data_ptr(), "x"), ("2+8", buffers.y.data_ptr() + 16, "y")]
    assert memory.bytes_touched([copy, kernel, kernel]) == 2 * (buffers.x.nbytes + buffers.y.nbytes)


def test_copies_and_fills_are_described_by_the_addresses_that_they_read_and_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffers = make_buffers("cpu")
    fake = FakeDriver(0, 0)
    fake.install(monkeypatch)
    fake.copy.srcDevice = real.CUdeviceptr(buffers.x.data_ptr())
    fake.copy.srcXInBytes, fake.copy.srcY, fake.copy.srcPitch = 8, 2, 64
    fake.copy.dstMemoryType, fake.copy.dstHost = real.CUmemorytype.CU_MEMORYTYPE_HOST, buffers.y.data_ptr()
    fake.fill.dst = real.CUdeviceptr(buffers.y.data_ptr() + 4)
    memory = AddressMap(Owners(buffers), (0, 1), [])
    copy, fill, _ = cuda_nodes.nodes_of(1, memory)
    source, target = copy.arguments
    assert (source.name, source.address, source.owner) == ("src", buffers.x.data_ptr() + 2 * 64 + 8, "x")
    assert (target.name, target.address, target.owner) == ("dst", buffers.y.data_ptr(), "y")
    assert [a.is_written for a in (source, target, *fill.arguments)] == [False, True, True]
    assert [(a.address, a.owner) for a in fill.arguments] == [(buffers.y.data_ptr() + 4, "y")]
    moved = AddressMap(Owners(make_buffers("cpu")), (0, 1), [])
    found = list(stale_pointers(4, Captured([copy, fill], moved), Owners(buffers)))
    assert [(pointer.node, pointer.argument, pointer.owner) for pointer in found] == [
        ("memcpy", "src", "x"),
        ("memcpy", "dst", "y"),
        ("memset", "dst", "y"),
    ]
    assert all(pointer.is_certain for pointer in found)


def test_an_address_that_nobody_owns_is_reported_and_a_number_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = 3 << 40
    FakeDriver(lost, 77).install(monkeypatch)
    segment = {"address": lost - 512, "total_size": 2048, "segment_pool_id": (0, 0), "blocks": []}
    memory = AddressMap(Owners(make_buffers("cpu")), (0, 1), [segment], is_mapped)
    *_, kernel = cuda_nodes.nodes_of(1, memory)
    assert [(argument.name, argument.address, argument.owner) for argument in kernel.arguments] == [("0+0", lost, None)]
    (found,) = stale_pointers(4, Captured([kernel], memory), Owners(make_buffers("cpu")))
    assert str(found) == f"bucket 4: decode_kernel, argument 0+0 ({lost:#x}): nobody owned the memory there at capture"
    assert not found.is_certain
    assert is_mapped(lost)
    assert not is_mapped(lost + 1)
    assert not is_mapped(5)


def test_what_may_be_padding_of_a_struct_is_reported_and_only_an_owner_by_name_makes_it_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding holds what stood there before, an address that was live at capture for instance, and is freed later."""
    live, buffers = 3 << 40, make_buffers("cpu")
    at_capture = AddressMap(Owners(buffers), (0, 1), [segment_of(live, "active_allocated")])
    later = AddressMap(Owners(make_buffers("cpu")), (0, 1), [segment_of(live, "inactive")])
    certain = {}
    for name, pointer, in_struct in (("others", live, live + 8), ("slots", buffers.x.data_ptr(), buffers.y.data_ptr())):
        FakeDriver(pointer, in_struct).install(monkeypatch)
        *_, kernel = cuda_nodes.nodes_of(1, at_capture)
        found = stale_pointers(4, Captured([kernel], later), Owners(buffers))
        certain[name] = {pointer.argument: pointer.is_certain for pointer in found}
    assert certain == {"others": {"0+0": True, "2+8": False}, "slots": {"0+0": True, "2+8": True}}


def test_a_driver_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusal(int):
        name = "CUDA_ERROR_NOT_SUPPORTED"

    fake = FakeDriver(0, 0)
    fake.cuGraphNodeGetType = lambda node: (Refusal(801), None)
    fake.install(monkeypatch)
    memory = AddressMap(Owners(make_buffers("cpu")), (0, 1), [])
    with pytest.raises(RuntimeError, match="refused to describe a graph: CUDA_ERROR_NOT_SUPPORTED"):
        cuda_nodes.nodes_of(1, memory)
    with pytest.warns(RuntimeWarning, match="CUDA_ERROR_NOT_SUPPORTED"):
        assert cuda_nodes.described(1, memory) == []


@torch.library.custom_op("graphdecode_tests::synchronising", mutates_args={"x"})
def synchronising(x: Tensor) -> None:
    """Do, where no observer looks, what no capture allows."""
    x.add_(1.0)
    torch.cuda.synchronize()


@torch.library.custom_op("graphdecode_tests::add_hidden", mutates_args={"y"})
def add_hidden(y: Tensor, x: Tensor) -> None:
    """Read, where no observer looks, memory that is no part of the step."""
    torch.add(x, HIDDEN[0][:64], out=y)


HIDDEN: list[Tensor] = []


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
    assert not [pointer for pointer in graphs.audit() if pointer.is_certain]
    buffers.y.data = torch.zeros_like(buffers.y)
    assert {pointer.owner for pointer in graphs.audit() if pointer.is_certain} == {"y"}


@pytest.mark.gpu
def test_the_audit_names_memory_that_was_freed_and_strict_graphs_refuse_it(weight: Tensor) -> None:
    HIDDEN.append(torch.ones(1 << 20, device="cuda"))  # too large to share its segment
    graphs = GraphManager(lambda batch: add_hidden(batch.y, batch.x), make_buffers("cuda"), [CAPACITY], strict=True)
    graphs.capture(progress=False)
    graphs.replay(CAPACITY)
    assert not [pointer for pointer in graphs.audit() if pointer.is_certain]
    HIDDEN.clear()
    torch.cuda.synchronize()
    assert OTHERS in {pointer.owner for pointer in graphs.audit()}
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
