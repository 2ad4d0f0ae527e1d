"""Makes buckets fit to run: captures the step and what a loop runs behind it, over one stream and memory pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from graphdecode.buffers import Batch, StepBuffers
from graphdecode.graphs.cuda import CudaCapture, CudaStepGraph
from graphdecode.graphs.cuda_loop import CudaLoops
from graphdecode.graphs.loop import HostLoop, LoopControl, SingleLaunches, StepLoop
from graphdecode.graphs.owners import Owners
from graphdecode.graphs.recorded import RecordedStepGraph
from graphdecode.graphs.step_graph import StepGraph
from graphdecode.graphs.warm_up import warm_up

Step = Callable[[Batch], None]


@dataclass
class Runnable:
    """How a bucket runs.

    Attributes:
        replay: runs one step.
        loop: runs several; None where the manager has no loop.
        graphs: what was captured: nothing, the step, or the step and the loop's epilogue.
        capture_ms: time that the captures took, without warm-up.
    """

    replay: Callable[[], None]
    loop: StepLoop | None = None
    graphs: tuple[StepGraph, ...] = ()
    capture_ms: float = 0.0

    def close(self) -> None:
        """Release everything; a loop goes before the graphs that it is made of."""
        if self.loop is not None:
            self.loop.close()
        for graph in self.graphs:
            graph.close()


class Capturer:
    """Captures one generation of graphs.

    Args:
        step: what a bucket runs.
        buffers: of the step.
        owners: what it may touch.
        backend: "cuda", "recorded" or "eager".
        warmup_steps: eager steps before a capture; recordings after the first do with one.
        control: the loop's slots; None where there is no loop.
    """

    def __init__(
        self,
        step: Step,
        buffers: StepBuffers,
        owners: Owners,
        *,
        backend: str,
        warmup_steps: int,
        control: LoopControl | None,
    ) -> None:
        self._step = step
        self._buffers = buffers
        self._owners = owners
        self._backend = backend
        self._warmup_steps = warmup_steps
        self._control = control
        self._cuda_loops: CudaLoops | None = None
        if control is not None and backend == "cuda":
            self._cuda_loops = CudaLoops(control, buffers.device)
        self._shared: CudaCapture | None = None
        self._graphs: list[StepGraph] = []

    def eager(self, bucket: int) -> Runnable:
        """Return what runs a bucket without any graph."""
        batch, control = self._buffers.narrow(bucket), self._control
        step = partial(run, self._step, batch)
        if control is None:
            return Runnable(step)
        epilogue = None if control.loop.epilogue is None else partial(run, control.loop.epilogue, batch)
        if self._buffers.device.type == "cpu":
            return Runnable(step, HostLoop(control, step, epilogue))
        return Runnable(step, SingleLaunches(control, step, epilogue, "nothing is captured"))

    def capture(self, bucket: int) -> Runnable:
        """Capture a bucket, and build the loop over it.

        Raises:
            CaptureError: the step, or the loop's epilogue, does what no graph can replay.
        """
        batch, control = self._buffers.narrow(bucket), self._control
        before = len(self._graphs)
        try:
            step, capture_ms = self._graph(self._step, batch)
            if control is None:
                return Runnable(step.replay, None, (step,), capture_ms)
            if control.loop.epilogue is None:
                return Runnable(step.replay, self._loop(control, step, None), (step,), capture_ms)
            control.count_all()  # so that the epilogue runs as behind a launch that left nothing out
            epilogue, more_ms = self._graph(control.loop.epilogue, batch)
            return Runnable(step.replay, self._loop(control, step, epilogue), (step, epilogue), capture_ms + more_ms)
        except BaseException:
            for graph in self._graphs[before:]:
                graph.close()
            del self._graphs[before:]
            raise

    def close(self) -> None:
        """Release what the loops share; all runnables are closed."""
        if self._cuda_loops is not None:
            self._cuda_loops.close()

    def _loop(self, control: LoopControl, step: StepGraph, epilogue: StepGraph | None) -> StepLoop:
        if self._cuda_loops is not None:
            return self._cuda_loops.over(step, epilogue)  # type: ignore[arg-type]
        return HostLoop(control, step.replay, None if epilogue is None else epilogue.replay)

    def _graph(self, step: Step, batch: Batch) -> tuple[StepGraph, float]:
        graph: StepGraph
        if self._backend == "cuda":
            if self._shared is None or not self._graphs:
                self._shared = CudaCapture(self._buffers.device)
            with self._shared.on_stream():
                warm_up(step, batch, self._owners, self._warmup_steps)
                run(step, batch)  # under observation some modules take another path
            began = time.perf_counter()
            graph = CudaStepGraph(step, batch, self._shared, self._owners)
        else:
            warm_up(step, batch, self._owners, 1 if self._graphs else self._warmup_steps)
            began = time.perf_counter()
            graph = RecordedStepGraph(step, batch, self._owners)
        self._graphs.append(graph)
        return graph, 1000 * (time.perf_counter() - began)


def run(step: Step, batch: Batch) -> None:
    """Run a step as it is."""
    with torch.no_grad():
        step(batch)
