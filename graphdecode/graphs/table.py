"""`GraphTable`: the graphs of an engine by the shape of a step; the life of each: capture, replay, retire."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tqdm import tqdm

from graphdecode.buckets import KINDS, BucketLadder, ShapeLadder, StepShape
from graphdecode.buffers import Batch, FrozenError, StepBuffers
from graphdecode.errors import ArgumentError
from graphdecode.graphs.backend import Backend, StalePointer
from graphdecode.graphs.errors import CaptureError
from graphdecode.graphs.inspect.picture import to_dot, to_svg
from graphdecode.graphs.report import BucketReport, GraphReport
from graphdecode.graphs.step_graph import Loop, LoopControl, Ready, Step, StepGraph, no_row_live, run

CAPTURE_TIMES = ("startup", "idle", "first-use")
_WITHOUT = {"prompts": "prompts are computed without graphs", "mixed": "prompts are computed by themselves"}


class GraphTable:
    """Captures a step once for each shape, and replays it: see `StepShape` and `ShapeLadder`.

    Args:
        step: runs a shape, over the buffers narrowed to its rows; of prompts by themselves, to their tokens.
        buffers: everything that the step reads and writes.
        ladder: the shapes; its buckets are those of steps of one query a row.
        constants: modules and tensors that the step only reads; they are kept alive, and watched for being moved.
        backend: "cuda", "recorded" (the same semantics on a CPU), "eager" (nothing is captured), or "auto".
        warmup_steps: eager steps before each capture; recordings after the first do with one.
        prompts: buffers of prompts, whose rows are tokens; None where no shape has any.
        capture_when: "startup", or "first-use": a shape is captured after the first step that needed it, and that step
            runs padded to the next captured one, or eagerly. "idle" is the same, but that a shape with prompts is
            captured after the second one, and any by `capture_waiting`.
        strict: refuse a replay when an address in its graph has lost its owner.
        choices, computed_in: what the step's owner says of so many tokens, and of all, for the report.
        loop: lets a run be several steps.
        around: given a shape, returns what is entered around its capture.
    """

    def __init__(
        self,
        step: Callable[[StepShape, Batch], None],
        buffers: StepBuffers,
        ladder: ShapeLadder,
        *,
        constants: Iterable[Any] = (),
        backend: str = "auto",
        warmup_steps: int = 2,
        prompts: StepBuffers | None = None,
        capture_when: str = "startup",
        strict: bool = False,
        choices: Callable[[int], dict[str, dict[str, Any]]] = lambda _: {},
        computed_in: str = "",
        loop: Loop | None = None,
        around: Callable[[StepShape], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        if capture_when not in CAPTURE_TIMES:
            raise ArgumentError(f"capture_when must be one of {', '.join(CAPTURE_TIMES)}, got {capture_when!r}")
        most, held = ladder.max_batch_size, buffers.max_batch_size
        if most > held:
            raise ArgumentError(f"the ladder goes up to {most} rows, the buffers hold {held}")
        memory = [buffers] if prompts is None else [buffers, prompts]
        self.buffers, self.prompts = memory[0], memory[-1]
        self.ladder = self._given = ladder
        buckets = BucketLadder((shape.rows for shape in ladder.of("steps")), most)
        self.buckets, self.bucket_for = buckets.sizes, buckets.bucket_for  # ascending; which one holds some rows
        self._backend = Backend(*memory, constants=constants, name=backend, warmup_steps=warmup_steps)
        self.backend = self._backend.name
        self._step, self._around, self._strict = step, around, strict
        self._captures_lazily = capture_when != "startup" and self.backend != "eager"
        self._is_patient = capture_when == "idle"
        self._asked_for: dict[StepShape, None] = {}  # shapes with prompts that wait for a second step, or for leisure
        self._choices, self._computed_in = choices, computed_in
        self._control = None if loop is None else LoopControl(loop, buffers)
        self._ready: dict[StepShape, tuple[Ready, BucketReport]] = {}
        self._reports: dict[StepShape, BucketReport] = {}
        self._open: set[str] = set()  # kinds that were captured, or are at their first use
        self._verified: int | None = None  # rows of the last run, when all addresses were looked at
        self._frozen = False
        self._user = object()  # stands for this table where buffers remember whose step ran
        self._beside: ThreadPoolExecutor | None = None
        at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit)
        self._drop(KINDS)

    @property
    def graphs(self) -> dict[int, StepGraph]:
        """The captured steps of one query a row by bucket, for those who look into them."""
        return {shape.rows: graph for shape, graph in self._captured.items() if shape == StepShape(shape.rows)}

    @property
    def _captured(self) -> dict[StepShape, StepGraph]:
        return {shape: ready.graphs[0] for shape, (ready, _) in sorted(self._ready.items()) if ready.graphs}

    def capture(self, progress: bool = True, kinds: Collection[str] = KINDS) -> GraphReport:
        """Capture the shapes of some kinds, those of most tokens first, and return the report of steps of rows alone.

        With "idle" and "first-use", only make ready for it. Steps run for real, with no row live; the slots hold the
        same afterwards as before, adopted tensors may not. Where steps with prompts cannot be captured, prompts go by
        themselves, or without graphs, and a warning says why.

        Raises:
            CaptureError: the step does what no graph can replay; the process is fit to go on, and no graph is left.
            FrozenError: the table is frozen.
        """
        if self._frozen:
            raise FrozenError("the graphs are frozen: thaw() before capturing again")
        self.ladder = self._given
        self._drop(kinds)
        try:
            with (
                self._nothing_live(StepShape(1, 1, 1)),
                # all bars of a process share a lock: none is made that nobody wants
                tqdm(desc="capturing", unit="graph", disable=None, leave=False) if progress else nullcontext() as bar,
            ):
                while (shape := self._next_to_capture(kinds)) is not None:
                    try:
                        (self._try if self._captures_lazily else self._capture)(shape)
                    except CaptureError as error:
                        if shape.kind == "steps":
                            raise
                        self.ladder = self.ladder.without(shape.kind)
                        self._drop([shape.kind])
                        warnings.warn(f"{_WITHOUT[shape.kind]}: {error}", RuntimeWarning, stacklevel=3)
                    if bar is not None:
                        bar.update()
        except BaseException:
            self._drop(KINDS)
            raise
        self._open.update(kinds)
        return self.report()

    def _next_to_capture(self, kinds: Collection[str]) -> StepShape | None:
        if self._captures_lazily:  # one mixed step is tried
            return next(iter([] if "mixed" in self._open or "mixed" not in kinds else self.ladder.of("mixed")), None)
        wanted = (shape for shape in reversed(self.ladder.at_startup) if shape.kind in kinds)
        return next((shape for shape in wanted if shape not in self._ready), None)

    def _try(self, shape: StepShape) -> None:
        """Run a mixed step that nobody asked for: a model whose steps cannot take prompts along says so now."""
        try:
            self._backend.eager(*self._bound(shape)).replays[0]()
        except Exception as error:
            raise CaptureError.of(error) from error
        self._open.add(shape.kind)

    def capture_waiting(self) -> bool:
        """With "idle", capture one shape that was asked for, or is one of startup; return whether there was one."""
        if not self._is_patient or not self._captures_lazily or self._frozen:
            return False
        rest = (shape for shape in reversed(self.ladder.at_startup) if shape.kind in self._open)
        shape = next((shape for shape in (*self._asked_for, *rest) if shape not in self._ready), None)
        if shape is not None:
            self._capture_or_stay_eager(shape)
        return shape is not None

    def _nothing_live(self, shape: StepShape) -> AbstractContextManager[None]:
        # the last pages of prompts may be somebody else's by now
        return no_row_live(*[self.buffers] * bool(shape.rows), *[self.prompts] * bool(shape.prompt_tokens))

    def _bound(self, shape: StepShape) -> tuple[Step, Batch, Step | None, LoopControl | None]:
        """Return a shape's step, the batch that it is given, what follows the step, and what governs its loop."""
        narrowed = self.buffers.narrow(shape.rows) if shape.rows else self.prompts.narrow(shape.prompt_tokens)
        step = functools.partial(self._step, shape)
        if shape.part != "whole":
            return step, narrowed, functools.partial(self._step, shape.halves[1]), None
        if self._control is None or shape.kind != "steps":
            return step, narrowed, None, None
        return step, narrowed, self._control.loop.epilogue, self._control

    def _capture(self, shape: StepShape) -> None:
        is_eager = self.backend == "eager"
        with nullcontext() if is_eager else self._around(shape):
            ready = (self._backend.eager if is_eager else self._backend.captured)(*self._bound(shape))
        self._keep(shape, ready)

    def _keep(self, shape: StepShape, ready: Ready) -> None:
        self._ready[shape] = ready, self._report_at(shape)
        self._report_at(shape).take(ready, is_whole=shape.part == "whole")

    def _report_at(self, shape: StepShape) -> BucketReport:
        """Return what counts a shape's runs; those of its halves count with the whole."""
        return self._reports.setdefault(shape._replace(part="whole"), BucketReport.of(shape, "waiting"))

    def run(
        self, wanted: StepShape, *, steps: int | None = None, meanwhile: Callable[[], None] | None = None
    ) -> StepShape | None:
        """Run a step in the shape that fits it, and return that: one launch; None where no graph holds it.

        When the rows change, those that the shape has beyond them get the pads that their slots declare, and the
        addresses of all slots and constants are checked; a strict table audits its graphs before every replay.

        Args:
            wanted: the step as it is: live rows, their queries, tokens of staged chunks of prompts.
            steps: of a loop; None: one step, and no epilogue.
            meanwhile: what the host does between the two halves of a step, on a CPU in another thread while the first
                one runs; what it writes, and uploads on the current stream, the second half reads.

        Raises:
            ValueError: there are more rows than the capacity, or there is no step of so many queries.
            RuntimeError: nothing was captured, or the step does not run in halves.
            FrozenError: a slot, adopted tensor or constant was moved.
            StalePointerError: strict, and an address in the graph has lost its owner.
        """
        if meanwhile is not None and wanted.part == "whole":
            raise RuntimeError(f"{wanted} does not run in halves")
        shape = self.ladder.fit(wanted)
        rows, prompt_tokens = wanted.rows, wanted.prompt_tokens
        if shape is None or (prompt_tokens and shape.kind not in self._open):
            return None
        fitting, found = shape, self._ready.get(shape)
        if is_first := found is None:
            shape, found = self._instead_of(shape, wanted)
        ready, report = found
        size = rows or prompt_tokens
        if self._strict or is_first or self._verified != size:
            self.verify()
            self._verified = size
        if rows:
            self.buffers.make_ready(rows, shape.rows, self._user)
        if prompt_tokens:
            self.prompts.make_ready(prompt_tokens, shape.prompt_tokens, self._user)
        ran = 1
        if steps is not None:
            assert ready.loop is not None
            assert self._control is not None
            self._control.ask_for(steps)
            ran = ready.loop.launch(steps)
            report.launches += 1
        elif meanwhile is None:
            ready.replays[0]()
        else:
            self._run_halves(ready, meanwhile)
        report.replays += ran
        report.live_rows += size * ran
        if is_first and not self._frozen:
            if self._is_patient and fitting.prompt_tokens and fitting not in self._asked_for:
                self._asked_for[fitting] = None
            else:
                self._capture_or_stay_eager(fitting)
        return shape

    def _run_halves(self, ready: Ready, meanwhile: Callable[[], None]) -> None:
        first, second = ready.replays
        if self.buffers.device.type == "cuda":  # a launch comes back before its work is done; on a CPU it is the work
            first()
            meanwhile()
        else:
            self._beside = self._beside or ThreadPoolExecutor(1, thread_name_prefix="graphdecode-beside")
            done = self._beside.submit(meanwhile)
            try:
                first()
            finally:
                done.result()
        second()

    def _instead_of(self, shape: StepShape, wanted: StepShape) -> tuple[StepShape, tuple[Ready, BucketReport]]:
        """Return what runs a step whose shape has no graph yet: the next larger one that has, or the step itself."""
        if shape.kind not in self._open:
            raise RuntimeError(f"{shape} was not captured: call capture() first")
        if shape.part != "whole":
            return shape, (self._backend.eager(*self._bound(shape)), self._report_at(shape))
        for other in self.ladder.holding(wanted):
            if other in self._ready and self._ready[other][0].graphs:
                return other, self._ready[other]
        self._report_at(shape).eager_runs += 1
        return shape, (self._backend.eager(*self._bound(shape)), BucketReport(0, "eager"))  # which counts no replay

    def _capture_or_stay_eager(self, fitting: StepShape) -> None:
        self._asked_for.pop(fitting, None)
        try:
            with self._nothing_live(fitting):
                self._capture(fitting)
        except CaptureError as error:
            self._keep(fitting, self._backend.eager(*self._bound(fitting)))
            what = f"the halves of {fitting._replace(part='whole')} stay"
            if fitting.part == "whole":
                what, self._report_at(fitting).error = f"{fitting} stays", str(error)
            warnings.warn(f"{what} eager: {error}", RuntimeWarning, stacklevel=3)

    def replay(self, batch_size: int) -> int:
        """Run one step of the first `batch_size` rows: one launch. Return the bucket that ran; see `GraphTable.run`."""
        self.bucket_for(batch_size)
        return (self.run(StepShape(batch_size)) or StepShape(0)).rows

    def launch(self, batch_size: int, num_steps: int) -> int:
        """Run `num_steps` steps of the first `batch_size` rows, and the loop's epilogue. Return the bucket that ran.

        Fewer steps run where none of the rows is running any more; see `GraphTable.run`.

        Raises:
            ValueError: `num_steps` is outside 1..max_steps of the loop.
            RuntimeError: there is no loop.
        """
        if self._control is None:
            raise RuntimeError("several steps at once need graphs that were made with loop=")
        if type(num_steps) is not int or not 1 <= num_steps <= self._control.loop.max_steps:
            most = self._control.loop.max_steps
            raise ArgumentError(f"num_steps must be in 1..max_steps={most}, got {num_steps!r}")
        self.bucket_for(batch_size)
        return (self.run(StepShape(batch_size), steps=num_steps) or StepShape(0)).rows

    def run_eager(self, batch_size: int) -> int:
        """Run the same step over the same bucket without its graph: bit for bit what `replay` computes."""
        shape = StepShape(self.bucket_for(batch_size))
        self.buffers.make_ready(batch_size, shape.rows, self._user)
        self._backend.eager(*self._bound(shape)).replays[0]()
        return shape.rows

    def dot(self, bucket: int, queries: int = 1) -> str:
        """Return a picture of one bucket's step, in Graphviz' language; a ValueError where it has no graph."""
        captured, shape = self._captured, StepShape(bucket, queries)
        if type(bucket) is not int or shape not in captured:
            known = [other.rows for other in captured if other == StepShape(other.rows, queries)]
            raise ArgumentError(f"bucket must be one of the captured {known}, got {bucket!r}")
        return to_dot(str(shape), captured[shape].nodes)

    def svg(self, bucket: int, queries: int = 1) -> str:
        """Return the same as SVG; Graphviz draws it, and a PictureError says where it is not installed."""
        return to_svg(self.dot(bucket, queries))

    def run_beyond(self, shape: StepShape, step: Callable[[], Any]) -> Any:
        """Run what no graph holds, operator by operator, and count it with the most prompt tokens that there can be."""
        if shape.rows:
            self.buffers.set_live_rows(shape.rows)
        largest = StepShape(self.buffers.max_batch_size if shape.rows else 0, 1, self.prompts.max_batch_size)
        self._reports.setdefault(largest, BucketReport.of(largest, "eager")).eager_runs += 1
        return run(lambda _: step(), Batch(shape.rows, {}))

    def takes(self, rows: int, prompt_tokens: int) -> bool:
        """Whether prompts are to go along with a step of some rows.

        They do where a graph has room for them, or none for so many at all: in between they go by themselves.
        """
        mixed = self.ladder.of("mixed") if "mixed" in self._open else []
        if not mixed or self.ladder.fit(StepShape(rows, 1, prompt_tokens)) is not None:
            return bool(mixed)
        return prompt_tokens > max(shape.tokens for shape in mixed)

    def verify(self) -> None:
        """Check that everything the graphs point at is where it was at capture; see `run` for the errors."""
        self._backend.verify(self.audit() if self._strict else ())

    def audit(self) -> list[StalePointer]:
        """Return every address in the graphs that nobody owns any more, smallest bucket first; see `StalePointer`."""
        buckets = sorted((shape.rows or shape.prompt_tokens, shape) for shape in self._ready)
        return self._backend.audit((bucket, graph) for bucket, at in buckets for graph in self._ready[at][0].graphs)

    def freeze(self) -> None:
        """Refuse, from now on, to adopt, to capture again, and to load weights; what moves all the same `verify` finds.

        Raises:
            FrozenError: something was moved already.
        """
        self._backend.owners.verify()
        self.buffers.freeze()
        self._backend.owners.freeze()
        self._frozen = True

    def thaw(self) -> None:
        """Allow changes again; the graphs are invalid and dropped."""
        self._frozen = False
        self.buffers.thaw()
        self._backend.owners.thaw()
        self._drop(KINDS)

    def report(self, kind: str = "steps") -> GraphReport:
        """Return what was captured and run of a kind, shape by shape; waits for loops that the device ends."""
        buckets = []
        shapes = sorted(shape for shape in self._reports if shape.kind == kind)
        for shape in sorted(shapes, key=lambda shape: shape.tokens if kind == "mixed" else 0):
            report = dataclasses.replace(self._reports[shape], choices=self._choices(shape.tokens))
            if shape in self._ready and (loop := self._ready[shape][0].loop) is not None:
                steps, rows = loop.counted()
                report.replays, report.live_rows = report.replays + steps, report.live_rows + rows
            buckets.append(report)
        return GraphReport(self.backend, buckets, self._computed_in)

    def close(self) -> None:
        """Release all graphs; the buffers stay. What is not closed when the process ends is released then.

        Close before process groups are destroyed, where the step holds collectives: their graphs keep communicators.
        """
        self._drop(KINDS)
        self._backend.forget()

    def _drop(self, kinds: Collection[str]) -> None:
        self._open.difference_update(kinds)
        self._verified = None
        gone = [self._ready.pop(shape)[0] for shape in list(self._ready) if shape.kind in kinds]
        self._backend.release(gone, is_last=not self._ready)
        if "steps" in kinds and self._beside is not None:
            self._beside.shutdown()
            self._beside = None
        waiting = {shape: BucketReport.of(shape, "waiting") for shape in self.ladder.of(*kinds) if shape.queries == 1}
        self._reports = {s: report for s, report in self._reports.items() if s.kind not in kinds} | waiting


class GraphManager(GraphTable):
    """The graphs of a step that has rows alone, one a bucket; see `GraphTable`.

    `step` is given the buffers narrowed to a bucket's rows; `ladder` is a `BucketLadder`, or batch sizes.
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
        **options: Any,
    ) -> None:
        if not isinstance(ladder, BucketLadder):
            ladder = BucketLadder(ladder, buffers.max_batch_size)
        shapes = ShapeLadder(map(StepShape, ladder), ladder.max_batch_size)
        options |= {"constants": constants, "backend": backend, "warmup_steps": warmup_steps}
        super().__init__(lambda _, batch: step(batch), buffers, shapes, **options)


def _close(alive: Callable[[], GraphTable | None]) -> None:
    table = alive()
    if table is not None:
        table.close()
