"""`GraphManager`: one captured graph for each bucket, replayed for every step."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tqdm import tqdm

from graphdecode.buckets import BucketLadder
from graphdecode.buffers import FrozenError, StepBuffers, on_device
from graphdecode.errors import ArgumentError
from graphdecode.graphs.audit import StalePointer, StalePointerError, stale_pointers
from graphdecode.graphs.capture import Step, no_row_live, run
from graphdecode.graphs.errors import CaptureError
from graphdecode.graphs.generation import Generation, Runnable
from graphdecode.graphs.halves import HalvedStep, Halves
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
    ) -> None:
        if not isinstance(ladder, BucketLadder):
            ladder = BucketLadder(ladder, buffers.max_batch_size)
        if ladder.max_batch_size > buffers.max_batch_size:
            raise ArgumentError(
                f"the ladder goes up to {ladder.max_batch_size} rows, the buffers hold {buffers.max_batch_size}"
            )
        if warmup_steps < 1:
            raise ArgumentError(f"warmup_steps must be >= 1, got {warmup_steps}")
        if capture_when not in CAPTURE_TIMES:
            raise ArgumentError(f"capture_when must be one of {', '.join(CAPTURE_TIMES)}, got {capture_when!r}")
        if loop is not None:
            loop.check(buffers)
        self.backend = backend_for(backend, buffers.device)
        self.buffers = buffers
        self.ladder = ladder
        self._step = step
        self._warmup_steps = warmup_steps
        self._captures_lazily = capture_when == "first-use" and self.backend != "eager"
        self._strict = strict
        self._choices = choices
        self._owners = Owners(buffers, constants)
        self._control = None if loop is None else LoopControl(loop, buffers)
        self._runnables: dict[int, Runnable] = {}
        is_cuda = buffers.device.type == "cuda"
        self._halved = None if halves is None else HalvedStep(halves, is_asynchronous=is_cuda)
        self._is_open = False
        self._verified_size: int | None = None
        self._padded_size: int | None = None
        self._frozen = False
        self._reports: dict[int, BucketReport] = {}
        at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit)
        self._generation = self._new_generation()
        self._drop_graphs()

    @property
    def graphs(self) -> dict[int, StepGraph]:
        """The captured steps by bucket, for those who look into them."""
        return {bucket: runnable.graphs[0] for bucket, runnable in self._runnables.items() if runnable.graphs}

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
            with (
                no_row_live(self.buffers),
                tqdm(
                    largest_first, desc="capturing", unit="graph", disable=None if progress else True, leave=False
                ) as bar,
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
        if self.backend == "eager":
            self._stay_eager(bucket)
            return
        runnable, report = self._generation.capture(bucket), self._reports[bucket]
        graph = runnable.graphs[0]
        report.state, report.error = "captured", None
        report.nodes, report.kernels = graph.kinds, Counter(node.name for node in graph.nodes)
        report.moved_bytes = graph.moved_bytes
        report.add_graphs(runnable.graphs)
        self._keep(bucket, runnable)

    def _stay_eager(self, bucket: int) -> None:
        self._reports[bucket].state = "eager"
        self._keep(bucket, self._generation.eager(bucket))

    def _keep(self, bucket: int, runnable: Runnable) -> None:
        self._runnables[bucket] = runnable
        if runnable.loop is not None:
            self._reports[bucket].loop = runnable.loop.kind
            self._reports[bucket].loop_reason = runnable.loop.reason

    def replay(self, batch_size: int) -> int:
        """Run one step of the first `batch_size` rows: one launch. Returns the bucket that ran.

        When the batch size changes, the rows that the bucket has beyond it get the pads that their slots declare, and
        the addresses of all slots and constants are checked; a strict manager audits its graphs before every replay.
        While the batch size stays the same, the host writes nothing: what a step left in those rows stands there.

        Raises:
            ValueError: `batch_size` is outside 1..max_batch_size.
            RuntimeError: nothing was captured.
            FrozenError: a slot, adopted tensor or constant was moved.
            StalePointerError: strict, and an address in the graph has lost its owner.
        """
        return self._start(batch_size, None)

    def launch(self, batch_size: int, num_steps: int) -> int:
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
        return self._start(batch_size, num_steps)

    def _start(self, batch_size: int, num_steps: int | None) -> int:
        bucket = self.ladder.bucket_for(batch_size)
        runnable = self._runnables.get(bucket)
        if runnable is None:
            return self._first_use(bucket, batch_size, num_steps)
        if self._strict or batch_size != self._verified_size:
            self.verify()
            self._verified_size = batch_size
        ran = self._go(runnable, bucket, batch_size, num_steps)
        self._reports[bucket].add_run(batch_size, ran, num_steps is not None)
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

    def _first_use(self, bucket: int, batch_size: int, num_steps: int | None) -> int:
        if not self._is_open:
            raise RuntimeError(f"bucket {bucket} was not captured: call capture() first")
        self.verify()
        captured = next((larger for larger in self.buckets if larger > bucket and larger in self.graphs), None)
        if captured is not None:
            ran = self._go(self._runnables[captured], captured, batch_size, num_steps)
            self._reports[captured].add_run(batch_size, ran, num_steps is not None)
        else:
            self._go(self._generation.eager(bucket), bucket, batch_size, num_steps)
        if not self._frozen:
            self._capture_or_stay_eager(bucket)
        return bucket if captured is None else captured

    def _capture_or_stay_eager(self, bucket: int) -> None:
        try:
            with no_row_live(self.buffers):
                self._capture(bucket)
        except CaptureError as error:
            self._stay_eager(bucket)
            self._reports[bucket].error = str(error)
            warnings.warn(f"bucket {bucket} stays eager: {error}", RuntimeWarning, stacklevel=4)

    def replay_halves(self, batch_size: int, meanwhile: Callable[[], None]) -> int:
        """Run one step in two halves, and something of the host's while the first one runs. Returns the bucket.

        What `meanwhile` writes, and uploads on the current stream, the second half reads. On a CPU, where the first
        half runs in the calling thread, `meanwhile` runs in another one.

        Raises:
            ValueError: `batch_size` is outside 1..max_batch_size.
            RuntimeError: nothing was captured, or the manager was made without halves.
            FrozenError: a slot, adopted tensor or constant was moved.
            StalePointerError: strict, and an address in a graph has lost its owner.
        """
        if self._halved is None or not self._is_open:
            raise RuntimeError("replay_halves() needs a manager that was made with halves=, and capture() before")
        bucket = self.ladder.bucket_for(batch_size)
        halves = self._halved.buckets.get(bucket)
        if self._strict or batch_size != self._verified_size or halves is None:
            self.verify()
            self._verified_size = batch_size
        running = halves or self._generation.eager_halves(bucket, self._halved.steps)
        self._set_rows(batch_size, bucket)
        self._halved.run(running, meanwhile)
        self._reports[bucket].add_run(batch_size, 1, False)
        if halves is None:
            self._halved.buckets[bucket] = self._captured_halves(bucket, self._halved.steps) or running
        return bucket

    def _captured_halves(self, bucket: int, steps: tuple[Step, Step]) -> Halves | None:
        """Return the graphs of a bucket's halves, or None where none may or can be captured."""
        if self.backend == "eager" or self._frozen:
            return None
        try:
            with no_row_live(self.buffers):
                halves = self._generation.capture_halves(bucket, steps)
        except CaptureError as error:
            warnings.warn(f"the halves of bucket {bucket} stay eager: {error}", RuntimeWarning, stacklevel=4)
            return None
        self._reports[bucket].add_graphs(halves.graphs)
        return halves

    def run_eager(self, batch_size: int) -> int:
        """Run the same step over the same bucket without its graph: bit for bit what `replay` computes."""
        bucket = self.ladder.bucket_for(batch_size)
        self._set_rows(batch_size, bucket)
        with on_device(self.buffers.device):
            run(self._step, self.buffers.narrow(bucket))
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
        """Return every address in the graphs that nobody owns any more, smallest bucket first.

        Not all of them are certain: a word in a kernel's struct may be padding, which only looks like an address.
        """
        return [
            stale
            for bucket in self.buckets
            for graph in self._graphs_of(bucket)
            for stale in stale_pointers(bucket, graph, self._owners)
        ]

    def _graphs_of(self, bucket: int) -> list[StepGraph]:
        halves = {} if self._halved is None else self._halved.buckets
        return [graph for found in (self._runnables, halves) if bucket in found for graph in found[bucket].graphs]

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
        return GraphReport(self.backend, [self._report_of(bucket) for bucket in self.buckets])

    def _report_of(self, bucket: int) -> BucketReport:
        report, runnable = dataclasses.replace(self._reports[bucket]), self._runnables.get(bucket)
        report.choices = self._choices(bucket)
        if runnable is not None and runnable.loop is not None:
            steps, rows = runnable.loop.counted()
            report.replays, report.live_rows = report.replays + steps, report.live_rows + rows
        return report

    def dot(self, bucket: int) -> str:
        """Return a picture of one bucket's step, in Graphviz' language.

        Raises:
            ValueError: the bucket has no graph.
        """
        if type(bucket) is not int or bucket not in self.graphs:
            raise ArgumentError(f"bucket must be one of the captured {sorted(self.graphs)}, got {bucket!r}")
        return to_dot(f"bucket {bucket}", self.graphs[bucket].nodes)

    def svg(self, bucket: int) -> str:
        """Return a picture of one bucket's step, as SVG; Graphviz draws it.

        Raises:
            ValueError: the bucket has no graph.
            PictureError: Graphviz is not installed.
        """
        return to_svg(self.dot(bucket))

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
        self._reports = {bucket: BucketReport(bucket, "waiting") for bucket in self.ladder}

    def _new_generation(self) -> Generation:
        return Generation(
            self._step,
            self.buffers,
            self._owners,
            backend=self.backend,
            warmup_steps=self._warmup_steps,
            control=self._control,
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
