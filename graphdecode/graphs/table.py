"""`GraphTable`: captures, keeps and replays the graphs of an engine, one per step shape."""

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

import torch
from tqdm import tqdm

from graphdecode.buckets import KINDS, BucketLadder, ShapeLadder, StepShape
from graphdecode.buffers import FrozenError, StepBuffers, StepSlots
from graphdecode.errors import ArgumentError
from graphdecode.graphs.backend import Backend, StalePointer
from graphdecode.graphs.errors import CaptureError
from graphdecode.graphs.inspect.picture import to_dot, to_svg
from graphdecode.graphs.report import BucketReport, GraphReport
from graphdecode.graphs.step_graph import CapturedStep, Loop, LoopControl, Step, StepGraph, check_arguments, no_row_live

CAPTURE_TIMES = ("startup", "idle", "first-use")
_WITHOUT_GRAPHS = {"prompts": "prompts are computed without graphs", "mixed": "prompts are computed by themselves"}
_REPORTED_KINDS = ("steps", "prompts", "mixed")  # also before a step of them ran


class GraphTable:
    """Captures a step once for each shape, and replays it: see `StepShape` and `ShapeLadder`.

    Args:
        step: runs a shape over the buffers narrowed to its rows, or to its tokens if it has only prompts.
        buffers: everything that the step reads and writes.
        ladder: the shapes; its buckets are those of steps with one query per row.
        constants: modules and tensors that the step only reads; they are kept alive, and must not move.
        backend: "cuda", "recorded" (the same semantics on a CPU), "eager" (nothing is captured), or "auto".
        warmup_steps: eager steps before each capture; recordings after the first run the step by one replay.
        prompts: buffers of prompts, whose rows are tokens; None if no shape has prompts.
        capture_when: "startup", or "first-use": a shape is captured after the first step that needed it; that step runs
            padded to the next captured shape, or eagerly. "idle": as first-use, but a shape is captured after its
            second step, or by `capture_waiting`.
        strict: refuse a replay if the owner of an address in its graph has changed.
        choices, computed_in: facts for the report: for a number of tokens, and for all.
        loop: allows several steps per launch.
        around: given a shape, returns a context manager to capture it in.
    """

    def __init__(
        self,
        step: Callable[[StepShape, Any], None],
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
        most, capacity = ladder.max_batch_size, buffers.max_batch_size
        if most > capacity:
            raise ArgumentError(f"the ladder goes up to {most} rows, the buffers hold {capacity}")
        memory = [buffers] if prompts is None else [buffers, prompts]
        self.buffers, self.prompts = memory[0], memory[-1]
        self.ladder = self._full_ladder = ladder
        buckets = BucketLadder((shape.rows for shape in ladder.of("steps")), most)
        self.buckets, self.bucket_for = buckets.sizes, buckets.bucket_for
        self._backend = Backend(*memory, constants=constants, name=backend, warmup_steps=warmup_steps)
        self.backend = self._backend.name
        self._step, self._around, self._strict = step, around, strict
        self._captures_lazily = capture_when != "startup" and self.backend != "eager"
        self._captures_when_idle = capture_when == "idle"
        self._requested: dict[StepShape, None] = {}  # shapes with prompts after their first step ("idle")
        self._choices, self._computed_in = choices, computed_in
        self._control = None if loop is None else LoopControl(loop, buffers)
        self._ready: dict[StepShape, tuple[CapturedStep, BucketReport]] = {}
        self._reports: dict[StepShape, BucketReport] = {}
        self._enabled: set[str] = set()  # kinds of shapes that may run: captured, or to be captured at first use
        self._verified: int | None = None  # rows of the last run; addresses are verified when they change
        self._frozen = self._is_closed = False
        self._identity = object()  # for `StepBuffers.make_ready`
        self._host_thread: ThreadPoolExecutor | None = None
        at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit)
        self._drop(KINDS)

    @property
    def graphs(self) -> dict[int, StepGraph]:
        """The captured steps of one query per row, by bucket."""
        return {shape.rows: graph for shape, graph in self._captured.items() if shape == StepShape(shape.rows)}

    @property
    def _captured(self) -> dict[StepShape, StepGraph]:
        return {shape: ready.graphs[0] for shape, (ready, _) in sorted(self._ready.items()) if ready.graphs}

    def capture(self, progress: bool = True, kinds: Collection[str] = KINDS) -> GraphReport:
        """Capture the shapes of some kinds, largest first, and return the report of steps without prompts.

        With "idle" and "first-use", capture nothing yet. Steps run for real, with no row live. Slots are restored,
        adopted tensors are not. If steps with prompts cannot be captured, a warning says why, and prompts run in passes
        of their own, or without graphs.

        Raises:
            CaptureError: no graph can replay the step. The table is empty; the process can go on.
            FrozenError: the table is frozen.
        """
        if self._is_closed:
            raise RuntimeError("the graphs were closed, and their constants forgotten: make others")
        if self._frozen:
            raise FrozenError("the graphs are frozen: thaw() before capturing again")
        self.ladder = self._full_ladder
        self._drop(kinds)
        total = None if self._captures_lazily else sum(shape.kind in kinds for shape in self.ladder.at_startup)
        try:
            with (
                self._nothing_live(StepShape(1, 1, 1)),
                # all bars of a process share a lock: make one only if needed
                tqdm(total=total, desc="capturing", unit="graph", disable=None, leave=False)
                if progress
                else nullcontext() as bar,
            ):
                while (shape := self._next_to_capture(kinds)) is not None:
                    try:
                        (self._probe if self._captures_lazily else self._capture)(shape)
                    except CaptureError as error:
                        if shape.kind == "steps":
                            raise
                        self.ladder = self.ladder.without(shape.kind)
                        self._drop([shape.kind])
                        warnings.warn(f"{_WITHOUT_GRAPHS[shape.kind]}: {error}", RuntimeWarning, stacklevel=3)
                    if bar is not None:
                        bar.update()
        except BaseException:
            self._drop(KINDS)
            raise
        self._enabled.update(kinds)
        return self.report()

    def _next_to_capture(self, kinds: Collection[str]) -> StepShape | None:
        if self._captures_lazily:  # probe one mixed step
            return next(iter([] if "mixed" in self._enabled or "mixed" not in kinds else self.ladder.of("mixed")), None)
        candidates = (shape for shape in reversed(self.ladder.at_startup) if shape.kind in kinds)
        return next((shape for shape in candidates if shape not in self._ready), None)

    def _probe(self, shape: StepShape) -> None:
        """Run a mixed step eagerly, with no row live: a model that cannot mix raises now."""
        try:
            self._backend.eager(*self._arguments_of(shape)).replays[0]()
        except Exception as error:
            raise CaptureError.of(error) from error
        self._enabled.add(shape.kind)

    def capture_waiting(self) -> bool:
        """With "idle", capture one shape that was requested, or of startup; return whether there was one."""
        if not self._captures_when_idle or not self._captures_lazily or self._frozen:
            return False
        of_startup = (shape for shape in reversed(self.ladder.at_startup) if shape.kind in self._enabled)
        shape = next((shape for shape in (*self._requested, *of_startup) if shape not in self._ready), None)
        if shape is not None:
            self._capture_or_stay_eager(shape)
        return shape is not None

    def _nothing_live(self, shape: StepShape) -> AbstractContextManager[None]:
        # the pages of the last prompts may have other owners now
        return no_row_live(*[self.buffers] * bool(shape.rows), *[self.prompts] * bool(shape.prompt_tokens))

    def _arguments_of(self, shape: StepShape) -> tuple[Step, StepSlots, Step | None, LoopControl | None]:
        """Return a shape's step, its batch, what runs after the step, and the control of its loop."""
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
            ready = (self._backend.eager if is_eager else self._backend.captured)(*self._arguments_of(shape))
        self._add(shape, ready)

    def _add(self, shape: StepShape, ready: CapturedStep) -> None:
        self._ready[shape] = ready, self._report_at(shape)
        self._report_at(shape).take(ready, is_whole=shape.part == "whole")

    def _report_at(self, shape: StepShape) -> BucketReport:
        """Return the report of a shape; its halves share it."""
        return self._reports.setdefault(shape._replace(part="whole"), BucketReport.of(shape, "waiting"))

    def run(
        self, requested: StepShape, *, steps: int | None = None, meanwhile: Callable[[], None] | None = None
    ) -> StepShape | None:
        """Run a step in the smallest shape that holds it, and return that shape; None if no shape does.

        When the number of rows changes, padding rows get the pads of their slots, and the addresses of all slots and
        constants are checked. A strict table audits its graphs before every replay.

        Args:
            requested: the step before padding: live rows, queries, tokens of staged prompt chunks.
            steps: number of steps of a loop; None: one step, and no epilogue.
            meanwhile: host work between the two halves of a step, on a CPU in another thread while the first half runs.
                The second half reads what it writes, or uploads on the current stream.

        Raises:
            ValueError: more rows than the capacity, or no step with that number of queries.
            RuntimeError: nothing was captured, or the step does not run in halves.
            FrozenError: a slot, adopted tensor or constant was moved.
            StalePointerError: strict, and the owner of an address in the graph has changed.
        """
        if meanwhile is not None and requested.part == "whole":
            raise RuntimeError(f"{requested} does not run in halves")
        shape = self.ladder.fit(requested)
        rows, prompt_tokens = requested.rows, requested.prompt_tokens
        if shape is None or (prompt_tokens and shape.kind not in self._enabled):
            return None
        fitting, captured = shape, self._ready.get(shape)
        if is_first := captured is None:
            shape, captured = self._fallback(shape, requested)
        ready, report = captured
        size = rows or prompt_tokens
        if self._strict or is_first or self._verified != size:
            self.verify()
            self._verified = size
        if rows:
            self.buffers.make_ready(rows, shape.rows, self._identity)
        if prompt_tokens:
            self.prompts.make_ready(prompt_tokens, shape.prompt_tokens, self._identity)
        ran = 1
        if steps is not None:
            assert ready.loop is not None
            assert self._control is not None
            self._control.set_limit(steps)
            ran = ready.loop.launch(steps)
            report.launches += 1
        elif meanwhile is None:
            ready.replays[0]()
        else:
            self._run_halves(ready, meanwhile)
        report.replays += ran
        report.live_rows += size * ran
        if is_first and not self._frozen:
            if self._captures_when_idle and fitting not in self._requested:
                self._requested[fitting] = None
            else:
                self._capture_or_stay_eager(fitting)
        return shape

    def _run_halves(self, ready: CapturedStep, meanwhile: Callable[[], None]) -> None:
        first, second = ready.replays
        if self.buffers.device.type == "cuda":  # launches are asynchronous
            first()
            meanwhile()
        else:
            self._host_thread = self._host_thread or ThreadPoolExecutor(1, thread_name_prefix="graphdecode-beside")
            done = self._host_thread.submit(meanwhile)
            try:
                first()
            finally:
                done.result()
        second()

    def _fallback(self, shape: StepShape, requested: StepShape) -> tuple[StepShape, tuple[CapturedStep, BucketReport]]:
        """Return what runs a shape without a graph: the next larger captured one, or the step eagerly."""
        if self._is_closed:
            raise RuntimeError(f"{shape} has no graph any more: the graphs were closed")
        if shape.kind not in self._enabled:
            raise RuntimeError(f"{shape} was not captured: call capture() first")
        if shape.part != "whole":
            return shape, (self._backend.eager(*self._arguments_of(shape)), self._report_at(shape))
        for other in self.ladder.holding(requested):
            if other in self._ready and self._ready[other][0].graphs:
                return other, self._ready[other]
        self._report_at(shape).eager_runs += 1
        # its replays are not counted
        return shape, (self._backend.eager(*self._arguments_of(shape)), BucketReport(0, "eager"))

    def _capture_or_stay_eager(self, fitting: StepShape) -> None:
        self._requested.pop(fitting, None)
        try:
            with self._nothing_live(fitting):
                self._capture(fitting)
        except CaptureError as error:
            self._add(fitting, self._backend.eager(*self._arguments_of(fitting)))
            subject = f"the halves of {fitting._replace(part='whole')} stay"
            if fitting.part == "whole":
                subject, self._report_at(fitting).error = f"{fitting} stays", str(error)
            warnings.warn(f"{subject} eager: {error}", RuntimeWarning, stacklevel=3)

    def replay(self, batch_size: int) -> int:
        """Run one step of the first `batch_size` rows, and return the bucket that ran; see `run`."""
        self.bucket_for(batch_size)
        return (self.run(StepShape(batch_size)) or StepShape(0)).rows

    def launch(self, batch_size: int, num_steps: int) -> int:
        """Run `num_steps` steps of the first `batch_size` rows, and the loop's epilogue; return the bucket that ran.

        Fewer steps run if all rows finish; see `run`.

        Raises:
            ValueError: `num_steps` is outside 1..max_steps of the loop.
            RuntimeError: there is no loop.
        """
        if self._control is None:
            raise RuntimeError("several steps per launch need a table with loop=")
        if type(num_steps) is not int or not 1 <= num_steps <= self._control.loop.max_steps:
            most = self._control.loop.max_steps
            raise ArgumentError(f"num_steps must be in 1..max_steps={most}, got {num_steps!r}")
        self.bucket_for(batch_size)
        return (self.run(StepShape(batch_size), steps=num_steps) or StepShape(0)).rows

    def run_eager(self, batch_size: int) -> int:
        """Run the step over the same bucket without its graph: bit for bit what `replay` computes."""
        shape = StepShape(self.bucket_for(batch_size))
        self.buffers.make_ready(batch_size, shape.rows, self._identity)
        self._backend.eager(*self._arguments_of(shape)).replays[0]()
        return shape.rows

    def dot(self, bucket: int, queries: int = 1) -> str:
        """Return one bucket's step in Graphviz' language; raises ArgumentError if it has no graph."""
        captured, shape = self._captured, StepShape(bucket, queries)
        if type(bucket) is not int or shape not in captured:
            captured_rows = [other.rows for other in captured if other == StepShape(other.rows, queries)]
            raise ArgumentError(f"bucket must be one of the captured {captured_rows}, got {bucket!r}")
        return to_dot(str(shape), captured[shape].nodes)

    def svg(self, bucket: int, queries: int = 1) -> str:
        """Return the same as SVG, drawn by Graphviz; raises PictureError if that is not installed."""
        return to_svg(self.dot(bucket, queries))

    def run_without_graph(self, shape: StepShape, step: Callable[[], Any]) -> Any:
        """Run a shape that no graph fits, operator by operator; the report counts it in the largest shape."""
        if shape.rows:
            self.buffers.set_live_rows(shape.rows)
        largest = StepShape(self.buffers.max_batch_size if shape.rows else 0, 1, self.prompts.max_batch_size)
        self._reports.setdefault(largest, BucketReport.of(largest, "eager")).eager_runs += 1
        with torch.no_grad():
            return step()

    def can_mix(self, rows: int, prompt_tokens: int) -> bool:
        """Whether to put prompts into a step of some rows.

        True if a graph fits them, or if no mixed graph has that many prompt tokens.
        """
        mixed = self.ladder.of("mixed") if "mixed" in self._enabled else []
        if not mixed or self.ladder.fit(StepShape(rows, 1, prompt_tokens)) is not None:
            return bool(mixed)
        return prompt_tokens > max(shape.tokens for shape in mixed)

    def verify(self) -> None:
        """Check that all memory of the graphs is where it was at capture; see `run` for the errors."""
        self._backend.verify(self.audit() if self._strict else ())

    def audit(self) -> list[StalePointer]:
        """Return every address in the graphs whose owner has changed, smallest bucket first."""
        buckets = sorted((shape.rows or shape.prompt_tokens, shape) for shape in self._ready)
        return self._backend.audit((bucket, graph) for bucket, at in buckets for graph in self._ready[at][0].graphs)

    def freeze(self) -> None:
        """Refuse to adopt tensors, capture again and load weights until `thaw`; `verify` finds what moves anyway.

        Raises:
            FrozenError: something was moved already.
        """
        self._backend.owners.verify()
        self.buffers.freeze()
        self._backend.owners.freeze()
        self._frozen = True

    def thaw(self) -> None:
        """Allow changes again; the graphs are dropped."""
        self._frozen = False
        self.buffers.thaw()
        self._backend.owners.thaw()
        self._drop(KINDS)

    def report(self, kind: str = "steps") -> GraphReport:
        """Return the report of a kind, shape by shape; waits for loops on the device."""
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
        """Release all graphs, but not the buffers; happens at the end of the process at the latest.

        If the step has collectives, close before process groups are destroyed: graphs keep communicators.
        """
        self._drop(KINDS)
        self._backend.forget()
        self._is_closed = True

    def _drop(self, kinds: Collection[str]) -> None:
        self._enabled.difference_update(kinds)
        self._verified = None
        dropped = [self._ready.pop(shape)[0] for shape in list(self._ready) if shape.kind in kinds]
        self._backend.release(dropped, is_last=not self._ready)
        if "steps" in kinds and self._host_thread is not None:
            self._host_thread.shutdown()
            self._host_thread = None
        reported = self.ladder.of(*(kind for kind in kinds if kind in _REPORTED_KINDS))
        waiting = {shape: BucketReport.of(shape, "waiting") for shape in reported if shape.queries == 1}
        self._reports = {s: report for s, report in self._reports.items() if s.kind not in kinds} | waiting


class GraphManager(GraphTable):
    """The graphs of a step without prompts, one per bucket; see `GraphTable`.

    `step` takes the buffers narrowed to a bucket's rows; `ladder` is a `BucketLadder`, or batch sizes.
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
        check_arguments(step, buffers)
        if not isinstance(ladder, Iterable):
            raise ArgumentError(f"ladder must be batch sizes such as [1, 2, 4], or a BucketLadder, got {ladder!r}")
        if not isinstance(ladder, BucketLadder):
            ladder = BucketLadder(ladder, buffers.max_batch_size)
        shapes = ShapeLadder(map(StepShape, ladder), ladder.max_batch_size)
        options |= {"constants": constants, "backend": backend, "warmup_steps": warmup_steps}

        @functools.wraps(step)  # errors name its line
        def of_shape(_: StepShape, batch: StepSlots) -> Any:
            return step(batch)

        super().__init__(of_shape, buffers, shapes, **options)


def _close(alive: Callable[[], GraphTable | None]) -> None:
    table = alive()
    if table is not None:
        table.close()
