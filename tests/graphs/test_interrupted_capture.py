"""A capture that does not come to its end leaves nothing behind: no mode, no hook, no graph, no changed slot."""

import importlib.util
import sys
import threading

import pytest
import torch
from step_buffers import make_buffers
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphdecode import CaptureError, GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch
from graphdecode.graphs import check
from graphdecode.graphs.backend import warm_up
from graphdecode.graphs.inspect.owners import Owners

KERNEL_CLASSES = []
if importlib.util.find_spec("triton") is not None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    KERNEL_CLASSES = [JITFunction, InterpretedFunction]


@pytest.fixture
def buffers(device: str) -> StepBuffers:
    slots = [Slot("x", ("batch", 4), torch.float32), Slot("n", (1,), torch.int32)]
    buffers = StepBuffers(slots, max_batch_size=4, device=device)
    buffers.x.fill_(2.0)
    buffers.set_live_rows(3)
    return buffers


def good_step(batch: Batch) -> None:
    batch.x.mul_(2.0)
    batch.n.add_(1)


def interrupted(batch: Batch) -> None:
    batch.x.mul_(2.0)
    if batch.size == 2:
        raise KeyboardInterrupt


def out_of_range(batch: Batch) -> None:
    batch.x.mul_(2.0)
    if batch.size == 2:
        batch.x.index_select(1, torch.full((1,), 9, device=batch.x.device, dtype=torch.int64))
        raise ValueError("not reached on a CPU")


def reads(batch: Batch) -> None:
    batch.x.mul_(2.0)
    if batch.size == 2:
        print(batch.x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="an index out of range ends a CUDA process")
@pytest.mark.parametrize(
    ("step", "error"), [(interrupted, KeyboardInterrupt), (out_of_range, CaptureError), (reads, CaptureError)]
)
def test_a_failed_capture_restores_modes_and_slots(buffers: StepBuffers, step, error: type) -> None:
    before = {name: tensor.clone() for name, tensor in buffers.tensors.items()}
    runs = [kernel_class.run for kernel_class in KERNEL_CLASSES]
    graphs = GraphManager(step, buffers, [1, 2, 4])
    with pytest.raises(error):
        graphs.capture(progress=False)
    assert not _get_current_dispatch_mode_stack()
    assert not _get_current_function_mode_stack()
    assert [kernel_class.run for kernel_class in KERNEL_CLASSES] == runs
    assert torch.is_grad_enabled()
    assert buffers.live_row_count == 3
    for name, tensor in buffers.tensors.items():
        assert torch.equal(tensor, before[name]), name
    assert {bucket.state for bucket in graphs.report().buckets} == {"waiting"}
    with pytest.raises(RuntimeError, match="was not captured"):
        graphs.replay(4)
    other = GraphManager(good_step, buffers, [4])
    other.capture(progress=False)
    other.replay(3)
    assert buffers.n.item() == 1


def test_an_error_of_an_operator_names_operator_and_line(buffers: StepBuffers) -> None:
    def wrong_shapes(batch: Batch) -> None:
        hidden = batch.x * 2.0
        batch.x.copy_(hidden @ hidden)

    with pytest.raises(CaptureError, match="RuntimeError: ") as caught:
        GraphManager(wrong_shapes, buffers, [3]).capture(progress=False)
    assert caught.value.kind == "failed"
    assert caught.value.operator.startswith("aten.m")
    assert caught.value.file == __file__
    assert caught.value.line == wrong_shapes.__code__.co_firstlineno + 2


def test_a_progress_bar_is_shown_on_a_terminal_alone(buffers, capsys, monkeypatch):
    graphs = GraphManager(good_step, buffers, [1, 2, 4])
    graphs.capture(progress=True)
    assert capsys.readouterr() == ("", ""), "standard error is no terminal here"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    graphs.capture(progress=False)
    assert capsys.readouterr() == ("", "")
    graphs.capture(progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "capturing" in shown.err
    assert "0/3" in shown.err


def test_a_capture_beside_another_thread_that_computes(buffers: StepBuffers) -> None:
    started, stop, failures = threading.Event(), threading.Event(), []

    def compute() -> None:
        mine = torch.randn(32, 32, device=buffers.device)
        while not stop.is_set():
            try:
                if not torch.isfinite(mine @ mine).all().item():
                    failures.append("not finite")
                started.set()
            except Exception as error:
                failures.append(error)
                return

    other = threading.Thread(target=compute)
    other.start()
    assert started.wait(60)
    try:
        assert started.wait(timeout=60)
        for _ in range(5):
            graphs = GraphManager(good_step, buffers, [1, 2, 4])
            graphs.capture(progress=False)
            graphs.replay(4)
            graphs.close()
    finally:
        stop.set()
        other.join()
    assert not failures
    assert buffers.n.item() == 5


def test_a_manager_replays_while_another_fails_to_capture(buffers: StepBuffers) -> None:
    running = GraphManager(good_step, buffers, [4])
    running.capture(progress=False)
    running.replay(4)
    for broken in (reads, interrupted):
        with pytest.raises((CaptureError, KeyboardInterrupt)):
            GraphManager(broken, buffers, [2, 4]).capture(progress=False)
        running.replay(4)
    assert buffers.n.item() == 3
    running.close()
    running.close()


@pytest.mark.parametrize("bucket", [4, 2])
def test_a_step_that_keeps_a_tensor_of_its_first_run_is_refused(buffers: StepBuffers, bucket: int) -> None:
    """Whether it does so in the first shape that is captured or in a later one, which runs fewer times."""
    kept: list[torch.Tensor] = []

    def step(batch: Batch) -> None:
        if not kept and batch.size == bucket:
            kept.append(torch.ones(4, device=batch.x.device))
        batch.x.mul_(kept[0] if kept else 1.0)

    with pytest.raises(CaptureError) as caught:
        GraphManager(step, buffers, [2, 4]).capture(progress=False)
    assert caught.value.kind == "undeclared-input"
    assert caught.value.line == step.__code__.co_firstlineno + 3


@torch.library.custom_op("graphdecode_tests::fails_inside", mutates_args={"x"})
def fails_inside(x: Tensor) -> None:
    """Raise an error in an operator's body, which is no line of the step."""
    if x.shape[0]:
        raise RuntimeError("the kernel does not like it")


def test_a_warm_up_frees_intermediates_after_their_last_use() -> None:
    """A large model's intermediates, all kept to the end of a step, take a gigabyte."""
    buffers, still_there = make_buffers(), []

    def step(batch: Batch) -> None:
        first = batch.x * 2.0
        storage = StorageWeakRef(first.untyped_storage())
        second = first + 1.0
        del first
        still_there.append(not storage.expired())
        batch.y.copy_(second)

    warm_up(step, buffers.narrow(4), Owners(buffers), 2)
    assert still_there == [False, False]
    GraphManager(step, buffers, [4]).capture(progress=False)
    assert still_there[2:] == [False, False, False], "a recording has memory of its own for what its calls go on using"


def test_reused_memory_is_no_hazard() -> None:
    buffers = make_buffers()

    def step(batch: Batch) -> None:
        for _ in range(50):
            batch.y.add_(batch.x * 2.0)

    assert check(step, buffers) == []


def test_an_error_inside_of_an_operator_is_blamed_on_the_line_that_called_it() -> None:
    def step(batch: Batch) -> None:
        batch.x.add_(1.0)
        fails_inside(batch.x)

    with pytest.raises(CaptureError, match="the kernel does not like it") as caught:
        GraphManager(step, make_buffers(), [4]).capture(progress=False)
    assert caught.value.file == __file__
    assert caught.value.line == step.__code__.co_firstlineno + 2


def test_an_error_in_a_function_of_the_step_is_blamed_on_its_line() -> None:
    def inner(x: Tensor) -> None:
        x.view(7, 7)

    def step(batch: Batch) -> None:
        torch.nn.Identity()(batch.x)
        inner(batch.x)

    with pytest.raises(CaptureError) as caught:
        GraphManager(step, make_buffers(), [4]).capture(progress=False)
    assert caught.value.line == inner.__code__.co_firstlineno + 1


def test_no_row_is_live_while_buckets_are_captured() -> None:
    """A step that writes to a cache by its live rows would write what stands in the slots by chance."""
    buffers = make_buffers()
    seen = torch.zeros(1, dtype=torch.int32)
    buffers.adopt("seen", seen)
    buffers.set_live_rows(2)

    def step(batch: Batch) -> None:
        batch.seen.add_(batch.live_rows)

    graphs = GraphManager(step, buffers, [1, 2])
    graphs.capture(progress=False)
    assert int(seen) == 0
    assert int(buffers.live_rows) == 2, "what the slots held is given back"
    graphs.replay(2)
    assert int(seen) == 2
