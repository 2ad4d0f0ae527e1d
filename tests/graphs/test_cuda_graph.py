"""What is particular to CUDA graphs: nodes and pointers from the driver, and captures that the driver refuses."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphdecode import CaptureError, GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch
from graphdecode.graphs import StalePointerError
from graphdecode.graphs.inspect.nodes import NOT_OF_TORCH, OTHERS, POOL, AddressMap
from graphdecode.graphs.inspect.owners import Owners
from graphdecode.kernels.norm.rms_norm import rms_norm

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


@torch.library.custom_op("graphdecode_tests::synchronizing", mutates_args={"x"})
def synchronizing(x: Tensor) -> None:
    """Do, where no observer looks, what no capture allows."""
    x.add_(1.0)
    torch.cuda.synchronize()


@torch.library.custom_op("graphdecode_tests::add_hidden", mutates_args={"y"})
def add_hidden(y: Tensor, x: Tensor) -> None:
    """Read, where no observer looks, memory that is no part of the step, by a kernel that takes its address whole."""
    rms_norm(y, x, HIDDEN[0][:64], 1e-6)


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
        synchronizing(batch.x)

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
@pytest.mark.alone
def test_a_hundred_captures_leave_no_memory_behind_in_torch_and_in_the_driver(step, weight: Tensor) -> None:
    buffers = make_buffers("cuda")

    def capture_and_close() -> tuple[int, int]:
        graphs = GraphManager(step, buffers, [1, 2, CAPACITY], constants=[weight])
        graphs.capture(progress=False)
        graphs.replay(2)
        torch.cuda.synchronize()
        graphs.close()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]

    reserved, free = [capture_and_close() for _ in range(10)][-1]
    reserved_later, free_later = [capture_and_close() for _ in range(100)][-1]
    assert reserved_later <= reserved
    assert free_later >= free - (2 << 20)


@pytest.mark.gpu
def test_a_capture_beside_a_thread_that_allocates(step, weight: Tensor) -> None:
    stop, failures = threading.Event(), []

    def allocate() -> None:
        while not stop.is_set():
            try:
                torch.ones(1 << 20, device="cuda").sum().item()  # torch's generator is the capture's
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
    with pytest.raises(StalePointerError, match="nothing"):
        graphs.replay(CAPACITY)
