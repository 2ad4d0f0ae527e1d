"""Runs the model: steps and short prompts by replaying their graphs; the slots are the step's own affair."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from graphdecode.buckets import KINDS, ShapeLadder, StepShape
from graphdecode.buffers import Batch, on_device
from graphdecode.cache import PagedKVCache
from graphdecode.engine.capacity import Capacity
from graphdecode.engine.prompts import PromptChunk, Prompts
from graphdecode.engine.steps import DecodeStep, RowInputs, Step, StepLogprobs, StepSetting, StepTokens
from graphdecode.graphs import BucketReport, GraphReport, GraphTable
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.instructions import instructions
from graphdecode.models import Model

_HERE = nullcontext()


class LaunchPlan(NamedTuple):
    """A launch of what is staged: all that the ranks of a model have to agree on."""

    wanted: StepShape  # the step as it is; in halves where the host does something in between
    steps: int = 1  # at most `steps_per_launch`; fewer run if all rows finish before. One with chunks, or in halves
    chunks: Sequence[PromptChunk] = ()  # of prompts
    catches_up: bool = False  # the chunks are for the source of drafts alone: tokens that plain steps fed

    @classmethod
    def of_chunks(
        cls, chunks: Sequence[PromptChunk], rows: int = 0, *, catches_up: bool = False, has_adapters: bool = False
    ) -> LaunchPlan:
        """Return the plan of a pass of chunks, by themselves or along with some rows, which may have adapters."""
        has_adapters = has_adapters or any(chunk.adapter >= 0 for chunk in chunks)
        shape = StepShape(rows, 1, sum(len(chunk.token_ids) for chunk in chunks), has_adapters=has_adapters)
        return cls(shape, 1, chunks, catches_up)

    def to_bytes(self) -> bytes:
        """Return it for another rank; of chunks their lengths, for what they hold is staged."""
        sizes = [(len(chunk.token_ids), len(chunk.scored), chunk.num_logprobs) for chunk in self.chunks]
        return json.dumps(self._replace(chunks=sizes)).encode()  # type: ignore[arg-type]

    @classmethod
    def of_bytes(cls, data: bytes) -> LaunchPlan:
        """Return the plan that `to_bytes` wrote, with chunks of the right lengths."""
        wanted, steps, sizes, catches_up = json.loads(data)
        chunks = [PromptChunk(range(tokens), 0, (), range(scored), logprobs) for tokens, scored, logprobs in sizes]
        return cls(StepShape(*wanted), steps, chunks, catches_up)


class Launch(NamedTuple):
    """Steps that are in flight."""

    num_rows: int  # rows that they run over
    steps: range  # their entries in the rings since the beginning; those that did not run leave no tokens
    bucket: int  # rows that were computed
    started: float  # in seconds of `time.perf_counter`
    done: torch.cuda.Event | None  # that they have come to their end; None where the launch is the work
    queries: int = 1  # of a row in each step, which has as many entries
    scores: Sequence[StepLogprobs | None] = ()  # of each chunk of prompts by themselves, where they are wanted

    @property
    def num_steps(self) -> int:
        """Steps of the launch."""
        return len(self.steps) // self.queries


def with_adapters(shapes: Sequence[StepShape], model: Model) -> list[StepShape]:
    """Return shapes, and the same with adapters where a model has room for some."""
    adapted = [] if model.adapters is None else [shape._replace(has_adapters=True) for shape in shapes]
    return [*shapes, *adapted]


def computed_in(model: Model) -> str:
    """Return the dtype that a model computes in, the forms of its weights, and on a CPU whose operators do it."""
    forms = dict.fromkeys(str(choice["path"]) for choice in model.linear_choices(1).values())
    told = f"{str(model.dtype).removeprefix('torch.')} over {' and '.join(forms) or 'plain'} weights"
    if model.device.type != "cpu":
        return told
    return f"{told}, {instructions().name if native.library() is not None else 'by torch'}"


class Runner:
    """The model, its cache, a kind of step and its graphs.

    Attributes:
        graphs: those of steps and prompts, by shape; its buckets are those of steps of one query a row.
        buffers: every tensor that the step reads or writes.
        prompts: what passes of prompts read and write.
    """

    def __init__(
        self,
        setting: StepSetting,
        cache: PagedKVCache,
        capacity: Capacity,
        *,
        step: Callable[[StepSetting], Step] = DecodeStep,
        around: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        model, config = setting.model, setting.config
        self.setting, self.model, self.cache, self.capacity = setting, model, cache, capacity
        self.is_on_host = model.device.type == "cpu"
        self.steps_per_launch, self.steps_launched = config.steps_per_launch, 0
        self.step, self.prompts = step(setting), Prompts(setting)
        self.buffers = self.step.buffers
        self.graphs = GraphTable(
            self._run,
            self.buffers,
            ShapeLadder(with_adapters([*self.step.shapes(), *self.prompts.shapes], model), config.max_batch_size),
            constants=[*model.constants, *self.step.constants],
            backend=config.backend,
            warmup_steps=config.warmup_steps,
            prompts=self.prompts.buffers,
            capture_when=config.capture_when,
            choices=model.linear_choices,
            computed_in=computed_in(model),
            loop=self.step.loop,
            around=lambda shape: around(str(shape)),
        )

    def _run(self, shape: StepShape, batch: Batch, num_chunks: int | None = None) -> None:
        chunks = self.prompts.chunks(shape, num_chunks) if shape.prompt_tokens else None
        if shape.rows:
            self.step.run(shape, batch if shape.has_adapters else batch.without("adapters"), chunks)
        elif chunks is not None:
            self.prompts.run(chunks)

    def here(self) -> AbstractContextManager[object]:
        """Work where the model is, whichever device a caller has made the current one."""
        return _HERE if self.is_on_host else on_device(self.model.device)

    def stage(self, rows: Sequence[RowInputs] = (), chunks: Sequence[PromptChunk] = ()) -> None:
        """Stage rows, for when the membership changed, and chunks of the next launch."""
        with self.here():
            if rows:
                self.step.stage(rows)
            if chunks:
                self.prompts.stage(chunks)

    def launch(self, plan: LaunchPlan, meanwhile: Callable[[], None] | None = None) -> Launch:
        """Start what is staged: one launch; or two, of the halves of one step, with what the host does meanwhile."""
        first, started, wanted, done = self.steps_launched, time.perf_counter(), plan.wanted, None
        with self.here():
            if not wanted.rows:
                return Launch(0, range(first, first), 0, started, None, scores=self._pass(plan))
            is_one = self.steps_per_launch == 1 or plan.chunks or meanwhile is not None
            try:
                shape = self.graphs.run(wanted, steps=None if is_one else plan.steps, meanwhile=meanwhile)
                if shape is None:  # it takes more along than any graph holds
                    shape, batch = wanted, self.buffers.narrow(wanted.rows)
                    self.graphs.run_beyond(wanted, lambda: self._run(wanted, batch, len(plan.chunks)))
            except BaseException:
                self.step.rewind(first)  # the host would look for later tokens in the wrong places
                raise
            self.steps_launched += plan.steps * wanted.queries
            if not self.is_on_host:
                done = torch.cuda.Event()
                done.record()
        return Launch(wanted.rows, range(first, self.steps_launched), shape.rows, started, done, wanted.queries)

    def _pass(self, plan: LaunchPlan) -> list[StepLogprobs | None]:
        """Compute prompts by themselves: scored ones outside of the table, whose logits are looked at as they come."""
        scores: list[StepLogprobs | None] = [None] * len(plan.chunks)
        chunks = self.prompts.chunks(plan.wanted, len(plan.chunks))
        is_scored = any(chunk.scored for chunk in plan.chunks)
        if not plan.catches_up and (is_scored or self.graphs.run(plan.wanted) is None):
            passed = self.graphs.run_beyond(plan.wanted, lambda: self.prompts.run(chunks))
            scores = self.prompts.score(plan.chunks, passed)
        if self.step.drafting is not None:
            self.step.drafting.prefill(chunks)
        return scores

    def warm_up(self) -> None:
        """Compute prompts that are nobody's, so that no kernel is compiled while the first ones are served."""
        with self.here():
            for chunks in self.prompts.dummies():
                self.prompts.stage(chunks)
                self._pass(LaunchPlan.of_chunks(chunks))

    def read(self, launch: Launch, *, logprobs: int | None = None) -> list[StepTokens]:
        """Wait for a launch and return what its steps gave, step by step; see `Step.read`."""
        with self.here():
            if launch.done is not None:
                launch.done.synchronize()
            return self.step.read(launch.steps, launch.num_rows, logprobs=logprobs)

    def reports(self) -> dict[str, GraphReport]:
        """Return what was captured: "steps" by rows, "prompts" by tokens, "mixed" steps by rows and tokens."""
        found = {kind: self.graphs.report(kind) for kind in KINDS}
        largest, prompts = self.setting.prefill_tokens, found["prompts"].buckets
        if largest not in [bucket.bucket for bucket in prompts]:
            prompts.append(BucketReport(largest, "eager", choices=self.model.linear_choices(largest)))
        return {kind: report for kind, report in found.items() if kind != "mixed" or report.buckets}

    def capture_waiting(self) -> bool:
        """Capture one graph that waits for leisure, and return whether there was one."""
        return self.graphs.capture_waiting()

    def close(self) -> None:
        """Release the graphs, once what is in flight has come to its end."""
        with self.here():
            if not self.is_on_host:
                torch.cuda.synchronize(self.model.device)
            self.graphs.close()
