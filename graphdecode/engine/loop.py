"""The engine's loop: admit, prefill, decode, read, and again, until nothing is left to do."""

from __future__ import annotations

import sys
import time
from collections import deque

from graphdecode.buckets import StepShape
from graphdecode.cache import CacheFullError
from graphdecode.engine.draft_scheduler import DraftScheduler
from graphdecode.engine.grammar_masks import GrammarMasks, fill_sampling_masks, is_free, may_be_masked
from graphdecode.engine.metrics import EngineStats
from graphdecode.engine.outputs import OutputProcessor
from graphdecode.engine.page_reservation import PageReservation
from graphdecode.engine.prompt_scheduler import PromptScheduler
from graphdecode.engine.request import Event
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.engine.scheduler import Scheduler, Sequence
from graphdecode.engine.staged_batch import InFlight, StagedBatch
from graphdecode.engine.state_checkpoints import StateCheckpoints
from graphdecode.engine.steps import ENDED_BEFORE


class EngineLoop:
    """Schedules, launches and reads.

    On a GPU a launch is read while the next one (`lookahead`) runs over the same rows. Before rows change, all launches
    in flight are read.

    Attributes:
        outputs: what sequences have got, and the events that tell so.
        prompts: chunks of prompts.
        masks: token masks of grammars.
        drafts: speculation; None without.
        spares_waiting: whether an error of the running step has nothing to do with sequences that wait.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, target_itl_ms: float = 0.0) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.stats = EngineStats()
        self.outputs = OutputProcessor(scheduler, self.stats, runner.logits_hint)
        self.prompts = PromptScheduler(scheduler, runner, self.outputs, self.stats, target_itl_ms)
        self.masks = GrammarMasks(runner)
        drafting, interval = runner.step.drafting, scheduler.cache.checkpoint_tokens
        self.drafts = None if drafting is None else DraftScheduler(drafting, runner, scheduler, self.stats)
        self._pages = PageReservation(scheduler)
        # how many drafts will be right is not known, and so not where a launch ends
        self._checkpoints = None if interval is None or drafting is not None else StateCheckpoints(interval)
        self.lookahead = 1 if runner.model.device.type == "cuda" else 0
        self.spares_waiting = False
        self._in_flight: deque[InFlight] = deque()
        self._batch = StagedBatch()
        self._last_read = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._in_flight or self.outputs.events)

    def remove(self, sequence: Sequence) -> bool:
        """Read all launches in flight and remove a sequence; return False if it had ended."""
        if not sequence.finished:
            self._drain()
        if sequence.finished:
            return False
        sequence.finish_reason = "abort"
        self.scheduler.remove(sequence)
        return True

    def step(self) -> list[Event]:
        """Run at most one prefill and one launch, and read one earlier launch."""
        since, prefilled = time.perf_counter(), 0
        self.spares_waiting = False
        if self.scheduler.waiting or self.scheduler.prefilling:
            prefilled = self.prompts.choose()
            self.spares_waiting = True
            self.prompts.start()
        self.spares_waiting = True
        can_launch = bool(self.scheduler.decoding) and self._needs_launch()
        plan = self._plan_launch() if can_launch else None
        if plan is not None:
            launch = self.runner.launch(plan, None if plan.shape.part == "whole" else self.masks.fill)
            self.stats.launch_seconds.append(time.perf_counter() - launch.started)
            if plan.chunks:
                self.prompts.save_mixed()
            candidates = [] if self.drafts is None else self.drafts.candidates
            self._in_flight.append(InFlight(launch, self._batch, prefilled, since, candidates))
        elif prefilled:
            self.stats.step_tokens.append(prefilled)
        if self.prompts.chunks:
            self.prompts.compute()
        may_look_ahead = can_launch and not self.masks.rows
        if may_look_ahead and self._checkpoints is not None:
            may_look_ahead = 0 not in self._checkpoints.tokens_past(self._batch.sequences, self._in_flight)
        while len(self._in_flight) > (self.lookahead if may_look_ahead and self.scheduler.decoding else 0):
            self._read_oldest()
        return self.outputs.take_events()

    def reset(self, *, keeps_waiting: bool = False) -> list[Event]:
        """Drop all sequences, or all that have a row, in whatever state a failed step left them.

        Returns the pending events.
        """
        self._in_flight.clear()
        self._batch = StagedBatch()
        self.prompts.reset()
        self.scheduler.reset(keeps_waiting=keeps_waiting)
        return self.outputs.take_events()

    def _needs_launch(self) -> bool:
        """Whether any row needs more tokens than the launches in flight produce."""
        rows = self._batch.sequences
        if not self._in_flight or self.scheduler.decoding != rows:
            return True
        ahead = sum(each.launch.num_steps for each in self._in_flight)
        return any(len(sequence.token_ids) + ahead < sequence.max_length for sequence in rows)

    def _plan_launch(self) -> LaunchPlan | None:
        """Stage what has changed, and return what to launch; None if no row is left."""
        # the mask of a masked row depends on its last token, which the host has to read first: while there is such a
        # row, a launch is one step, and is read before the next one
        is_steady = self.scheduler.decoding == self._batch.sequences
        if is_steady and self.masks.may_change:
            is_steady = not self.masks.changes(self._mask_window)
        has_masked_rows = bool(self.masks.rows)
        if not is_steady:
            window = self._mask_window
            has_masked_rows = any(may_be_masked(each) and not is_free(each, window) for each in self.scheduler.decoding)
        num_steps = 1 if has_masked_rows else self.runner.steps_per_launch
        num_tokens = num_steps * self._most_queries
        room = num_tokens
        try:
            pages_changed = self._pages.reserve(num_tokens, self._in_flight, is_steady=is_steady)
        except CacheFullError:
            self.prompts.compute()  # before its sequences may be preempted
            self._drain()  # before pages that launches in flight write are freed
            room, pages_changed = self.scheduler.make_room(num_tokens), True
        steady_plan, is_same = self._batch.steady_plan, is_steady and not (pages_changed or self.prompts.chunks)
        if is_same and steady_plan is not None and steady_plan.steps <= self._steps_to_checkpoint():
            return steady_plan
        is_new = not is_steady or (pages_changed and self.scheduler.decoding != self._batch.sequences)  # preempted
        if is_new:
            self._drain()  # launches in flight belong to the old rows
            if not self._stage(list(self.scheduler.decoding)):
                return None
            num_steps = 1 if self.masks.rows else num_steps
        elif pages_changed:
            self._stage_pages()
        room = min(room, self._steps_to_checkpoint())
        queries = 1 if self.drafts is None else self._choose_queries(self.drafts, room)
        in_halves = bool(self.masks.rows) and not is_new and self.masks.fill_beside(queries)
        batch, rows = self._batch, len(self._batch.sequences)
        if self.prompts.chunks:
            if queries == 1 and not in_halves and self.prompts.can_mix(rows):
                return LaunchPlan.of_chunks(self.prompts.stage_mixed(), rows, has_adapters=batch.has_adapters)
            self.prompts.compute()
            if self.scheduler.decoding != batch.sequences:  # one has failed
                return self._plan_launch()
        shape = StepShape(rows, queries, part="logits" if in_halves else "whole", has_adapters=batch.has_adapters)
        plan = LaunchPlan(shape, min(num_steps, room // queries))
        is_repeatable = plan.steps == num_steps and self.drafts is None and not self.masks.rows
        batch.steady_plan = plan if is_repeatable else None
        return plan

    @property
    def _most_queries(self) -> int:
        return 1 if self.drafts is None else self.drafts.pace.widths[-1]

    @property
    def _mask_window(self) -> int:
        """Most tokens of a launch and of those in flight with it."""
        return self.runner.steps_per_launch * self._most_queries * (1 + self.lookahead)

    def _steps_to_checkpoint(self) -> int:
        """Return for how many steps no row gets past its next checkpoint."""
        if self._checkpoints is None:
            return sys.maxsize
        return self._checkpoints.steps_left(self._batch.sequences, self._in_flight)

    def _stage(self, sequences: list[Sequence]) -> bool:
        """Stage other rows; return False if none is left."""
        self._batch, self.masks.rows = StagedBatch(), {}
        if self.drafts is not None:
            self.drafts.candidates = []
        if not sequences:
            return False
        fill_sampling_masks(sequences)

        def stage(sequences: list[Sequence]) -> None:
            memory_of, window = self.scheduler.memory_of, self._mask_window
            self.runner.stage([each.row_inputs(memory_of(each), window) for each in sequences])

        try:
            stage(sequences)
        except Exception as error:
            if not self.outputs.fail_some(sequences, lambda row: stage([sequences[row]]), error):
                raise
            return self._stage(list(self.scheduler.decoding))
        logprobs = max((s.params.logprobs for s in sequences if s.params.logprobs is not None), default=None)
        self._batch = StagedBatch(sequences, any(each.adapter is not None for each in sequences), logprobs)
        self.masks.stage(sequences, self._mask_window)
        return True

    def _stage_pages(self) -> None:
        with self.runner.device_guard():
            pages_of = self.scheduler.cache.pages_of
            self.runner.step.stage_pages([pages_of(sequence.request_id) for sequence in self._batch.sequences])

    def _choose_queries(self, drafts: DraftScheduler, room: int) -> int:
        """Return how many tokens each row feeds per step of the next launch; at most `room`."""
        queries = drafts.queries(len(self._batch.sequences), room)
        if queries > 1 and not drafts.is_cheap:
            self._drain()  # the draft model needs their tokens
            drafts.catch_up(sequence for sequence in self._batch.sequences if not sequence.finished)
        return queries

    def _drain(self) -> None:
        while self._in_flight:
            self._read_oldest()

    def _read_oldest(self) -> None:
        launch, batch, prefilled, since, draft_candidates = self._in_flight.popleft()
        queries = launch.queries
        steps = self.runner.read(launch, logprobs=batch.logprobs)
        generated = 0
        for row, sequence in enumerate(batch.sequences):
            if sequence.finish_reason is None:
                try:
                    generated += self.outputs.accept(sequence, row, steps, is_last=not self._in_flight)
                except Exception as error:
                    self.outputs.fail_some([sequence], None, error)
                if queries > 1:  # the draft model has not seen the last draft
                    sequence.drafted_length = sequence.cached_length - 1
        self.stats.generated_tokens += generated
        self.stats.step_tokens.append(prefilled + generated)
        # count steps that ran for a live row: a loop on the device may end early, a launch may follow a stop
        first_tokens = steps[::queries] if queries > 1 else steps
        ran = sum([step.tokens.count(ENDED_BEFORE) < launch.num_rows for step in first_tokens])
        self.stats.batch_sizes[launch.num_rows] += ran
        self.stats.bucket_steps[launch.bucket] += ran
        now, last_read = time.perf_counter(), self._last_read
        seconds = (now - max(last_read, launch.started)) / max(ran, 1)
        self.stats.step_seconds.append(seconds)
        if not prefilled:
            self.stats.decode_seconds.append(seconds)
        if self.prompts.budget.target_seconds:
            self.prompts.budget.record(prefilled, (now - max(last_read, since)) / max(ran, 1))
        self._last_read = now
        if self.drafts is not None:
            candidates = self.drafts.record(launch, draft_candidates, first_tokens[:ran], seconds)
            if self._batch is batch:
                self.drafts.candidates = candidates
