"""The order of calls of a CUDA capture, over a stand-in for torch.cuda: what is handed back, and on which path."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from graphdecode import CaptureError, GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch
from graphdecode.graphs import Loop, cuda_loop, cuda_nodes, manager

POOL = (0, 7)


class StandIn:
    """Keeps the order of calls; graphs are captured by running the step, and replayed by nobody."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream = "default"
        self.capture_end_fails = False

    def note(self, call: str) -> Callable[..., int]:
        return lambda *_arguments, **_options: self.calls.append(call) or 0

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        outer, self.stream = self.stream, "side"
        yield_is_over = False
        try:
            yield
            yield_is_over = True
        finally:
            self.stream = outer
            self.calls.append("stream left" if yield_is_over else "stream left by an error")

    def install(self, patch: pytest.MonkeyPatch) -> None:
        owner = self

        class Stream:
            def __init__(self, device: object = None) -> None:
                self.wait_stream = owner.note("wait")

        class Graph:
            def __init__(self, keep_graph: bool) -> None:
                assert keep_graph
                self.instantiate, self.reset, self.replay = map(owner.note, ("instantiate", "reset", "replay"))
                self.raw_cuda_graph = lambda: 1

            def capture_begin(self, pool: tuple, capture_error_mode: str) -> None:
                assert (pool, capture_error_mode, owner.stream) == (POOL, "thread_local", "side")
                owner.calls.append("begin")

            def capture_end(self) -> None:
                owner.calls.append("end")
                if owner.capture_end_fails:
                    raise RuntimeError("operation not permitted when stream is capturing")

        cuda = {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: POOL,
            "current_stream": lambda device=None: Stream(),
            "stream": self.on,
            "device": lambda device: nullcontext(),
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "memory_reserved": lambda device=None: 0,
            "mem_get_info": lambda device=None: (0, 0),
            "memory_snapshot": list,
            "current_device": lambda: 0,
        }
        for name, replacement in cuda.items():
            patch.setattr(torch.cuda, name, replacement)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.note("allocation ended"), raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self.note("pool released"), raising=False)
        patch.setattr(manager, "backend_for", lambda backend, device: "cuda")
        patch.setattr(cuda_nodes, "driver", None)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    stand_in = StandIn()
    stand_in.install(monkeypatch)
    return stand_in


@pytest.fixture
def buffers() -> StepBuffers:
    return StepBuffers([Slot("x", ("batch", 4), torch.float32)], max_batch_size=4, device="cpu")


def step(batch: Batch) -> None:
    batch.x.add_(1.0)


def test_buckets_are_captured_one_by_one_and_launched_by_one_call(stand_in: StandIn, buffers: StepBuffers) -> None:
    graphs = GraphManager(step, buffers, [2, 4])
    graphs.capture(progress=False)
    one = ["wait", "stream left", "wait", "begin", "end", "stream left", "instantiate"]
    assert stand_in.calls == one * 2
    stand_in.calls.clear()
    assert graphs.replay(3) == 4
    assert graphs.replay(3) == 4
    assert stand_in.calls == ["replay", "replay"]
    assert graphs.audit() == []
    graphs.close()
    assert stand_in.calls == ["replay", "replay", "reset", "reset"]


def test_a_loop_is_captured_in_two_parts_and_launched_step_by_step_without_cuda_python(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_loop, "driver", None)
    numbers = [Slot(name, (1,), torch.int32) for name in ("running", "loop_limit", "loop_count")]
    buffers = StepBuffers([Slot("x", ("batch", 4), torch.float32), *numbers], max_batch_size=4, device="cpu")
    loop = Loop(8, epilogue=lambda batch: batch.x.mul_(2.0))
    graphs = GraphManager(step, buffers, [4], loop=loop)
    graphs.capture(progress=False)
    one = ["wait", "stream left", "wait", "begin", "end", "stream left", "instantiate"]
    assert stand_in.calls == one * 2
    assert graphs.report().buckets[0].loop == "single"
    stand_in.calls.clear()
    assert graphs.launch(3, 5) == 4
    assert stand_in.calls == ["replay"] * 6
    assert int(buffers.loop_count) == 5
    graphs.close()
    assert stand_in.calls[6:] == ["reset", "reset"]


@pytest.mark.parametrize("failing_run", [4, 5])
def test_a_loop_whose_epilogue_cannot_be_captured_leaves_no_graph(stand_in: StandIn, failing_run: int) -> None:
    numbers = [Slot(name, (1,), torch.int32) for name in ("running", "loop_limit", "loop_count")]
    buffers = StepBuffers([Slot("x", ("batch", 4), torch.float32), *numbers], max_batch_size=4, device="cpu")
    runs = []

    def epilogue(batch: Batch) -> None:
        runs.append(1)
        if len(runs) == failing_run:  # the 4th is the first bucket's capture, the 5th the second one's warm-up
            raise ValueError("not this time")

    graphs = GraphManager(step, buffers, [2, 4], loop=Loop(8, epilogue=epilogue))
    with pytest.raises(CaptureError, match="not this time"):
        graphs.capture(progress=False)
    assert stand_in.calls.count("begin") == stand_in.calls.count("reset") == failing_run - 2


def test_a_capture_that_the_driver_refuses_gives_stream_and_pool_back(stand_in: StandIn, buffers: StepBuffers) -> None:
    stand_in.capture_end_fails = True
    with pytest.raises(CaptureError, match=r"aten\.add_\.Tensor: .*operation not permitted") as caught:
        GraphManager(step, buffers, [4]).capture(progress=False)
    assert caught.value.kind == "failed"
    given_back = ["begin", "end", "allocation ended", "pool released", "stream left by an error", "reset"]
    assert stand_in.calls[3:] == given_back
    assert stand_in.stream == "default"


@pytest.mark.parametrize("capture_end_fails", [False, True])
def test_a_step_that_fails_under_capture_is_blamed_with_its_line(
    stand_in: StandIn, buffers: StepBuffers, capture_end_fails: bool
) -> None:
    runs = []

    def fails_late(batch: Batch) -> None:
        step(batch)
        runs.append(1)
        if len(runs) == 4:  # two warm-ups, one run without observation, then the capture
            raise ValueError("under capture")

    stand_in.capture_end_fails = capture_end_fails
    with pytest.raises(CaptureError, match="ValueError: under capture") as caught:
        GraphManager(fails_late, buffers, [4]).capture(progress=False)
    assert caught.value.line == fails_late.__code__.co_firstlineno + 4
    assert stand_in.calls[3:5] == ["begin", "end"]
    assert ("pool released" in stand_in.calls) == capture_end_fails
    assert stand_in.stream == "default"


def test_an_interrupt_ends_the_capture(stand_in: StandIn, buffers: StepBuffers) -> None:
    runs = []

    def interrupted(batch: Batch) -> None:
        runs.append(1)
        if len(runs) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GraphManager(interrupted, buffers, [4]).capture(progress=False)
    assert stand_in.calls[3:5] == ["begin", "end"]
    assert stand_in.stream == "default"


def test_hazards_have_a_name_before_any_capture_begins(stand_in: StandIn, buffers: StepBuffers) -> None:
    with pytest.raises(CaptureError) as caught:
        GraphManager(lambda batch: batch.x.add_(batch.x.sum().item()), buffers, [4]).capture(progress=False)
    assert caught.value.kind == "host-read"
    assert "begin" not in stand_in.calls
    kept: list[torch.Tensor] = []

    def keeps(batch: Batch) -> None:
        if not kept:
            kept.append(torch.ones(4))
        batch.x.add_(kept[0])

    with pytest.raises(CaptureError) as caught:
        GraphManager(keeps, buffers, [4]).capture(progress=False)
    assert caught.value.kind == "undeclared-input"
    assert "begin" not in stand_in.calls
