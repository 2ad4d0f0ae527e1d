"""`GraphManager`: one captured graph for each bucket, replayed for every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from tqdm import tqdm

from graphdecode.buckets import BucketLadder
from graphdecode.buffers import Batch, FrozenError, StepBuffers
from graphdecode.graphs.cuda import CudaCapture, CudaStepGraph
from graphdecode.graphs.errors import CaptureError
from graphdecode.graphs.observer import HostReadGuard, StepObserver
from graphdecode.graphs.recorded import RecordedStepGraph
from graphdecode.graphs.report import BucketReport, GraphReport
from graphdecode.graphs.step_graph import StepGraph

Step = Callable[[Batch], None]
BACKENDS = ("auto", "cuda", "recorded", "eager")


class GraphManager:
    """Captures a step once for each bucket and replays it.

    Args:
        step: given the buffers narrowed to a bucket's rows; writes its results into them.
        buffers: everything that the step reads and writes.
        ladder: the buckets; a `BucketLadder`, or batch sizes.
        constants: modules and tensors that the step only reads; they are kept alive.
        backend: "cuda" (CUDA graphs), "recorded" (the same semantics on a CPU), "eager" (nothing is captured), or
            "auto": CUDA graphs on a GPU, recorded ones on a CPU.
        warmup_steps: eager steps before each capture.

    Raises:
        ValueError: the backend is unknown or does not fit the buffers' device; the ladder exceeds their capacity.
    """

    def __init__(
        self,
        step: Step,
        buffers: StepBuffers,
        ladder: BucketLadder | Iterable[int],
        *,
        constants: Iterable[torch.nn.Module | Tensor] = (),
        backend: str = "auto",
        warmup_steps: int = 2,
    ) -> None:
        if not isinstance(ladder, BucketLadder):
            ladder = BucketLadder(ladder, buffers.max_batch_size)
        if ladder.max_batch_size > buffers.max_batch_size:
            raise ValueError(
                f"the ladder goes up to {ladder.max_batch_size} rows, the buffers hold {buffers.max_batch_size}"
            )
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps must be >= 1, got {warmup_steps}")
        native = "cuda" if buffers.device.type == "cuda" else "recorded"
        if backend in ("cuda", "recorded") and backend != native:
            raise ValueError(f"backend {backend!r} does not work on {buffers.device.type}; there it is {native!r}")
        self.backend = native if backend == "auto" else backend
        self.buffers = buffers
        self.ladder = ladder
        self._step = step
        self._warmup_steps = warmup_steps
        self._constants = list(constants)
        self._constant_tensors = list(_tensors_of(self._constants))
        self._graphs: dict[int, StepGraph] = {}
        self._replays: dict[int, Callable[[], None]] = {}
        self._reports = {bucket: BucketReport(bucket, "waiting") for bucket in ladder}
        self._shared = CudaCapture(buffers.device) if self.backend == "cuda" else None
        self._frozen = False

    @property
    def buckets(self) -> tuple[int, ...]:
        """The batch sizes that have a graph, ascending."""
        return self.ladder.sizes

    def bucket_for(self, batch_size: int) -> int:
        """Return the smallest bucket that holds `batch_size` rows.

        Raises:
            ValueError: it is outside 1..max_batch_size.
        """
        return self.ladder.bucket_for(batch_size)

    def capture(self, progress: bool = True) -> GraphReport:
        """Capture all buckets, the largest first, and return the report.

        The step runs for real, with no row live; the slots hold the same afterwards as before.

        Raises:
            CaptureError: the step does what no graph can replay; the process is fit to go on, and no graph is left.
            FrozenError: the manager is frozen.
        """
        if self._frozen:
            raise FrozenError("the graphs are frozen: thaw() before capturing again")
        self._drop_graphs()
        largest_first = list(reversed(self.buckets))
        try:
            with self._slots_restored():
                for bucket in tqdm(largest_first, desc="capturing", unit="graph", disable=not progress, leave=False):
                    self._capture(bucket)
        except BaseException:
            self._drop_graphs()
            raise
        return self.report()

    def _capture(self, bucket: int) -> None:
        batch = self.buffers.narrow(bucket)
        report = self._reports[bucket]
        if self.backend == "eager":
            self._replays[bucket] = lambda: self._run(batch)
            report.state = "eager"
            return
        self._warm_up(batch)
        began = time.perf_counter()
        graph = self._new_graph(batch)
        report.capture_ms = 1000 * (time.perf_counter() - began)
        report.state, report.nodes, report.pool_bytes = "captured", graph.nodes, graph.pool_bytes
        self._graphs[bucket] = graph
        self._replays[bucket] = graph.replay

    def _warm_up(self, batch: Batch) -> None:
        """Run the step eagerly a few times, once under observation; recording needs none of it."""
        if self._shared is None:
            return
        stream = self._shared.stream
        stream.wait_stream(torch.cuda.current_stream(self._shared.device))
        observer = StepObserver(self.buffers.tensors.values(), self._constant_tensors)
        with torch.cuda.stream(stream):
            with torch.no_grad(), HostReadGuard(), observer:
                self._step(batch)
            for _ in range(self._warmup_steps - 1):
                self._run(batch)
        torch.cuda.current_stream(self._shared.device).wait_stream(stream)

    def _new_graph(self, batch: Batch) -> StepGraph:
        if self._shared is None:
            return RecordedStepGraph(lambda: self._step(batch), self.buffers.tensors.values(), self._constant_tensors)
        try:
            return CudaStepGraph(lambda: self._step(batch), self._shared)
        except CaptureError:
            raise
        except RuntimeError as error:
            raise CaptureError("failed", "capture", str(error).splitlines()[0]) from error

    @contextmanager
    def _slots_restored(self) -> Iterator[None]:
        saved = {name: self.buffers.tensors[name].clone() for name in self.buffers.slots}
        live = self.buffers.live_row_count
        self.buffers.pad(0)
        self.buffers.set_live_rows(0)
        try:
            yield
        finally:
            self.buffers.set_live_rows(live)
            for name, values in saved.items():
                self.buffers.tensors[name].copy_(values)

    def _run(self, batch: Batch) -> None:
        with torch.no_grad():
            self._step(batch)

    def replay(self, batch_size: int) -> int:
        """Run one step of the first `batch_size` rows: one launch. Returns the bucket.

        Raises:
            ValueError: `batch_size` is outside 1..max_batch_size.
            RuntimeError: its bucket was not captured.
        """
        bucket = self.ladder.bucket_for(batch_size)
        replay = self._replays.get(bucket)
        if replay is None:
            raise RuntimeError(f"bucket {bucket} was not captured: call capture() first")
        self.buffers.set_live_rows(batch_size)
        replay()
        self._reports[bucket].replays += 1
        return bucket

    def run_eager(self, batch_size: int) -> int:
        """Run the same step over the same bucket without its graph: bit for bit what `replay` computes."""
        bucket = self.ladder.bucket_for(batch_size)
        self.buffers.set_live_rows(batch_size)
        self._run(self.buffers.narrow(bucket))
        return bucket

    def freeze(self) -> None:
        """Refuse, from now on, whatever would move memory that the graphs point at, or capture again."""
        self.buffers.freeze()
        self._frozen = True

    def thaw(self) -> None:
        """Allow changes again; the graphs are invalid and dropped."""
        self._frozen = False
        self.buffers.thaw()
        self._drop_graphs()

    def report(self) -> GraphReport:
        """Return what was captured, bucket by bucket."""
        return GraphReport(self.backend, [self._reports[bucket] for bucket in self.buckets])

    def close(self) -> None:
        """Release all graphs; the buffers stay."""
        self._drop_graphs()
        self._constants = []
        self._constant_tensors = []

    def _drop_graphs(self) -> None:
        self._replays.clear()
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._reports = {bucket: BucketReport(bucket, "waiting") for bucket in self.ladder}


def _tensors_of(constants: Iterable[torch.nn.Module | Tensor]) -> Iterator[Tensor]:
    for constant in constants:
        if isinstance(constant, Tensor):
            yield constant
        elif isinstance(constant, torch.nn.Module):
            yield from constant.parameters()
            yield from constant.buffers()
        else:
            raise ValueError(f"a constant is a tensor or a module, got {type(constant).__name__}")
