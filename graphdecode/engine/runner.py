"""Runs the model: steps and short prompts by replaying their graphs; the slots are the step's own affair."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import torch

from graphdecode.buffers import StepBuffers, on_device
from graphdecode.cache import PagedKVCache
from graphdecode.config import BucketConfig
from graphdecode.engine.capacity import Capacity
from graphdecode.engine.mixed_steps import MixedSteps
from graphdecode.engine.prefill import Prefill, PromptChunk
from graphdecode.engine.steps import (
    DecodeStep,
    Drafting,
    HeldStep,
    RowInputs,
    SpeculativeStep,
    Step,
    StepLogprobs,
    StepSetting,
    StepTokens,
)
from graphdecode.graphs import GraphManager, GraphReport
from graphdecode.models import Model

P = ParamSpec("P")
T = TypeVar("T")
_HOST = torch.device("cpu")  # compared with a device, whose type torch would write as a text at each step


class Launch(NamedTuple):
    """Steps that are under way.

    Attributes:
        num_rows: rows that they run over.
        steps: the numbers of their entries in the rings since the beginning; those that did not run leave no tokens.
        bucket: rows that were computed.
        started: in seconds of `time.perf_counter`.
        done: what tells the host that they have come to their end; None where the launch is the work.
        queries: of a row in each step, which has as many entries.
    """

    num_rows: int
    steps: range
    bucket: int
    started: float
    done: torch.cuda.Event | None
    queries: int = 1

    @property
    def num_steps(self) -> int:
        """Steps of the launch."""
        return len(self.steps) // self.queries


def _on_its_device(entry: Callable[Concatenate[Runner, P], T]) -> Callable[Concatenate[Runner, P], T]:
    """Let an entry of the Runner work where its model is, whichever device its caller has made the current one."""

    @wraps(entry)
    def guarded(self: Runner, *arguments: P.args, **options: P.kwargs) -> T:
        device = self.model.device
        if device == _HOST:  # asked here, for a context that does nothing costs each step some microseconds
            return entry(self, *arguments, **options)
        with on_device(device):
            return entry(self, *arguments, **options)

    return guarded


class Runner:
    """The model, its cache, a kind of step and its graphs.

    Args:
        model: the decoder.
        cache: its key-value cache.
        config: buckets, capture and loop.
        capacity: what the configuration means for this model.
        prefill_budget: tokens of a prefill at most.
        batch_invariant: give a token the same bits in any batch, in a prompt as in a step.
        step: makes the kind of step that is captured.
        mixes: let steps take prompts along where this kind of step and the model can.
        around: is entered around each capture, with what is captured.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        config: BucketConfig,
        capacity: Capacity,
        *,
        prefill_budget: int,
        batch_invariant: bool = False,
        step: Callable[[StepSetting], Step] = DecodeStep,
        mixes: bool = True,
        around: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.model = model
        self.cache = cache
        self.capacity = capacity
        self.prefill_budget = prefill_budget
        self.steps_per_launch = config.steps_per_launch
        self.steps_launched = 0
        pages = (cache.page_size, cache.max_pages_per_row)
        setting = StepSetting(model, cache.layers, *pages, config, batch_invariant, around)
        self.sampling_capacity = setting.sampling_capacity
        self.step = step(setting)
        self.drafting: Drafting | None = getattr(self.step, "drafting", None)
        drafting = self.drafting
        self._prefill = Prefill(setting, prefill_budget, follow=None if drafting is None else drafting.prefill)
        self._mixed = MixedSteps.of(setting, self.step, self._prefill) if mixes else None
        self.graphs = GraphManager(
            self.step,
            self.buffers,
            config.ladder,
            constants=[*model.constants, *(() if drafting is None else drafting.constants)],
            backend=config.backend,
            warmup_steps=config.warmup_steps,
            capture_when=config.capture_when,
            choices=model.linear_choices,
            loop=self.step.loop,
            halves=self._held_step.halves if self.holds_forms else None,
            wider=None if drafting is None else drafting.wider,
            around=lambda bucket, queries: around(f"bucket {bucket}" + f" x {queries}" * (queries > 1)),
        )

    @property
    def holds_forms(self) -> bool:
        """Whether this kind of step can hold rows to forms."""
        return isinstance(self.step, HeldStep)

    @property
    def guided_rows(self) -> Collection[int]:
        """The staged rows that hold to their forms by themselves, without masks of the host's."""
        return self._held_step.guided_rows if self.holds_forms else ()

    @property
    def prompt_buffers(self) -> StepBuffers:
        """Every tensor that a pass of prompts reads or writes."""
        return self._prefill.buffers

    @property
    def _held_step(self) -> HeldStep:
        return cast(HeldStep, self.step)

    @property
    def buffers(self) -> StepBuffers:
        """Every tensor that the step reads or writes."""
        return self.step.buffers

    @_on_its_device
    def prefill(self, chunks: Sequence[PromptChunk]) -> list[StepLogprobs | None]:
        """Compute the keys and values of some sequences' next tokens, all chunks in one pass.

        Returns:
            For each chunk the log-probabilities of the tokens that it has scored, or None.
        """
        self.stage_chunks(chunks)
        return self.compute(chunks)

    @_on_its_device
    def stage_chunks(self, chunks: Sequence[PromptChunk]) -> None:
        """Tell the device of chunks that go along with the next launch."""
        self._prefill.stage(chunks)

    @_on_its_device
    def compute(self, chunks: Sequence[PromptChunk]) -> list[StepLogprobs | None]:
        """Do what `prefill` does once the chunks are staged."""
        return self._prefill.compute(chunks)

    @_on_its_device
    def catch_up(self, chunks: Sequence[PromptChunk]) -> None:
        """Let the source of drafts see tokens that plain steps fed, all chunks in one pass."""
        self.stage_chunks(chunks)
        self.follow_staged(chunks)

    @_on_its_device
    def follow_staged(self, chunks: Sequence[PromptChunk]) -> None:
        """Do what `catch_up` does once the chunks are staged."""
        self._prefill.follow(chunks)

    @_on_its_device
    def warm_up(self) -> None:
        """Compute a prompt that is nobody's, so that no kernel is compiled while the first ones are served."""
        self._prefill.warm_up()

    @_on_its_device
    def capture_prompts(self, progress: bool = True) -> None:
        """Capture the passes of short prompts, as `graphs` are captured; without it they run operator by operator.

        Args:
            progress: show a bar on standard error.
        """
        if self._mixed is not None:
            self._mixed.capture(progress)
        self._prefill.capture(progress, are_rare=self._mixed is not None and bool(self._mixed.graphs))

    def reports(self) -> dict[str, GraphReport]:
        """Return what was captured: "steps" by rows, "prompts" by tokens, "mixed" steps by rows and tokens."""
        found = {"steps": self.graphs.report(), "prompts": self._prefill.report()}
        if self._mixed is not None and self._mixed.graphs:
            found["mixed"] = self._mixed.report()
        return found

    def takes_along(self, num_rows: int, num_tokens: int) -> bool:
        """Whether so many tokens of prompts are to go along with a step of so many rows; see `launch`."""
        return self._mixed is not None and self._mixed.takes(num_rows, num_tokens)

    @_on_its_device
    def stage(self, rows: Sequence[RowInputs]) -> None:
        """Tell the device everything about its rows; for when the membership changed."""
        self.step.stage(rows)

    @_on_its_device
    def begin(self, num_rows: int) -> None:
        """Do what `stage` has the device do with rows, once they are staged."""
        if isinstance(self.step, SpeculativeStep):
            self.step.begin(num_rows)

    @_on_its_device
    def stage_pages(self, pages: Sequence[Sequence[int]]) -> None:
        """Tell the device the rows' pages; for when the rows are the same but own more pages."""
        self.step.stage_pages(pages)

    @_on_its_device
    def stage_masks(self, masks: Mapping[int, np.ndarray]) -> None:
        """Tell the device which tokens some of the staged rows may sample next; for when only that has changed.

        Args:
            masks: by row.
        """
        self._held_step.stage_masks(masks)

    @_on_its_device
    def launch(
        self,
        num_rows: int,
        num_steps: int = 1,
        queries: int = 1,
        *,
        meanwhile: Callable[[], None] | None = None,
        along: Sequence[PromptChunk] = (),
    ) -> Launch:
        """Start steps of the staged rows: one launch; or two, of the halves of one step.

        Args:
            num_rows: rows that were staged.
            num_steps: at most `steps_per_launch`; fewer run if all rows finish before.
            queries: of a row; one of the step's.
            meanwhile: what the host does while one step of one query is computed, up to its logits; it stages masks.
            along: staged chunks of prompts whose keys and values one step of one query computes in the same pass.
        """
        first, started = self.steps_launched, time.perf_counter()
        try:
            if along and self._mixed is not None:
                bucket = self._mixed.run(num_rows, along)
            elif meanwhile is not None:
                bucket = self.graphs.replay_halves(num_rows, meanwhile)
            elif self.steps_per_launch == 1:
                bucket = self.graphs.replay(num_rows, queries)
            else:
                bucket = self.graphs.launch(num_rows, num_steps, queries)
        except BaseException:
            self.step.rewind(first)  # the host would look for later tokens in the wrong places
            raise
        self.steps_launched += num_steps * queries
        done = None
        if self.model.device != _HOST:
            done = torch.cuda.Event()
            done.record()
        return Launch(num_rows, range(first, self.steps_launched), bucket, started, done, queries)

    @_on_its_device
    def read(self, launch: Launch, *, logprobs: int | None = None) -> list[StepTokens]:
        """Wait for a launch and return what its steps gave, step by step.

        Args:
            launch: what `launch` returned.
            logprobs: most likely tokens that any of its rows asked for; None: no row wants log-probabilities.
        """
        if launch.done is not None:
            launch.done.synchronize()
        return self.step.read(launch.steps, launch.num_rows, logprobs=logprobs)

    @_on_its_device
    def close(self) -> None:
        """Release the graphs, once what is under way has come to its end."""
        if self.model.device != _HOST:
            torch.cuda.synchronize(self.model.device)
        self.graphs.close()
        if self._mixed is not None:
            self._mixed.close()
        self._prefill.close()
