"""The engine's loop: admit, prefill, decode, read, and again, until nothing is left to do."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from graphdecode.buckets import StepShape
from graphdecode.cache import CacheFullError
from graphdecode.distributed import RankError
from graphdecode.engine.chunk_budget import ChunkBudget
from graphdecode.engine.draft_pace import DraftPace
from graphdecode.engine.metrics import EngineStats
from graphdecode.engine.prompts import PromptChunk
from graphdecode.engine.request import Event, TokenLogprobs
from graphdecode.engine.runner import Launch, LaunchPlan, Runner
from graphdecode.engine.scheduler import FailedSequence, Scheduler, Sequence
from graphdecode.engine.steps import ENDED_BEFORE, StepLogprobs, StepTokens
from graphdecode.kernels.sampling.sampling_slots import WITHOUT_NUMBERS

log = logging.getLogger(__name__)
_Constrained = dict[type[Any], list[tuple[int, Sequence]]]  # class of constraint -> rows with their sequences


class _InFlight(NamedTuple):
    """A launch and the sequences of its rows."""

    launch: Launch
    sequences: list[Sequence]
    logprobs: int | None  # largest number of top tokens that a row asked for
    prefilled: int  # prompt tokens that were computed right before it
    since: float  # when that began
    found: list[tuple[int, int]]  # before its first step, row by row: drafts, match length


class EngineLoop:
    """Schedules, launches and reads.

    On a GPU a launch is read while the next one (`lookahead`) runs over the same rows. Before rows change, all launches
    in flight are read.

    Attributes:
        mask_thread_seconds: on a CPU, masks that take less are filled before the step instead of in another thread.
        ended: ids of requests that have ended; the engine empties it.
        spares_waiting: whether an error of the running step has nothing to do with sequences that wait.
        pace: chooses how many drafts a launch verifies; None without speculation.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, target_itl_ms: float = 0.0) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.stats = EngineStats()
        self.lookahead = 1 if runner.model.device.type == "cuda" else 0
        self._in_flight: deque[_InFlight] = deque()
        self._staged: list[Sequence] = []
        self._has_adapters = False  # whether any staged row has an adapter
        self._repeated: LaunchPlan | None = None  # the plan of a steady step
        self._logprobs: int | None = None  # largest number of top tokens that a staged row asked for
        self._masked_rows: _Constrained = {}  # staged rows whose masks the host fills
        self._mask_seconds = 0.0  # time of the last fill
        self.mask_thread_seconds = 1e-3
        self._page_size, self._pages_of = scheduler.cache.page_size, scheduler.cache.pages_of
        self._border = scheduler.cache.checkpoint_tokens
        self._steps_with_pages = 0  # steps for which the staged rows have pages, beyond those launched
        self._last_read = 0.0
        self._budget = ChunkBudget(runner.setting.prefill_tokens, target_itl_ms / 1000)
        self._to_prefill: list[tuple[Sequence, PromptChunk]] = []  # chunks of this step
        self._mixed: list[tuple[Sequence, PromptChunk]] = []  # chunks that the next launch takes
        self._prefilled = 0  # prompt tokens since the last launch
        self._since = 0.0  # when their computation began
        self._events: list[Event] = []
        self.ended: list[int] = []
        self.spares_waiting = False
        drafting = runner.step.drafting
        self.pace = None
        if drafting is not None:
            widths = runner.graphs.ladder.queries
            self.pace = DraftPace(widths, is_fixed=drafting.is_fixed, is_cheap=drafting.is_cheap)
        self._found: list[tuple[int, int]] = []  # before the next step, row by row: drafts, match length

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._in_flight or self._events)

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
        self._since, self._prefilled = time.perf_counter(), 0
        self.spares_waiting = False
        if self.scheduler.waiting or self.scheduler.prefilling:
            self._schedule_prompts()
        self.spares_waiting = True
        goes_on = bool(self.scheduler.decoding) and self._needs_launch()
        plan = self._plan_launch() if goes_on else None
        if plan is not None:
            launch = self.runner.launch(plan, None if plan.wanted.part == "whole" else self._fill_masks)
            self.stats.launch_seconds.append(time.perf_counter() - launch.started)
            self.scheduler.save_states(self._mixed)
            self._mixed = []
            self._in_flight.append(
                _InFlight(launch, self._staged, self._logprobs, self._prefilled, self._since, self._found)
            )
        elif self._prefilled:
            self.stats.step_tokens.append(self._prefilled)
        if self._to_prefill:
            self._prefill()
        may_look_ahead = goes_on and not self._masked_rows and 0 not in self._past_borders()
        while len(self._in_flight) > (self.lookahead if may_look_ahead and self.scheduler.decoding else 0):
            self._read_oldest()
        events, self._events = self._events, []
        return events

    def reset(self, *, keeps_waiting: bool = False) -> list[Event]:
        """Drop all sequences, or all that have a row, in whatever state a failed step left them.

        Returns the pending events.
        """
        self._in_flight.clear()
        self._staged, self._to_prefill, self._mixed, self._repeated = [], [], [], None
        self.scheduler.reset(keeps_waiting=keeps_waiting)
        events, self._events = self._events, []
        return events

    def _schedule_prompts(self) -> None:
        """Choose the prompt chunks of this step; prefill them now if no mixed step can take them."""
        chunks = self._next_chunks(self._budget.tokens(others_wait=bool(self.scheduler.decoding)))
        self.spares_waiting = True
        self._to_prefill = chunks
        self._prefilled = sum(len(chunk.token_ids) for _, chunk in chunks)
        self.stats.prefilled_tokens += self._prefilled
        saves_last = self.scheduler.saves_last
        is_alone = any(chunk.scored or each.is_full or saves_last(each, chunk) for each, chunk in chunks)
        if is_alone or not self.runner.graphs.can_mix(1, self._prefilled):
            self._prefill()
            chunks = [(sequence, chunk) for sequence, chunk in chunks if not sequence.finished]
        for sequence in self.scheduler.prefilled(chunks):  # no token was to be generated
            sequence.finish_reason = "length"
            unknown = any(math.isnan(entry.sampled) for entry in sequence.prompt_logprobs)
            self._emit(sequence, [], None, sequence.fail(WITHOUT_NUMBERS) if unknown else None)

    def _next_chunks(self, budget: int) -> list[tuple[Sequence, PromptChunk]]:
        while True:
            try:
                return self.scheduler.next_chunks(budget)
            except FailedSequence as error:
                self._fail(error.sequence, error.reason)

    def _prefill(self) -> None:
        """Run the chunks of this step in one pass; if it raises, end the sequences whose chunks do so alone."""
        to_prefill, self._to_prefill = self._to_prefill, []
        if not to_prefill:
            return
        try:
            self._run_chunks(to_prefill)
        except Exception as error:
            if not self.runner.may_repeat:
                raise
            # a second pass would advance recurrent states twice
            has_states = any(kept is not None and kept.shapes for kept in self.runner.model.config.recurrent)
            alone = None if has_states else lambda index: self._run_chunks([to_prefill[index]])
            self._fail_some([sequence for sequence, _ in to_prefill], alone, error)

    def _run_chunks(self, to_prefill: list[tuple[Sequence, PromptChunk]]) -> None:
        began, chunks = time.perf_counter(), [chunk for _, chunk in to_prefill]
        self.runner.stage(chunks=chunks)
        found = self.runner.launch(LaunchPlan.of_chunks(chunks)).scores
        self.scheduler.save_states(to_prefill)
        for (sequence, chunk), scores in zip(to_prefill, found, strict=True):
            if scores is not None:
                entries = [_token_logprobs(scores, index, chunk.num_logprobs) for index in range(len(chunk.token_ids))]
                sequence.prompt_logprobs[chunk.start :] = entries[: sequence.prompt_length - 1 - chunk.start]
        self.stats.prefill_seconds += time.perf_counter() - began

    def _fail_some(self, sequences: list[Sequence], alone: Callable[[int], object] | None, error: Exception) -> bool:
        """End the sequences for which `alone` raises, given their index, and return whether there are any.

        None, or only one sequence: `error` is that of all. It is raised if it is that of another rank.
        """
        if isinstance(error, RankError):  # other ranks have not run the same
            raise error
        failed: list[tuple[Sequence, Exception]] = []
        if alone is None or len(sequences) == 1:
            failed = [(sequence, error) for sequence in sequences]
        else:
            for index, sequence in enumerate(sequences):
                try:
                    alone(index)
                except Exception as own:
                    failed.append((sequence, own))
        for sequence, why in failed:
            self._fail(sequence, why)
        return bool(failed)

    def _fail(self, sequence: Sequence, why: Exception) -> None:
        """End one sequence with an error."""
        log.warning("request %d failed", sequence.request_id, exc_info=why)
        sequence.prompt_reported = True  # what is there may be a part
        self._emit(sequence, [], None, sequence.fail(why))

    def _needs_launch(self) -> bool:
        """Whether any row needs more tokens than the launches in flight produce."""
        if not self._in_flight or self.scheduler.decoding != self._staged:
            return True
        ahead = sum(batch.launch.num_steps for batch in self._in_flight)
        return any(len(sequence.token_ids) + ahead < sequence.max_length for sequence in self._staged)

    def _plan_launch(self) -> LaunchPlan | None:
        """Stage what has changed, and return what to launch; None if no row is left."""
        # the mask of a masked row depends on its last token, which the host has to read first: while there is such a
        # row, a launch is one step, and is read before the next one
        is_steady = self.scheduler.decoding == self._staged
        has_masked_rows = bool(self._masked_rows)
        if not is_steady:
            has_masked_rows = any(map(_may_be_masked, self.scheduler.decoding))
        num_steps = 1 if has_masked_rows else self.runner.steps_per_launch
        widest = 1 if self.pace is None else self.pace.widths[-1]
        room, pages_changed = self._reserve_pages(num_steps * widest, is_steady)
        is_same = is_steady and not (pages_changed or self._to_prefill)
        if is_same and self._repeated is not None and self._repeated.steps <= self._steps_to_border():
            return self._repeated
        is_new = not is_steady or (pages_changed and self.scheduler.decoding != self._staged)  # some were preempted
        if is_new:
            self._drain()  # launches in flight belong to the old rows
            if not self._stage(list(self.scheduler.decoding)):
                return None
            num_steps = 1 if self._masked_rows else num_steps
        elif pages_changed:
            with self.runner.device_guard():
                self.runner.step.stage_pages([self._pages_of(sequence.request_id) for sequence in self._staged])
        room = min(room, self._steps_to_border())
        queries = self._queries(room)
        in_halves = bool(self._masked_rows) and not is_new and self._overlaps_masks(queries)
        if self._to_prefill:
            if queries == 1 and not in_halves and self.runner.graphs.can_mix(len(self._staged), self._prefilled):
                self._mixed, self._to_prefill = self._to_prefill, []
                chunks = [chunk for _, chunk in self._mixed]
                self.stats.mixed_steps += 1
                self.runner.stage(chunks=chunks)
                return LaunchPlan.of_chunks(chunks, len(self._staged), has_adapters=self._has_adapters)
            self._prefill()
            if self.scheduler.decoding != self._staged:  # one has failed
                return self._plan_launch()
        part = "logits" if in_halves else "whole"
        shape = StepShape(len(self._staged), queries, part=part, has_adapters=self._has_adapters)
        plan = LaunchPlan(shape, min(num_steps, room // queries))
        self._repeated = plan if plan.steps == num_steps and self.pace is None and not self._masked_rows else None
        return plan

    def _past_borders(self) -> list[int]:
        """Return how many tokens each row is past a checkpoint, behind all launches; [] if steps leave none."""
        if self._border is None or self.pace is not None:  # how many drafts will be right is not known
            return []
        ahead = sum(batch.launch.num_steps for batch in self._in_flight)
        return [(sequence.cached_length + ahead) % self._border for sequence in self._staged]

    def _steps_to_border(self) -> int:
        """Return for how many steps no row gets past its next checkpoint."""
        past = self._past_borders()
        return self._border - max(past) if self._border is not None and past else sys.maxsize

    def _stage(self, rows: list[Sequence]) -> bool:
        self._staged, self._masked_rows, self._found, self._repeated = [], {}, [], None
        if not rows:
            return False
        fresh = [row for row, sequence in enumerate(rows) if not sequence.num_generated]  # filled by `Engine.add`
        for row, mask in _masks(_constrained(rows, fresh)).items():
            np.copyto(rows[row].sampling.token_mask, mask)  # type: ignore[arg-type]

        def stage(rows: list[Sequence]) -> None:
            self.runner.stage([sequence.row_inputs(self.scheduler.memory_of(sequence)) for sequence in rows])

        try:
            stage(rows)
        except Exception as error:
            if not self._fail_some(rows, lambda row: stage([rows[row]]), error):
                raise
            return self._stage(list(self.scheduler.decoding))
        self._staged, self._has_adapters = rows, any(sequence.adapter is not None for sequence in rows)
        self._masked_rows = _constrained(rows, self.runner.step.guided_rows)
        self._logprobs = max((s.params.logprobs for s in rows if s.params.logprobs is not None), default=None)
        return True

    def _queries(self, room: int) -> int:
        """Return how many tokens each row feeds per step of the next launch; at most `room`."""
        drafting, rows = self.runner.step.drafting, len(self._staged)
        if drafting is None or self.pace is None:
            return 1
        found = drafting.found(rows)
        if found is not None:
            self._found = found
        queries = self.pace.choose(self.runner.graphs.bucket_for(rows), self._found, room)
        if queries > 1 and not drafting.is_cheap:
            self._drain()  # the draft model needs their tokens
            running = (sequence for sequence in self._staged if not sequence.finished)
            for chunks in self.scheduler.draft_gaps(running, self.runner.setting.prefill_tokens):
                self.runner.stage(chunks=chunks)
                self.runner.launch(LaunchPlan.of_chunks(chunks, catches_up=True))
        return queries

    def _overlaps_masks(self, queries: int) -> bool:
        """Whether to fill masks between the halves of the step, while the first runs; if not, fill them now."""
        if queries == 1 and (not self.runner.is_cpu or self._mask_seconds > self.mask_thread_seconds):
            return True
        self._fill_masks()
        return False

    def _fill_masks(self) -> None:
        began = time.perf_counter()
        masks = _masks(self._masked_rows)
        self._mask_seconds = time.perf_counter() - began
        with self.runner.device_guard():
            self.runner.step.stage_masks(masks)

    def _reserve_pages(self, num_tokens: int, is_steady: bool) -> tuple[int, bool]:
        """Reserve pages for the next tokens; return for how many there are pages, and whether pages changed."""
        if is_steady and num_tokens <= self._steps_with_pages:
            self._steps_with_pages -= num_tokens
            return num_tokens, False
        self._steps_with_pages = 0
        ahead = num_tokens + sum(len(batch.launch.steps) for batch in self._in_flight)
        try:
            changed = self.scheduler.reserve(ahead)
            self._steps_with_pages = self.scheduler.steps_with_pages() - ahead
            return num_tokens, changed
        except CacheFullError:
            self._prefill()  # before its sequences may be preempted
            self._drain()
            return self.scheduler.make_room(num_tokens), True

    def _drain(self) -> None:
        while self._in_flight:
            self._read_oldest()

    def _read_oldest(self) -> None:
        batch = self._in_flight.popleft()
        launch, queries = batch.launch, batch.launch.queries
        steps = self.runner.read(launch, logprobs=batch.logprobs)
        kept = 0
        for row, sequence in enumerate(batch.sequences):
            if sequence.finish_reason is None:
                try:
                    kept += self._accept(sequence, row, steps)
                except Exception as error:
                    self._fail_some([sequence], None, error)
                if queries > 1:  # the draft model has not seen the last draft
                    sequence.drafted_length = sequence.cached_length - 1
        self.stats.generated_tokens += kept
        self.stats.step_tokens.append(batch.prefilled + kept)
        # count steps that ran for a live row: a loop on the device may end early, a launch may follow a stop
        first_tokens = steps[::queries] if queries > 1 else steps
        ran = sum([step.tokens.count(ENDED_BEFORE) < launch.num_rows for step in first_tokens])
        self.stats.batch_sizes[launch.num_rows] += ran
        self.stats.bucket_steps[launch.bucket] += ran
        now, last_read = time.perf_counter(), self._last_read
        seconds = (now - max(last_read, launch.started)) / max(ran, 1)
        self.stats.step_seconds.append(seconds)
        if self._budget.target_seconds:
            self._budget.record(batch.prefilled, (now - max(last_read, batch.since)) / max(ran, 1))
        self._last_read = now
        if self.pace is not None:
            self.pace.record_step(launch.bucket, queries, seconds)
            self._count_drafts(batch, first_tokens[:ran], self.pace)

    def _count_drafts(self, batch: _InFlight, steps: list[StepTokens], pace: DraftPace) -> None:
        found = batch.found
        for step in steps:
            if step.drafts is None:
                continue
            pace.record_drafts(found, step.drafts)
            for verified, accepted in zip(step.drafts.verified, step.drafts.accepted, strict=True):
                if verified:
                    self.stats.count_drafts(verified, accepted)
            found = list(zip(step.drafts.found, step.drafts.matched, strict=True))
        if self._staged is batch.sequences:
            self._found = found

    def _accept(self, sequence: Sequence, row: int, steps: list[StepTokens]) -> int:
        """Append the tokens of a launch to one sequence, and emit an event; return how many tokens it kept."""
        accepted: list[int] = []
        wanted = sequence.params.logprobs
        logprobs: list[TokenLogprobs] | None = None if wanted is None else []
        error: str | None = None
        for step in steps:
            token = step.tokens[row]
            if token == ENDED_BEFORE:  # or the previous draft was rejected
                continue
            if token < 0 or sequence.failure is not None:
                error = sequence.fail(sequence.failure or token)
                break
            try:
                sequence.accept(token)
            except Exception as failure:
                error = sequence.fail(failure)
                break
            accepted.append(token)
            if logprobs is not None and wanted is not None and step.logprobs:
                logprobs.append(_token_logprobs(step.logprobs, row, wanted))
            if not sequence.cached_length % self._page_size:
                self.scheduler.publish(sequence)
            if sequence.finish_reason is not None:
                break
        else:  # the state is that behind the last token, unless another launch has changed it
            if self._border is not None and not sequence.cached_length % self._border and not self._in_flight:
                self.scheduler.save_state(sequence)
        if accepted or error is not None:
            self._emit(sequence, accepted, logprobs, error)
        return len(accepted)

    def _emit(
        self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None, error: str | None = None
    ) -> None:
        """Emit an event of new tokens or an error; remove the sequence if it has ended."""
        metrics, finish_reason = sequence.metrics, sequence.finish_reason
        if metrics.first_token_time is None and tokens:
            metrics.first_token_time = time.perf_counter()
        if finish_reason is not None:
            metrics.finished_time = time.perf_counter()
            self.stats.finished_outputs += error is None
            self.scheduler.remove(sequence, keeps_prefix=error is None)
            self.ended.append(sequence.request_id)
        scores = None
        if sequence.params.prompt_logprobs is not None and not sequence.prompt_reported:
            scores, sequence.prompt_reported = sequence.prompt_logprobs, True
        outcome = (finish_reason, sequence.stop_reason, metrics, error, scores, sequence.is_complete)
        self._events.append(Event(sequence.request_id, tokens, logprobs, *outcome, sequence.error_code))


def _may_be_masked(sequence: Sequence) -> bool:
    try:
        return sequence.constraint is not None and sequence.constraint.guide is None
    except Exception:  # raised once more when its row is staged
        return True


def _constrained(rows: list[Sequence], without: Collection[int] = ()) -> _Constrained:
    found: _Constrained = defaultdict(list)
    for row, sequence in enumerate(rows):
        if sequence.constraint is not None and row not in without:
            found[type(sequence.constraint)].append((row, sequence))
    return found


def _masks(constrained: _Constrained) -> dict[int, np.ndarray]:
    """Return the token mask of each row; a constraint that fails ends its row when the step is read."""
    masks: dict[int, np.ndarray] = {}
    for kind, rows in constrained.items():
        found = _fill_all(kind, [sequence for _, sequence in rows])
        for (row, sequence), mask in zip(rows, found, strict=True):
            if isinstance(mask, Exception):
                sequence.failure = mask
            else:
                masks[row] = mask
    return masks


def _fill_all(kind: type[Any], sequences: list[Sequence]) -> list[np.ndarray | Exception]:
    """Return the masks of sequences, or what their constraints raise."""
    try:
        return [*kind.fill_all([s.constraint for s in sequences], [s.stop_ids for s in sequences])]
    except Exception as error:
        if len(sequences) == 1:
            return [error]
        # valid until the next call
        alone = (_fill_all(kind, [sequence])[0] for sequence in sequences)
        return [mask if isinstance(mask, Exception) else mask.copy() for mask in alone]


def _token_logprobs(step: StepLogprobs, row: int, wanted: int) -> TokenLogprobs:
    known = step.top_ids[row][:wanted]
    top = tuple((other, value) for other, value in zip(known, step.top[row], strict=False) if other >= 0)
    return TokenLogprobs(step.sampled[row], step.ranks[row], top)
