"""The order of calls of a CUDA capture, over a stand-in for torch.cuda: what is handed back, and on which path."""

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from graphdecode import CaptureError, GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch
from graphdecode.graphs import Loop, backend, cuda_loop
from graphdecode.graphs.inspect import nodes as cuda_nodes


class StandIn:
    """Keeps the order of calls; graphs are captured by running the step, and replayed by nobody.

    Its allocators record for a capture as torch's do, from its begin to its end: one that the driver refuses to end
    leaves them recording, up to torch 2.13. cuBLAS' workspaces belong to a stream, and lie in the pool of the capture
    that first needed them, or outside of any. The generator is told by the end of the next capture.

    Attributes:
        stream: the current one.
        recording: pools that the allocators of device and pinned memory record for.
        workspaces: stream -> the pool that its workspace lies in, None for none.
        used: graph -> where the workspaces lie that it points at.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream = "default"
        self.capture_end_fails = False
        self.ends_itself = False
        self.holds_generator = False
        self.recording: dict[str, set[int]] = {"device": set(), "host": set()}
        self.workspaces: dict[str, int | None] = {}
        self.used: dict[object, set[int | None]] = {}
        self.capturing: tuple[object, int] | None = None
        self.numbers = itertools.count(1)
        self.captures: list[tuple[int, str]] = []
        self.graphs: weakref.WeakSet = weakref.WeakSet()

    def note(self, call: str) -> Callable[..., int]:
        return lambda *_arguments, **_options: self.calls.append(call) or 0

    @contextmanager
    def on(self, stream: "FakeStream") -> Iterator[None]:
        outer, self.stream = self.stream, stream.name
        yield_is_over = False
        try:
            yield
            yield_is_over = True
        finally:
            self.stream = outer
            self.calls.append("stream left" if yield_is_over else "stream left by an error")

    def product(self) -> None:
        """Do as a product of matrices does: take the workspace of the current stream."""
        graph, pool = self.capturing or (None, None)
        place = self.workspaces.setdefault(self.stream, pool)
        if graph is not None:
            self.used.setdefault(graph, set()).add(place)

    def end_device(self, _device: int, pool: int) -> None:
        if pool not in self.recording["device"]:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording["device"].remove(pool)
        self.calls.append("allocation ended")

    def install(self, patch: pytest.MonkeyPatch) -> None:
        owner = self

        class Graph:
            def __init__(self, keep_graph: bool) -> None:
                assert keep_graph
                self.instantiate, self.replay = map(owner.note, ("instantiate", "replay"))
                self.raw_cuda_graph = lambda: 1
                owner.graphs.add(self)

            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                assert owner.stream != "default"
                self.releases, owner.holds_generator = owner.holds_generator, False
                if self.releases:
                    owner.calls.append("generator released")
                    return
                for recording in owner.recording.values():
                    if pool in recording:
                        raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
                    recording.add(pool)
                self.pool, self.stream, owner.capturing = pool, owner.stream, (id(self), pool)
                owner.captures.append((pool, owner.stream))
                owner.calls.append("begin")

            def capture_end(self) -> None:
                if self.releases:
                    return
                owner.capturing = None
                owner.calls.append("end")
                if not owner.capture_end_fails or owner.ends_itself:
                    for recording in owner.recording.values():
                        recording.remove(self.pool)
                if owner.capture_end_fails:
                    owner.holds_generator = True
                    raise RuntimeError("operation not permitted when stream is capturing")

            def reset(self) -> None:
                owner.calls.append("reset")
                owner.used.pop(id(self), None)
                if owner.workspaces.pop(getattr(self, "stream", "default"), "none") is None:
                    assert not any(None in places for places in owner.used.values()), "freed under a living graph"

        cuda = {
            "Stream": lambda device=None: FakeStream(owner, f"side {next(owner.numbers)}"),
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: next(owner.numbers),
            "current_stream": lambda device=None: FakeStream(owner, owner.stream),
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
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_device, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self.note("pool released"), raising=False)
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.workspaces.clear, raising=False)
        patch.setattr(backend, "backend_for", lambda backend, device: "cuda")
        patch.setattr(cuda_nodes, "driver", None)


class FakeStream:
    """A stream of the stand-in's."""

    def __init__(self, owner: StandIn, name: str) -> None:
        self.name = name
        self.wait_stream = owner.note("wait")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    stand_in = StandIn()
    stand_in.install(monkeypatch)
    monkeypatch.setattr(cuda_loop, "driver", None)  # in a process where another test has loaded one, too
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
    given_back = ["allocation ended", "pool released", "generator released", "stream left by an error", "reset"]
    assert stand_in.calls[3:] == ["begin", "end", *given_back]
    assert stand_in.stream == "default"


@pytest.mark.parametrize("ends_itself", [False, True])
def test_after_a_capture_that_the_driver_refuses_others_go_on_with_a_new_pool_and_stream(
    stand_in: StandIn, buffers: StepBuffers, ends_itself: bool
) -> None:
    """Up to torch 2.13 the allocator of pinned memory goes on recording for the pool; from 2.14 on none does."""
    stand_in.ends_itself = ends_itself
    graphs = GraphManager(step, buffers, [1, 2, 4], capture_when="first-use")
    graphs.capture(progress=False)
    graphs.replay(4)
    stand_in.capture_end_fails = True
    with pytest.warns(RuntimeWarning, match="bucket 2 stays eager: .*operation not permitted"):
        graphs.replay(2)
    stand_in.capture_end_fails = False
    graphs.replay(1)
    assert [bucket.state for bucket in graphs.report().buckets] == ["captured", "eager", "captured"]
    first, refused, later = stand_in.captures
    assert first == refused
    assert {*first}.isdisjoint(later)
    assert stand_in.recording["device"] == set()
    graphs.close()
    gc.collect()
    # up to 2.13 the allocator of pinned memory asks the refused graph, as long as the process lives, what is its own
    assert len(stand_in.graphs) == (not ends_itself)


def test_workspaces_lie_in_the_pool_of_the_graphs_that_point_at_them(stand_in: StandIn, buffers: StepBuffers) -> None:
    """They belong to a stream, and torch frees them with any graph that was captured on it."""

    def multiplies(batch: Batch) -> None:
        batch.x.add_(1.0)
        stand_in.product()

    with torch.cuda.stream(torch.cuda.Stream()):
        stand_in.product()  # of somebody else's
    graphs = GraphManager(multiplies, buffers, [1, 2, 4], capture_when="first-use")
    graphs.capture(progress=False)
    for batch_size in (4, 1, 2):
        stand_in.product()
        graphs.replay(batch_size)
    pools = {pool for pool, _ in stand_in.captures}
    assert len(stand_in.used) == 3
    assert len(pools) == 1
    assert all(places == pools for places in stand_in.used.values())
    assert not pools & set(stand_in.workspaces.values()), "nobody else is given what lies in the pool"
    graphs.close()


def test_a_graph_that_failed_is_retired_with_its_generation(stand_in: StandIn, buffers: StepBuffers) -> None:
    """Not before: torch would free the workspaces of a stream that other graphs were captured on."""
    runs = []

    def fails_late(batch: Batch) -> None:
        step(batch)
        runs.append(batch.size)
        if runs.count(2) == 4:  # warmed up twice, run once, then captured
            raise ValueError("under capture")

    graphs = GraphManager(fails_late, buffers, [2, 4], capture_when="first-use")
    graphs.capture(progress=False)
    graphs.replay(4)
    with pytest.warns(RuntimeWarning, match="bucket 2 stays eager"):
        graphs.replay(2)
    assert "reset" not in stand_in.calls
    graphs.close()
    assert stand_in.calls.count("reset") == stand_in.calls.count("begin") == 2


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


def test_the_time_of_a_capture_is_without_reading_what_the_graph_holds(
    stand_in: StandIn, buffers: StepBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, hours = time.perf_counter, list[int]()
    monkeypatch.setattr(time, "perf_counter", lambda: now() + 3600 * len(hours))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: hours.append(1) or [])
    graphs = GraphManager(step, buffers, [4])
    (bucket,) = graphs.capture(progress=False).buckets
    assert hours
    assert 0 <= bucket.instantiate_ms <= bucket.capture_ms < 3_600_000


def test_a_manager_that_is_dropped_lets_go_of_its_graphs(stand_in: StandIn, buffers: StepBuffers) -> None:
    graphs = GraphManager(step, buffers, [2, 4])
    graphs.capture(progress=False)
    assert len(stand_in.graphs) == 2
    del graphs
    gc.collect()
    assert not stand_in.graphs, "torch releases a graph that nobody holds"
