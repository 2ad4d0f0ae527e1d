"""`Backend`: captures all graphs of an engine on one stream, into one pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphdecode.buffers import StepBuffers, StepSlots, on_device
from graphdecode.errors import ArgumentError, GraphdecodeError
from graphdecode.graphs.cuda import CudaCapture, CudaStepGraph
from graphdecode.graphs.cuda_loop import CudaLoops
from graphdecode.graphs.inspect.observer import StepObserver, observed
from graphdecode.graphs.inspect.owners import Owners
from graphdecode.graphs.inspect.trace import Call, StepTracer, compare, raise_first
from graphdecode.graphs.recorded import RecordedStepGraph
from graphdecode.graphs.step_graph import CapturedStep, HostLoop, LoopControl, Step, StepGraph, StepLoop, run

BACKENDS = ("auto", "cuda", "recorded", "eager")


class StalePointerError(GraphdecodeError, RuntimeError):
    """A graph would read or write memory whose owner has changed."""


class StalePointer(NamedTuple):
    """An address in a graph whose owner has changed."""

    bucket: int  # rows of the graph
    node: str  # operator or kernel
    argument: str  # its argument
    address: int | None
    owner: str | None  # at capture
    problem: str
    file: str | None  # file and line in the step's code
    line: int | None
    is_certain: bool = True  # see `Argument.is_certain`; a strict table refuses only certain ones

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file else ""
        address = "" if self.address is None else f" ({self.address:#x})"
        return f"{where}bucket {self.bucket}: {self.node}, argument {self.argument}{address}: {self.problem}"


def stale_pointers(bucket: int, graph: StepGraph, owners: Owners) -> Iterator[StalePointer]:
    """Yield each argument of a graph whose memory has another owner than at capture, or none."""
    problem_of = graph.problem_finder(owners)
    for node in graph.nodes:
        for argument in node.arguments:
            if (problem := problem_of(argument)) is not None:
                fields = (argument.name, argument.address, argument.owner, problem, node.file, node.line)
                yield StalePointer(bucket, node.name, *fields, argument.is_certain)


class Backend:
    """Makes graphs that share a stream and a pool, and tracks the owners of their memory."""

    def __init__(
        self, *buffers: StepBuffers, constants: Iterable[Any] = (), name: str = "auto", warmup_steps: int = 2
    ) -> None:
        if type(warmup_steps) is not int or warmup_steps < 1:
            raise ArgumentError(f"warmup_steps must be >= 1, got {warmup_steps!r}")
        self._buffers = buffers[0]
        self.name = backend_for(name, self.device)
        self.owners = Owners(buffers[0], constants, buffers[1:])
        self._warmup_steps = warmup_steps
        self._captures: list[CudaCapture] = []  # the last is in use; earlier ones are spoilt
        self._blocks: list[Tensor] = []  # memory of recorded intermediates
        self._cuda_loops: CudaLoops | None = None

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return self._buffers.device

    def _graph(self, step: Step, batch: StepSlots) -> StepGraph:
        if self.name == "cuda":
            is_first = not self._captures
            if is_first or self._captures[-1].is_spoilt:
                self._captures.append(CudaCapture(self.device))
            shared = self._captures[-1]
            with shared.on_stream():
                warm_up(step, batch, self.owners, self._warmup_steps, compares=is_first)
                run(step, batch)  # some modules take another path when they are not observed
            return CudaStepGraph(step, batch, shared, self.owners)
        if not self._blocks:  # the first shape runs as often as on a GPU, for it is recorded twice
            warm_up(step, batch, self.owners, self._warmup_steps - 1)
        return RecordedStepGraph(step, batch, self.owners, self._blocks)

    def captured(self, step: Step, batch: StepSlots, second: Step | None, control: LoopControl | None) -> CapturedStep:
        """Capture a step, and `second` in a graph of its own; build a loop if there is a control."""
        graphs: list[StepGraph] = []
        loop: StepLoop | None = None
        with on_device(self.device):
            try:
                graphs.append(self._graph(step, batch))
                if second is not None:
                    if control is not None:
                        control.count_all()  # the epilogue reads the count
                    graphs.append(self._graph(second, batch))
                replays = [graph.replay for graph in graphs]
                if control is not None and self.name == "cuda":
                    self._cuda_loops = self._cuda_loops or CudaLoops(control, self.device)
                    loop = self._cuda_loops.over(*graphs)  # type: ignore[arg-type]
                elif control is not None:
                    loop = HostLoop(control, *replays)
            except BaseException:
                for graph in reversed(graphs):
                    graph.close()
                raise
        return CapturedStep(replays, loop, graphs)

    def eager(self, step: Step, batch: StepSlots, second: Step | None, control: LoopControl | None) -> CapturedStep:
        """Return the same as `captured`, without graphs."""
        replays = [partial(self._run, each, batch) for each in (step, second) if each is not None]
        if control is None:
            return CapturedStep(replays)
        if self.device.type == "cpu":
            return CapturedStep(replays, HostLoop(control, *replays))
        loop = StepLoop(control, *replays)
        loop.reason = "nothing is captured"
        return CapturedStep(replays, loop)

    def _run(self, step: Step, batch: StepSlots) -> None:
        with on_device(self.device):
            run(step, batch)

    def audit(self, graphs: Iterable[tuple[int, StepGraph]]) -> list[StalePointer]:
        """Return the stale pointers of some graphs, each with its bucket."""
        return [stale for bucket, graph in graphs for stale in stale_pointers(bucket, graph, self.owners)]

    def verify(self, stale: Iterable[StalePointer] = ()) -> None:
        """Check that nothing was moved; raise a StalePointerError of the certain ones in `stale`."""
        if certain := [pointer for pointer in stale if pointer.is_certain]:
            raise StalePointerError("\n".join(map(str, certain)))
        self.owners.verify()

    def release(self, steps: Sequence[CapturedStep], *, is_last: bool) -> None:
        """Release graphs, each after its loop; with the last ones the pool, too."""
        for step in steps:
            if step.loop is not None:
                step.loop.close()
        if is_last and self._cuda_loops is not None:
            self._cuda_loops.close()
        for step in steps:
            for graph in step.graphs:
                graph.close()
        if is_last:
            for capture in self._captures:
                capture.close()
            self._captures, self._blocks, self._cuda_loops = [], [], None

    def forget(self) -> None:
        """Drop the constants, after the last graph."""
        self.owners.thaw()
        self.owners = Owners(self._buffers)


def warm_up(step: Step, batch: StepSlots, owners: Owners, num_steps: int, *, compares: bool = False) -> None:
    """Run a step under observation: hazards raise, and one-time initialization happens before the capture.

    A tensor that Python keeps from the first run has no owner in the second, and is refused. With `compares`, so are
    numbers that differ between the last two runs; if the first differs from the second, there is a third.
    """
    traces: list[list[Call]] = []

    def observe() -> None:
        observer = StepTracer(owners) if compares else StepObserver(owners)
        with observed(observer, batch, step=step) as watched:
            step(watched)
        if isinstance(observer, StepTracer):
            traces.append(observer.trace)

    for _ in range(num_steps):
        observe()
    if len(traces) > 1 and traces[-1] != traces[-2] and num_steps == 2:
        observe()
    if len(traces) > 1:
        compare(*traces[-2:], refuse=raise_first)


def backend_for(backend: str, device: torch.device) -> str:
    """Resolve "auto" for a device; raises ArgumentError if the backend is unknown, or does not work there."""
    if backend not in BACKENDS:
        raise ArgumentError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    native = "cuda" if device.type == "cuda" else "recorded"
    if backend in ("cuda", "recorded") and backend != native:
        raise ArgumentError(f"backend {backend!r} does not work on {device.type}; there it is {native!r}")
    return native if backend == "auto" else backend
