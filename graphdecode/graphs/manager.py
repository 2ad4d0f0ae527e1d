"""`GraphManager`: one captured graph for each bucket, replayed for every step."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any

import torch
from tqdm import tqdm

from graphdecode.buckets import BucketLadder
from graphdecode.buffers import FrozenError, StepBuffers, on_device
from graphdecode.errors import ArgumentError
from graphdecode.graphs.audit import StalePointer, StalePointerError, stale_pointers
from graphdecode.graphs.capture import Step, no_row_live, run
from graphdecode.graphs.errors import CaptureError
from graphdecode.graphs.generation import Generation, Runnable, unaccompanied
from graphdecode.graphs.halves import HalvedStep
from graphdecode.graphs.loop import Loop, LoopControl
from graphdecode.graphs.owners import Owners
from graphdecode.graphs.picture import to_dot, to_svg
from graphdecode.graphs.report import BucketReport, GraphReport
from graphdecode.graphs.step_graph import StepGraph

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
        loop: lets `launch` run several steps at once.
        halves: the same step in two, for `replay_halves`; their graphs are captured after the first step that runs so.
        wider: steps of more queries a row than one, by their number; each is captured after its first use.
        around: given a bucket and the queries of a row, returns what is entered around their capture.

    Raises:
        ValueError: an argument is unknown or does not fit the buffers or their device; the ladder exceeds their
            capacity.
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
        loop: Loop | None = None,
        halves: tuple[Step, Step] | None = None,
        wider: Mapping[int, Step] | None = None,
        around: Callable[[int, int], AbstractContextManager[None]] = unaccompanied,
    ) -> None:
        if not isinstance(ladder, BucketLadder):
            ladder = BucketLadder(ladder, buffers.max_batch_size)
        if ladder.max_batch_size > buffers.max_batch_size:
            held = f"the buffers hold {buffers.max_batch_size}"
            raise ArgumentError(f"the ladder goes up to {ladder.max_batch_size} rows, {held}")
        if warmup_steps < 1:
            raise ArgumentError(f"warmup_steps must be >= 1, got {warmup_steps}")
        if capture_when not in CAPTURE_TIMES:
            raise ArgumentError(f"capture_when must be one of {', '.join(CAPTURE_TIMES)}, got {capture_when!r}")
        if loop is not None:
            loop.check(buffers)
        self.backend = backend_for(backend, buffers.device)
        self.buffers = buffers
        self.ladder = ladder
        self._steps = {1: step, **(wider or {})}
        self._warmup_steps = warmup_steps
        self._around = around
        self._captures_lazily = capture_when == "first-use" and self.backend != "eager"
        self._strict = strict
        self._choices = choices
        self._owners = Owners(buffers, constants)
        self._control = None if loop is None else LoopControl(loop, buffers)
        self._runnables: dict[tuple[int, int], Runnable] = {}  # by rows, and queries of a row
        self._halved = None if halves is None else HalvedStep(halves, buffers)
        self._is_open = False
        self._verified_size: int | None = None
        self._padded_size: int | None = None
        self._frozen = False
        self._reports: dict[tuple[int, int], BucketReport] = {}
        at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit)
        self._generation = self._new_generation()
        self._drop_graphs()

    @property
    def graphs(self) -> dict[int, StepGraph]:
        """The captured steps of one query a row by bucket, for those who look into them."""
        return self.graphs_of(1)

    def graphs_of(self, queries: int) -> dict[int, StepGraph]:
        """Return the captured steps of so many queries a row, by bucket."""
        return {
            bucket: runnable.graphs[0]
            for (bucket, wide), runnable in self._runnables.items()
            if wide == queries and runnable.graphs
        }

    @property
    def queries(self) -> tuple[int, ...]:
        """The queries of a row that there are steps for, ascending: the other axis of the ladder."""
        return tuple(sorted(self._steps))

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
        saved: of these a step may write, for padding rows, what nobody reads. On a GPU cuBLAS' workspaces are freed: a
        graph of your own is to be captured after this, if eager work on its stream needed one before its capture.

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
            hidden = None if progress else True
            bar = tqdm(largest_first, desc="capturing", unit="graph", disable=hidden, leave=False)
            with no_row_live(self.buffers), bar:
                for bucket in bar:
                    self._capture(bucket, 1)
        except BaseException:
            self._drop_graphs()
            raise
        self._is_open = True
        return self.report()

    def _refuse_if_frozen(self) -> None:
        if self._frozen:
            raise FrozenError("the graphs are frozen: thaw() before capturing again")

    def _capture(self, bucket: int, queries: int) -> None:
        if self.backend == "eager":
            self._stay_eager(bucket, queries)
            return
        runnable, report = self._generation.capture(bucket, queries), self._report_at(bucket, queries)
        graph = runnable.graphs[0]
        report.state, report.error = "captured", None
        report.nodes, report.kernels = graph.kinds, Counter(node.name for node in graph.nodes)
        report.moved_bytes = graph.moved_bytes
        report.add_graphs(runnable.graphs)
        self._keep(bucket, queries, runnable)

    def _report_at(self, bucket: int, queries: int) -> BucketReport:
        return self._reports.setdefault((bucket, queries), BucketReport(bucket, "waiting", queries=queries))

    def _stay_eager(self, bucket: int, queries: int) -> None:
        self._report_at(bucket, queries).state = "eager"
        self._keep(bucket, queries, self._generation.eager(bucket, queries))

    def _keep(self, bucket: int, queries: int, runnable: Runnable) -> None:
        self._runnables[bucket, queries] = runnable
        if runnable.loop is not None:
            report = self._report_at(bucket, queries)
            report.loop, report.loop_reason = runnable.loop.kind, runnable.loop.reason

    def replay(self, batch_size: int, queries: int = 1) -> int:
        """Run one step of the first `batch_size` rows: one launch. Returns the bucket that ran.

        When the batch size changes, the rows that the bucket has beyond it get the pads that their slots declare, and
        the addresses of all slots and constants are checked; a strict manager audits its graphs before every replay.
        While the batch size stays the same, the host writes nothing: what a step left in those rows stands there.

        Args:
            batch_size: rows that are live.
            queries: of each row; one of `queries`.

        Raises:
            ValueError: `batch_size` is outside 1..max_batch_size, or there is no step of so many queries.
            RuntimeError: nothing was captured.
            FrozenError: a slot, adopted tensor or constant was moved.
            StalePointerError: strict, and an address in the graph has lost its owner.
        """
        return self._start(batch_size, queries, None)

    def launch(self, batch_size: int, num_steps: int, queries: int = 1) -> int:
        """Run `num_steps` steps of the first `batch_size` rows, and the loop's epilogue. Returns the bucket that ran.

        Fewer steps run where none of the rows is running any more. On a GPU all of it is one launch wherever the
        driver grants that; the report says what each bucket got instead, and why.

        Raises:
            ValueError: `num_steps` is outside 1..max_steps of the loop, or `batch_size` outside 1..max_batch_size.
            RuntimeError: nothing was captured, or the manager was made without a loop.
            FrozenError: a slot, adopted tensor or constant was moved.
            StalePointerError: strict, and an address in the graph has lost its owner.
        """
        if self._control is None:
            raise RuntimeError("launch() needs a manager that was made with loop=")
        if type(num_steps) is not int or not 1 <= num_steps <= self._control.loop.max_steps:
            raise ArgumentError(f"num_steps must be in 1..max_steps={self._control.loop.max_steps}, got {num_steps!r}")
        return self._start(batch_size, queries, num_steps)

    def _start(self, batch_size: int, queries: int, num_steps: int | None) -> int:
        bucket = self.ladder.bucket_for(batch_size)
        runnable = self._runnables.get((bucket, queries))
        if runnable is None:
            return self._first_use(bucket, queries, batch_size, num_steps)
        if self._strict or batch_size != self._verified_size:
            self.verify()
            self._verified_size = batch_size
        ran = self._go(runnable, bucket, batch_size, num_steps)
        self._reports[bucket, queries].add_run(batch_size, ran, num_steps is not None)
        return bucket

    def _go(self, runnable: Runnable, bucket: int, batch_size: int, num_steps: int | None) -> int:
        """Run a bucket, and return how many steps that were, as far as the host knows."""
        self._set_rows(batch_size, bucket)
        if num_steps is not None and self._control is not None and runnable.loop is not None:
            self._control.ask_for(num_steps)
            return runnable.loop.launch(num_steps)
        runnable.replay()
        return 1

    def _set_rows(self, batch_size: int, bucket: int) -> None:
        """Make rows live, and the bucket's others what their slots declare, unless the last run had as many."""
        self.buffers.set_live_rows(batch_size)
        if batch_size != self._padded_size:
            if batch_size < bucket:
                self.buffers.pad(batch_size, bucket)  # an upload has made rows live, and knows its block alone
            self._padded_size = batch_size

    def _first_use(self, bucket: int, queries: int, batch_size: int, num_steps: int | None) -> int:
        if queries not in self._steps:
            raise ArgumentError(f"queries must be one of {list(self.queries)}, got {queries!r}")
        if not self._is_open:
            raise RuntimeError(f"bucket {bucket} was not captured: call capture() first")
        self.verify()
        others = self.graphs_of(queries)
        captured = next((larger for larger in self.buckets if larger > bucket and larger in others), None)
        if captured is not None:
            ran = self._go(self._runnables[captured, queries], captured, batch_size, num_steps)
            self._report_at(captured, queries).add_run(batch_size, ran, num_steps is not None)
        else:
            self._go(self._generation.eager(bucket, queries), bucket, batch_size, num_steps)
        if not self._frozen:
            self._capture_or_stay_eager(bucket, queries)
        return bucket if captured is None else captured

    def _capture_or_stay_eager(self, bucket: int, queries: int) -> None:
        try:
            with no_row_live(self.buffers):
                self._capture(bucket, queries)
        except CaptureError as error:
            self._stay_eager(bucket, queries)
            self._report_at(bucket, queries).error = str(error)
            warnings.warn(f"bucket {bucket} stays eager: {error}", RuntimeWarning, stacklevel=4)

    def replay_halves(self, batch_size: int, meanwhile: Callable[[], None]) -> int:
        """Run one step in two halves, and something of the host's while the first one runs. Returns the bucket.

        What `meanwhile` writes, and uploads on the current stream, the second half reads. On a CPU, where the first
        half runs in the calling thread, `meanwhile` runs in another one.

        Raises:
            RuntimeError: the manager was made without halves; and what `replay` raises.
        """
        if self._halved is None or not self._is_open:
            raise RuntimeError("replay_halves() needs a manager that was made with halves=, and capture() before")
        bucket = self.ladder.bucket_for(batch_size)
        is_new = bucket not in self._halved.buckets
        if self._strict or batch_size != self._verified_size:
            self.verify()
            self._verified_size = batch_size
        self._set_rows(batch_size, bucket)
        self._halved.run(bucket, self._generation, meanwhile)
        self._report_at(bucket, 1).add_run(batch_size, 1, False)
        if is_new and not self._frozen and self.backend != "eager":
            self._report_at(bucket, 1).add_graphs(self._halved.capture(bucket, self._generation))
        return bucket

    def run_eager(self, batch_size: int, queries: int = 1) -> int:
        """Run the same step over the same bucket without its graph: bit for bit what `replay` computes."""
        bucket = self.ladder.bucket_for(batch_size)
        self._set_rows(batch_size, bucket)
        with on_device(self.buffers.device):
            run(self._steps[queries], self.buffers.narrow(bucket))
        return bucket

    def verify(self) -> None:
        """Check that everything the graphs point at is where it was at capture.

        Raises:
            FrozenError: a slot, adopted tensor or constant was moved.
            StalePointerError: strict, and an address in a graph has lost its owner.
        """
        if self._strict:
            stale = [pointer for pointer in self.audit() if pointer.is_certain]
            if stale:
                raise StalePointerError("\n".join(map(str, stale)))
        self._owners.verify()

    def audit(self) -> list[StalePointer]:
        """Return every address in the graphs that nobody owns any more, smallest bucket first; see `StalePointer`."""
        captured = [(bucket, graph) for (bucket, _), runnable in self._runnables.items() for graph in runnable.graphs]
        captured += [] if self._halved is None else self._halved.graphs
        captured.sort(key=itemgetter(0))
        return [stale for bucket, graph in captured for stale in stale_pointers(bucket, graph, self._owners)]

    def freeze(self) -> None:
        """Refuse, from now on, whatever would move memory that the graphs point at, capture again, or load weights.

        Nothing can be adopted, and no module among the constants loads a state dict. What is moved past all of this is
        found by `verify`, and by the next replay of another batch size.

        Raises:
            FrozenError: something was moved already.
        """
        self._owners.verify()
        self.buffers.freeze()
        self._owners.freeze()
        self._frozen = True

    def thaw(self) -> None:
        """Allow changes again; the graphs are invalid and dropped."""
        self._frozen = False
        self.buffers.thaw()
        self._owners.thaw()
        self._drop_graphs()

    def report(self) -> GraphReport:
        """Return what was captured and replayed up to now, bucket by bucket; waits for loops that the device ends."""
        return GraphReport(self.backend, [self._report_of(*key) for key in sorted(self._reports)])

    def _report_of(self, bucket: int, queries: int) -> BucketReport:
        report = dataclasses.replace(self._reports[bucket, queries])
        runnable = self._runnables.get((bucket, queries))
        report.choices = self._choices(bucket * queries)
        if runnable is not None and runnable.loop is not None:
            steps, rows = runnable.loop.counted()
            report.replays, report.live_rows = report.replays + steps, report.live_rows + rows
        return report

    def dot(self, bucket: int, queries: int = 1) -> str:
        """Return a picture of one bucket's step, in Graphviz' language.

        Raises:
            ValueError: the bucket has no graph.
        """
        captured = self.graphs_of(queries)
        if type(bucket) is not int or bucket not in captured:
            raise ArgumentError(f"bucket must be one of the captured {sorted(captured)}, got {bucket!r}")
        return to_dot(f"bucket {bucket}" if queries == 1 else f"bucket {bucket} x {queries}", captured[bucket].nodes)

    def svg(self, bucket: int, queries: int = 1) -> str:
        """Return a picture of one bucket's step, as SVG; Graphviz draws it.

        Raises:
            ValueError: the bucket has no graph.
            PictureError: Graphviz is not installed.
        """
        return to_svg(self.dot(bucket, queries))

    def close(self) -> None:
        """Release all graphs; the buffers stay.

        Close before process groups are destroyed, where the step holds collectives: their graphs keep communicators
        in use. What is not closed when the process ends is released then, before anything that was there earlier.
        """
        self._owners.thaw()
        self._owners = Owners(self.buffers)
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        self._is_open = False
        self._verified_size = self._padded_size = None
        self._runnables.clear()
        if self._halved is not None:
            self._halved.close()
        self._generation.close()
        self._generation = self._new_generation()
        self._reports = {(bucket, 1): BucketReport(bucket, "waiting") for bucket in self.ladder}

    def _new_generation(self) -> Generation:
        return Generation(
            self._steps,
            self.buffers,
            self._owners,
            backend=self.backend,
            warmup_steps=self._warmup_steps,
            control=self._control,
            around=self._around,
        )


def _close(alive: Callable[[], GraphManager | None]) -> None:
    manager = alive()
    if manager is not None:
        manager.close()


def backend_for(backend: str, device: torch.device) -> str:
    """Return the backend that a name stands for on a device.

    Raises:
        ValueError: it is unknown, or does not work there.
    """
    if backend not in BACKENDS:
        raise ArgumentError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    native = "cuda" if device.type == "cuda" else "recorded"
    if backend in ("cuda", "recorded") and backend != native:
        raise ArgumentError(f"backend {backend!r} does not work on {device.type}; there it is {native!r}")
    return native if backend == "auto" else backend
