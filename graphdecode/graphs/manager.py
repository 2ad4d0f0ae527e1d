"""`GraphManager`: one captured graph for each bucket, replayed for every step."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tqdm import tqdm

from graphdecode.buckets import BucketLadder
from graphdecode.buffers import Batch, FrozenError, StepBuffers
from graphdecode.graphs.audit import StalePointer, StalePointerError, stale_pointers
from graphdecode.graphs.cuda import CudaCapture, CudaStepGraph
from graphdecode.graphs.errors import CaptureError
from graphdecode.graphs.owners import Owners
from graphdecode.graphs.picture import to_dot
from graphdecode.graphs.preserve import no_row_live
from graphdecode.graphs.recorded import RecordedStepGraph
from graphdecode.graphs.report import BucketReport, GraphReport
from graphdecode.graphs.step_graph import StepGraph
from graphdecode.graphs.warm_up import warm_up

Step = Callable[[Batch], None]
BACKENDS = ("auto", "cuda", "recorded", "eager")
CAPTURE_TIMES = ("startup", "first-use")


class GraphManager:
    """Captures a step once for each bucket and replays it.

    Args:
        step: given the buffers narrowed to a bucket's rows; writes its results into them.
        buffers: everything that the step reads and writes.
        ladder: the buckets; a `BucketLadder`, or batch sizes.
        constants: modules and tensors that the step only reads; they are kept alive, and watched for being moved.
        backend: "cuda" (CUDA graphs), "recorded" (the same semantics on a CPU), "eager" (nothing is captured), or
            "auto": CUDA graphs on a GPU, recorded ones on a CPU.
        warmup_steps: eager steps before each capture; recordings after the first do with one.
        capture_when: "startup", or "first-use": a bucket is captured after the first step that needed it, and that
            step runs padded to the next captured bucket, or eagerly.
        strict: refuse a replay when an address in its graph has lost its owner.
        choices: given a bucket, says by name what the step's owner chose for it, for the report.

    Raises:
        ValueError: an argument is unknown or does not fit the buffers' device; the ladder exceeds their capacity.
    """

    def __init__(
        self,
        step: Step,
        buffers: StepBuffers,
        ladder: BucketLadder | Iterable[int],
        *,
        constants: Iterable[Any] = (),
        backend: str = "auto",
        warmup_steps: int = 2,
        capture_when: str = "startup",
        strict: bool = False,
        choices: Callable[[int], dict[str, dict[str, Any]]] = lambda _: {},
    ) -> None:
        if not isinstance(ladder, BucketLadder):
            ladder = BucketLadder(ladder, buffers.max_batch_size)
        if ladder.max_batch_size > buffers.max_batch_size:
            raise ValueError(
                f"the ladder goes up to {ladder.max_batch_size} rows, the buffers hold {buffers.max_batch_size}"
            )
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps must be >= 1, got {warmup_steps}")
        if capture_when not in CAPTURE_TIMES:
            raise ValueError(f"capture_when must be one of {', '.join(CAPTURE_TIMES)}, got {capture_when!r}")
        self.backend = _backend_for(backend, buffers.device)
        self.buffers = buffers
        self.ladder = ladder
        self._step = step
        self._warmup_steps = warmup_steps
        self._captures_lazily = capture_when == "first-use" and self.backend != "eager"
        self._strict = strict
        self._choices = choices
        self._owners = Owners(buffers, constants)
        self._graphs: dict[int, StepGraph] = {}
        self._replays: dict[int, Callable[[], None]] = {}
        self._is_open = False
        self._verified_size: int | None = None
        self._frozen = False
        self._reports: dict[int, BucketReport] = {}
        self._shared: CudaCapture | None = None
        self._drop_graphs()

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
        """Capture all buckets, the largest first, and return the report; with "first-use", only make ready for it.

        The step runs for real, with no row live; the slots hold the same afterwards as before. Adopted tensors are not
        saved: of these a step may write, for padding rows, what nobody reads.

        Args:
            progress: show a bar on stderr.

        Raises:
            CaptureError: the step does what no graph can replay; the process is fit to go on, and no graph is left.
            FrozenError: the manager is frozen.
        """
        self._refuse_if_frozen()
        self._drop_graphs()
        largest_first = [] if self._captures_lazily else list(reversed(self.buckets))
        try:
            with (
                no_row_live(self.buffers),
                tqdm(largest_first, desc="capturing", unit="graph", disable=not progress, leave=False) as bar,
            ):
                for bucket in bar:
                    self._capture(bucket)
        except BaseException:
            self._drop_graphs()
            raise
        self._is_open = True
        return self.report()

    def _refuse_if_frozen(self) -> None:
        if self._frozen:
            raise FrozenError("the graphs are frozen: thaw() before capturing again")

    def _capture(self, bucket: int) -> None:
        batch, report = self.buffers.narrow(bucket), self._reports[bucket]
        if self.backend == "eager":
            self._replay_eagerly(bucket)
            return
        if self.backend == "cuda":
            if self._shared is None or not self._graphs:
                self._shared = CudaCapture(self.buffers.device)
            with self._shared.on_stream():
                warm_up(self._step, batch, self._owners, self._warmup_steps)
                self._run(batch)  # under observation some modules take another path
            began = time.perf_counter()
            graph: StepGraph = CudaStepGraph(self._step, batch, self._shared, self._owners)
        else:
            warm_up(self._step, batch, self._owners, 1 if self._graphs else self._warmup_steps)
            began = time.perf_counter()
            graph = RecordedStepGraph(self._step, batch, self._owners)
        report.capture_ms = 1000 * (time.perf_counter() - began)
        report.state, report.error = "captured", None
        report.nodes, report.kernels = graph.kinds, Counter(node.name for node in graph.nodes)
        report.pool_bytes, report.moved_bytes = graph.pool_bytes, graph.moved_bytes
        report.instantiate_ms = graph.instantiate_ms
        self._graphs[bucket] = graph
        self._replays[bucket] = graph.replay

    def _replay_eagerly(self, bucket: int) -> None:
        batch = self.buffers.narrow(bucket)
        self._replays[bucket] = lambda: self._run(batch)
        self._reports[bucket].state = "eager"

    def _run(self, batch: Batch) -> None:
        with torch.no_grad():
            self._step(batch)

    def replay(self, batch_size: int) -> int:
        """Run one step of the first `batch_size` rows: one launch. Returns the bucket that ran.

        When the batch size changes, the addresses of all slots and constants are checked.

        Raises:
            ValueError: `batch_size` is outside 1..max_batch_size.
            RuntimeError: nothing was captured.
            FrozenError: a slot, adopted tensor or constant was moved.
            StalePointerError: strict, and an address in the graph has lost its owner.
        """
        bucket = self.ladder.bucket_for(batch_size)
        launch = self._replays.get(bucket)
        if launch is None:
            return self._first_use(bucket, batch_size)
        if batch_size != self._verified_size:
            self.verify()
            self._verified_size = batch_size
        self.buffers.set_live_rows(batch_size)
        launch()
        report = self._reports[bucket]
        report.replays += 1
        report.live_rows += batch_size
        return bucket

    def _first_use(self, bucket: int, batch_size: int) -> int:
        if not self._is_open:
            raise RuntimeError(f"bucket {bucket} was not captured: call capture() first")
        self.verify()
        captured = next((larger for larger in self.buckets if larger > bucket and larger in self._graphs), None)
        self.buffers.set_live_rows(batch_size)
        if captured is not None:
            self._graphs[captured].replay()
            self._reports[captured].replays += 1
            self._reports[captured].live_rows += batch_size
        else:
            self._run(self.buffers.narrow(bucket))
        if not self._frozen:
            self._capture_or_stay_eager(bucket)
        return bucket if captured is None else captured

    def _capture_or_stay_eager(self, bucket: int) -> None:
        try:
            with no_row_live(self.buffers):
                self._capture(bucket)
        except CaptureError as error:
            self._replay_eagerly(bucket)
            self._reports[bucket].error = str(error)
            warnings.warn(f"bucket {bucket} stays eager: {error}", RuntimeWarning, stacklevel=4)

    def run_eager(self, batch_size: int) -> int:
        """Run the same step over the same bucket without its graph: bit for bit what `replay` computes."""
        bucket = self.ladder.bucket_for(batch_size)
        self.buffers.set_live_rows(batch_size)
        self._run(self.buffers.narrow(bucket))
        return bucket

    def verify(self) -> None:
        """Check that everything the graphs point at is where it was at capture.

        Raises:
            FrozenError: a slot, adopted tensor or constant was moved.
            StalePointerError: strict, and an address in a graph has lost its owner.
        """
        if self._strict:
            stale = self.audit()
            if stale:
                raise StalePointerError("\n".join(map(str, stale)))
        self._owners.verify()

    def audit(self) -> list[StalePointer]:
        """Return every address in the graphs that nobody owns any more, smallest bucket first."""
        return [
            stale
            for bucket, graph in sorted(self._graphs.items())
            for stale in stale_pointers(bucket, graph, self._owners)
        ]

    def freeze(self) -> None:
        """Refuse, from now on, whatever would move memory that the graphs point at, or capture again.

        Raises:
            FrozenError: something was moved already.
        """
        self._owners.verify()
        self.buffers.freeze()
        self._frozen = True

    def thaw(self) -> None:
        """Allow changes again; the graphs are invalid and dropped."""
        self._frozen = False
        self.buffers.thaw()
        self._drop_graphs()

    def report(self) -> GraphReport:
        """Return what was captured and replayed up to now, bucket by bucket."""
        buckets = [dataclasses.replace(self._reports[b], choices=self._choices(b)) for b in self.buckets]
        return GraphReport(self.backend, buckets)

    def dot(self, bucket: int) -> str:
        """Return a picture of one bucket's step, in Graphviz' language.

        Raises:
            ValueError: the bucket has no graph.
        """
        if bucket not in self._graphs:
            raise ValueError(f"bucket must be one of the captured {sorted(self._graphs)}, got {bucket!r}")
        return to_dot(f"bucket {bucket}", self._graphs[bucket].nodes)

    def close(self) -> None:
        """Release all graphs; the buffers stay."""
        self._drop_graphs()
        self._owners = Owners(self.buffers)

    def _drop_graphs(self) -> None:
        self._is_open = False
        self._verified_size = None
        self._replays.clear()
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._shared = None
        self._reports = {bucket: BucketReport(bucket, "waiting") for bucket in self.ladder}


def _backend_for(backend: str, device: torch.device) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    native = "cuda" if device.type == "cuda" else "recorded"
    if backend in ("cuda", "recorded") and backend != native:
        raise ValueError(f"backend {backend!r} does not work on {device.type}; there it is {native!r}")
    return native if backend == "auto" else backend
