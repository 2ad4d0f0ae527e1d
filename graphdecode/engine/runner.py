"""Runs the model: stages rows and prompt chunks, launches graphs, reads results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from graphdecode.buckets import KINDS, ShapeLadder, StepShape
from graphdecode.buffers import StepSlots, on_device
from graphdecode.cache import PagedKVCache
from graphdecode.engine.capacity import Capacity
from graphdecode.engine.prompts import PromptChunk, Prompts
from graphdecode.engine.steps import (
    DecodeStep,
    RowInputs,
    SequenceMemory,
    Step,
    StepLogprobs,
    StepSetting,
    StepTokens,
)
from graphdecode.engine.steps.step import STARTUP_TOKENS
from graphdecode.errors import NotSupportedError
from graphdecode.graphs import BucketReport, GraphReport, GraphTable
from graphdecode.kernels.linear.add_adapters import NO_ADAPTER
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.instructions import instructions
from graphdecode.memory import (
    ReservedMemory,
    check_can_release,
    release_memory,
    start_joining_pages,
    wait_for_joined_pages,
)
from graphdecode.models import Model
from graphdecode.models.adapters import Adapter
from graphdecode.models.updates import NamedTensors, copy_weights

SLEEP_TAGS = ("weights", "kv_cache")  # vLLM's tags
_NO_GUARD = nullcontext()
# returns a model with the new values, and the reload to use after they are copied
Reload: TypeAlias = Callable[["str | Path | NamedTensors"], "tuple[Model, Reload]"]


class LaunchPlan(NamedTuple):
    """A launch of the staged rows and chunks, the same on all ranks."""

    shape: StepShape  # shape before padding; in halves if the host writes masks in between
    steps: int = 1  # at most `steps_per_launch`; fewer run if all rows finish earlier. 1 with chunks, or in halves
    chunks: Sequence[PromptChunk] = ()
    catches_up: bool = False  # the chunks are only for the draft model: tokens that plain steps fed

    @classmethod
    def of_chunks(
        cls, chunks: Sequence[PromptChunk], rows: int = 0, *, catches_up: bool = False, has_adapters: bool = False
    ) -> LaunchPlan:
        """Return the plan of a pass of chunks, or with `rows` of a mixed step; the rows may have adapters."""
        has_adapters = has_adapters or any(chunk.memory.adapter != NO_ADAPTER for chunk in chunks)
        tokens, pools = sum(len(chunk.token_ids) for chunk in chunks), any(chunk.pools for chunk in chunks)
        shape = StepShape(rows, 1, tokens, has_adapters=has_adapters, pools=pools)
        return cls(shape, 1, chunks, catches_up)

    def to_bytes(self) -> bytes:
        """Serialize the plan for another rank; only lengths of chunks, since their tokens are staged."""
        sizes = [(len(chunk.token_ids), len(chunk.scored), chunk.num_logprobs) for chunk in self.chunks]
        return json.dumps(self._replace(chunks=sizes)).encode()  # type: ignore[arg-type]

    @classmethod
    def of_bytes(cls, data: bytes) -> LaunchPlan:
        """Return the plan that `to_bytes` wrote; its chunks have placeholder tokens."""
        shape, steps, sizes, catches_up = json.loads(data)
        none = SequenceMemory()
        chunks = [PromptChunk(range(tokens), 0, none, range(scored), logprobs) for tokens, scored, logprobs in sizes]
        return cls(StepShape(*shape), steps, chunks, catches_up)


class Launch(NamedTuple):
    """Steps in flight."""

    num_rows: int  # live rows
    steps: range  # their ring entries, counted from the first step; steps that did not run leave no tokens
    bucket: int  # rows that were computed
    started: float  # in seconds of `time.perf_counter`
    done: torch.cuda.Event | None  # recorded after the last step; None on a CPU
    queries: int = 1  # per row and step; each step has as many ring entries
    scores: Sequence[StepLogprobs | None] = ()  # prompt log-probabilities of each chunk that wants them

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.steps) // self.queries


def with_adapters(shapes: Sequence[StepShape], model: Model) -> list[StepShape]:
    """Return shapes, and the same with adapters if the model has slots for them."""
    adapted = [] if model.adapters is None else [shape._replace(has_adapters=True) for shape in shapes]
    return [*shapes, *adapted]


def computed_in(model: Model) -> str:
    """Return a model's dtype, its weight forms, and on a CPU the instruction set, as text."""
    forms = dict.fromkeys(str(choice["path"]) for choice in model.linear_choices(1).values())
    text = f"{str(model.dtype).removeprefix('torch.')} over {' and '.join(forms) or 'plain'} weights"
    if model.device.type != "cpu":
        return text
    return f"{text}, {instructions().name if native.library() is not None else 'by torch'}"


class Runner:
    """The model, its cache, a kind of step and its graphs.

    Attributes:
        graphs: graphs of steps and prompts, by shape; its buckets are those of steps with one query per row.
        buffers: the step's slots.
        prompts: prefill passes, with their slots.
        reload: loads new values of the weights, in the same layout; None: the model was not loaded by name.
        damaged_tensor: returns the name of a tensor of the model's files that has NaN; None: there is none.
        reserved: the memory of weights and cache, by tag, if it can be unmapped; else empty.
        may_repeat: whether passes can go on after one that raised; with ranks, others may be in the middle of it.
    """

    may_repeat = True

    reload: Reload | None = None
    damaged_tensor: Callable[[], str | None] = staticmethod(lambda: None)

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
        self.is_cpu = model.device.type == "cpu"
        self.steps_per_launch, self.steps_launched = config.steps_per_launch, 0
        self.step, self.prompts = step(setting), Prompts(setting)
        self.buffers = self.step.buffers
        self.graphs = GraphTable(
            self._run,
            self.buffers,
            ShapeLadder(
                with_adapters([*self.step.shapes(), *self.prompts.shapes], model),
                config.max_batch_size,
                startup_tokens=STARTUP_TOKENS,
            ),
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
        self.reserved: dict[str, ReservedMemory] = {}
        self.label_rows: np.ndarray | None = None  # float32 [labels, hidden], of the output layer; None: no labels
        self._label_ids: tuple[int, ...] = ()
        self._logits_hint: str | None = None

    def _run(self, shape: StepShape, batch: StepSlots, num_chunks: int | None = None) -> None:
        chunks = self.prompts.chunks(shape, num_chunks) if shape.prompt_tokens else None
        if shape.rows:
            self.step.run(shape, batch if shape.has_adapters else batch.without("adapters"), chunks)
        elif chunks is not None:
            passed = self.prompts.run(chunks, with_logits=shape.pools)
            if shape.pools:
                self.prompts.pool(chunks, passed)

    def device_guard(self) -> AbstractContextManager[object]:
        """Make the model's device current."""
        return _NO_GUARD if self.is_cpu else on_device(self.model.device)

    def stage(self, rows: Sequence[RowInputs] = (), chunks: Sequence[PromptChunk] = ()) -> None:
        """Stage rows, if the batch has changed, and chunks of the next launch."""
        with self.device_guard():
            if rows:
                self.step.stage(rows)
            if chunks:
                self.prompts.stage(chunks)

    def launch(self, plan: LaunchPlan, meanwhile: Callable[[], None] | None = None) -> Launch:
        """Launch what is staged; with `meanwhile`, run that host work between the two halves of one step."""
        first, started, requested, done = self.steps_launched, time.perf_counter(), plan.shape, None
        scores: Sequence[StepLogprobs | None] = ()
        with self.device_guard():
            is_one = not requested.rows or self.steps_per_launch == 1 or plan.chunks or meanwhile is not None
            is_scored = plan.chunks and any(chunk.scored for chunk in plan.chunks)  # the host reads their logits
            try:
                shape: StepShape | None = requested if plan.catches_up else None
                if not (plan.catches_up or is_scored):
                    shape = self.graphs.run(requested, steps=None if is_one else plan.steps, meanwhile=meanwhile)
                if shape is None:
                    shape, scores = requested, self._run_without_graph(plan)
            except BaseException:
                if requested.rows:
                    self.step.rewind(first)  # keeps ring positions on the device equal to the host's
                raise
            if not requested.rows:
                if self.step.drafting is not None:
                    self.step.drafting.prefill(self.prompts.chunks(requested, len(plan.chunks)))
                return Launch(0, range(first, first), 0, started, None, scores=scores or [None] * len(plan.chunks))
            self.steps_launched += plan.steps * requested.queries
            if not self.is_cpu:
                done = torch.cuda.Event()
                done.record()
        return Launch(requested.rows, range(first, self.steps_launched), shape.rows, started, done, requested.queries)

    def _run_without_graph(self, plan: LaunchPlan) -> list[StepLogprobs | None]:
        """Run more prompt tokens than any graph holds, or scored prompts; return the log-probabilities of prompts."""
        requested, num_chunks = plan.shape, len(plan.chunks)
        if requested.rows:
            batch = self.buffers.narrow(requested.rows)
            self.graphs.run_without_graph(requested, lambda: self._run(requested, batch, num_chunks))
            return []
        chunks, is_scored = self.prompts.chunks(requested, num_chunks), any(chunk.scored for chunk in plan.chunks)

        def run() -> Any:
            passed = self.prompts.run(chunks, with_logits=is_scored or requested.pools)
            if requested.pools:
                self.prompts.pool(chunks, passed)
            return passed

        passed = self.graphs.run_without_graph(requested, run)
        return self.prompts.score(plan.chunks, passed)

    def warm_up(self) -> None:
        """Run dummy prompts, so that no kernel is compiled while requests are served."""
        for chunks in self.prompts.dummies():
            with self.device_guard():
                self.prompts.stage(chunks)
            Runner.launch(self, LaunchPlan.of_chunks(chunks))  # each rank does so by itself

    def read(self, launch: Launch, *, logprobs: int | None = None) -> list[StepTokens]:
        """Wait for a launch and return the outputs of its steps; see `Step.read`."""
        with self.device_guard():
            if launch.done is not None:
                launch.done.synchronize()
            return self.step.read(launch.steps, launch.num_rows, logprobs=logprobs)

    def reports(self) -> dict[str, GraphReport]:
        """Return the graph reports of "steps", "prompts" and, if there are any, "mixed" steps."""
        reports = {kind: self.graphs.report(kind) for kind in KINDS}
        largest, prompts = self.setting.prefill_tokens, reports["prompts"].buckets
        if largest not in [bucket.bucket for bucket in prompts]:
            prompts.append(BucketReport(largest, "eager", choices=self.model.linear_choices(largest)))
        return {kind: report for kind, report in reports.items() if kind in ("steps", "prompts") or report.buckets}

    def write_adapter(self, slot: int, adapter: Adapter) -> None:
        """Write an adapter into a slot of the model, in place."""
        assert self.model.adapters is not None
        with self.device_guard():
            self.model.adapters.write(slot, adapter)

    def keep_labels(self, token_ids: tuple[int, ...]) -> None:
        """Keep the rows of the output layer for tokens whose logits score a pair; all ranks call it."""
        with self.device_guard():
            self.label_rows, self._label_ids = self.model.output_rows(token_ids).cpu().numpy(), token_ids

    def logits_hint(self) -> str:
        """Return why logits are not finite, as far as that is known."""
        if self.model.dtype == torch.float16:
            return "dtype='float32' computes what goes beyond float16's 65504"
        if self._logits_hint is None:  # files are read once
            name = self.damaged_tensor()
            self._logits_hint = "" if name is None else f"{name} has NaN: the model's file is damaged"
        return self._logits_hint

    def update_weights(self, weights: str | Path | NamedTensors) -> None:
        """Update the weights; see `Engine.update_weights`."""
        self.take_weights(*self.load_weights(weights))

    def load_weights(self, weights: str | Path | NamedTensors) -> tuple[Model, Reload]:
        """Return the arguments of `take_weights`; nothing is changed yet."""
        if self.reload is None:
            raise NotSupportedError("weights are updated of a model that was loaded by its name alone")
        with self.device_guard():
            return self.reload(weights)

    def take_weights(self, loaded: Model, reload: Reload) -> None:
        """Copy the values of a model of the same layout into the weights."""
        with self.device_guard():
            self._synchronize()
            copy_weights(self.model, loaded)
            self._synchronize()
        if self._label_ids:
            self.keep_labels(self._label_ids)
        self.reload = reload
        if self.is_cpu:
            start_joining_pages(self.model.constants)

    def prepare_sleep(self, *, weights: bool) -> None:
        """Do what can be refused, before `release_memory`: weights in reserved memory are copied unless dropped."""
        if self.reload is None and weights:
            raise NotSupportedError("weights are dropped of a model that can be loaded again alone")
        if not self.reserved:
            check_can_release(self.model.device)
        elif not weights:
            with self.device_guard():
                self._synchronize()
                self.reserved["weights"].save()

    def cancel_sleep(self) -> None:
        """Undo `prepare_sleep`, if another rank refused."""
        if self.reserved:
            self.reserved["weights"].cancel()

    def release_memory(self, *, weights: bool) -> int:
        """Release memory after `prepare_sleep`, and return the bytes: all reserved memory, or see `memory.release`.

        `weights`: they are dropped; else they come back with their memory, or without reserved memory stay.
        """
        if self.reserved:
            with self.device_guard():
                self._synchronize()
                if weights:
                    self.reserved["weights"].forget()
                return sum(each.unmap() for each in self.reserved.values())
        wait_for_joined_pages()
        states = [tensor for layer in self.cache.layers for tensor in layer]
        return release_memory([*states, *self.model.constants] if weights else states)

    def restore_memory(self, tag: str) -> None:
        """Map reserved memory again, weights with what was saved; an EngineStateError if there is too little."""
        if self.reserved:
            with self.device_guard():
                self._synchronize()
                self.reserved[tag].map()

    def _synchronize(self) -> None:
        if not self.is_cpu:
            torch.cuda.synchronize(self.model.device)

    def capture_waiting(self) -> bool:
        """Capture one graph that waits for idle time; return whether there was one."""
        return self.graphs.capture_waiting()

    def close(self) -> None:
        """Wait for the device and release the graphs."""
        with self.device_guard():
            self._synchronize()
            self.graphs.close()
