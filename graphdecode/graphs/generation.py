"""One generation of graphs: all that are captured over one set of buffers, and retired together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from graphdecode.buffers import Batch, StepBuffers, on_device
from graphdecode.graphs.capture import CudaCapture, CudaStepGraph, Step, run, warm_up
from graphdecode.graphs.cuda_loop import CudaLoops
from graphdecode.graphs.loop import HostLoop, LoopControl, SingleLaunches, StepLoop
from graphdecode.graphs.owners import Owners
from graphdecode.graphs.recorded import RecordedStepGraph
from graphdecode.graphs.step_graph import StepGraph


@dataclass(frozen=True)
class Runnable:
    """How a bucket runs.

    Attributes:
        replay: runs one step.
        loop: runs several; None where the manager has no loop.
        graphs: what was captured: nothing, the step, or the step and the loop's epilogue.
    """

    replay: Callable[[], None]
    loop: StepLoop | None = None
    graphs: tuple[StepGraph, ...] = ()


@dataclass(frozen=True)
class Halves:
    """How a bucket's step runs in two.

    Attributes:
        first: runs all of the step that does not read what the host writes meanwhile.
        second: runs the rest.
        graphs: what was captured: nothing, or the two.
    """

    first: Callable[[], None]
    second: Callable[[], None]
    graphs: tuple[StepGraph, ...] = ()


def unaccompanied(_bucket: int, _queries: int) -> AbstractContextManager[None]:
    """Return what does nothing around a capture."""
    return nullcontext()


class Generation:
    """The graphs that are captured over one set of buffers and retired together, those that failed among them.

    Args:
        steps: what a bucket runs, by the queries of a row.
        buffers: of the step.
        owners: what it may touch.
        backend: "cuda", "recorded" or "eager".
        warmup_steps: eager steps before a capture; recordings after the first do with one.
        control: the loop's slots; None where there is no loop.
        around: given a bucket and the queries of a row, returns what is entered around their capture.
    """

    def __init__(
        self,
        steps: Mapping[int, Step],
        buffers: StepBuffers,
        owners: Owners,
        *,
        backend: str,
        warmup_steps: int,
        control: LoopControl | None,
        around: Callable[[int, int], AbstractContextManager[None]],
    ) -> None:
        self._steps = steps
        self._buffers = buffers
        self._owners = owners
        self._backend = backend
        self._warmup_steps = warmup_steps
        self._control = control
        self._around = around
        self._cuda_loops: CudaLoops | None = None
        if control is not None and backend == "cuda":
            self._cuda_loops = CudaLoops(control, buffers.device)
        self._captures: list[CudaCapture] = []
        self._graphs: list[StepGraph] = []
        self._loops: list[StepLoop] = []

    def eager(self, bucket: int, queries: int = 1) -> Runnable:
        """Return what runs a bucket without any graph, with so many queries a row."""
        batch, control = self._buffers.narrow(bucket), self._control
        step = partial(self._run, self._steps[queries], batch)
        if control is None:
            return Runnable(step)
        epilogue = None if control.loop.epilogue is None else partial(self._run, control.loop.epilogue, batch)
        if self._buffers.device.type == "cpu":
            return Runnable(step, HostLoop(control, step, epilogue))
        return Runnable(step, SingleLaunches(control, step, epilogue, "nothing is captured"))

    def eager_halves(self, bucket: int, halves: tuple[Step, Step]) -> Halves:
        """Return what runs a bucket's step in two, without any graph."""
        batch = self._buffers.narrow(bucket)
        first, second = (partial(self._run, half, batch) for half in halves)
        return Halves(first, second)

    def _run(self, step: Step, batch: Batch) -> None:
        with on_device(self._buffers.device):
            run(step, batch)

    def capture(self, bucket: int, queries: int = 1) -> Runnable:
        """Capture a bucket with so many queries a row, and build the loop over it.

        Raises:
            CaptureError: the step, or the loop's epilogue, does what no graph can replay.
        """
        with on_device(self._buffers.device), self._around(bucket, queries):
            return self._captured(self._steps[queries], self._buffers.narrow(bucket))

    def capture_halves(self, bucket: int, halves: tuple[Step, Step]) -> Halves:
        """Capture a bucket's step in two graphs.

        Raises:
            CaptureError: one of them does what no graph can replay.
        """
        with on_device(self._buffers.device), self._around(bucket, 1):
            batch = self._buffers.narrow(bucket)
            first, second = (self._graph(half, batch) for half in halves)
        return Halves(first.replay, second.replay, (first, second))

    def _captured(self, plain: Step, batch: Batch) -> Runnable:
        control = self._control
        step = self._graph(plain, batch)
        if control is None:
            return Runnable(step.replay, None, (step,))
        if control.loop.epilogue is None:
            return Runnable(step.replay, self._loop(control, step, None), (step,))
        control.count_all()  # so that the epilogue runs as behind a launch that left nothing out
        epilogue = self._graph(control.loop.epilogue, batch)
        return Runnable(step.replay, self._loop(control, step, epilogue), (step, epilogue))

    def _graph(self, step: Step, batch: Batch) -> StepGraph:
        graph: StepGraph
        if self._backend == "cuda":
            if not self._captures or self._captures[-1].is_spoilt:
                self._captures.append(CudaCapture(self._buffers.device))
            shared = self._captures[-1]
            with shared.on_stream():
                warm_up(step, batch, self._owners, self._warmup_steps)
                run(step, batch)  # under observation some modules take another path
            graph = CudaStepGraph(step, batch, shared, self._owners)
        else:
            warm_up(step, batch, self._owners, 1 if self._graphs else self._warmup_steps)
            graph = RecordedStepGraph(step, batch, self._owners)
        self._graphs.append(graph)
        return graph

    def _loop(self, control: LoopControl, step: StepGraph, epilogue: StepGraph | None) -> StepLoop:
        if self._cuda_loops is not None:
            loop = self._cuda_loops.over(step, epilogue)  # type: ignore[arg-type]
        else:
            loop = HostLoop(control, step.replay, None if epilogue is None else epilogue.replay)
        self._loops.append(loop)
        return loop

    def close(self) -> None:
        """Retire everything; a loop goes before the graphs that it is made of."""
        for loop in self._loops:
            loop.close()
        if self._cuda_loops is not None:
            self._cuda_loops.close()
        for graph in self._graphs:
            graph.close()
        for capture in self._captures:
            capture.close()
