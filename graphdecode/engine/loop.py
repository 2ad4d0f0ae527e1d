"""The engine's loop: admit, prefill, decode, read, and again, until nothing is left to do."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from graphdecode.cache import CacheFullError
from graphdecode.engine.outputs import Logprob
from graphdecode.engine.runner import Launch, Runner, StepLogprobs, StepTokens
from graphdecode.engine.scheduler import Scheduler
from graphdecode.engine.sequence import Sequence

_STEP_TIMES_KEPT = 100_000


@dataclass
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        generated_tokens: sampled tokens that were kept.
        finished_answers: answers that came to their end.
        prefilled_tokens: tokens whose keys and values were computed by prefill.
        prefill_seconds: host time of prefills.
        batch_sizes: live rows of a decode step -> how many steps had so many.
        bucket_steps: bucket -> how often it was replayed.
        step_seconds: time of the last decode steps: from the launch, or from the tokens of the step before where that
            is later, to the tokens.
    """

    generated_tokens: int = 0
    finished_answers: int = 0
    prefilled_tokens: int = 0
    prefill_seconds: float = 0.0
    batch_sizes: Counter[int] = field(default_factory=Counter)
    bucket_steps: Counter[int] = field(default_factory=Counter)
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_STEP_TIMES_KEPT))

    @property
    def padding_share(self) -> float:
        """The share of computed rows that were padding."""
        computed = sum(bucket * steps for bucket, steps in self.bucket_steps.items())
        live = sum(size * steps for size, steps in self.batch_sizes.items())
        return 1.0 - live / computed if computed else 0.0


class EngineLoop:
    """Turns waiting sequences into finished ones, a step at a time.

    On a GPU a launch is read while the next one runs; the rows of the two are the same, for whenever they are about to
    change, what is under way is read first.

    Args:
        scheduler: who runs.
        runner: the model.
        tokenizer: a `tokenizers.Tokenizer`, for the text of logprobs.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, tokenizer: object) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.stats = EngineStats()
        self._tokenizer = tokenizer
        self._lookahead = 1 if runner.model.device.type == "cuda" else 0
        self._under_way: deque[Launch] = deque()
        self._staged: list[Sequence] = []
        self._last_read = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._under_way)

    def add(self, sequence: Sequence) -> None:
        """Hand in a sequence."""
        self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now; its row and pages are free for others."""
        if not sequence.finished:
            self._drain()
            sequence.abort()
            self.scheduler.remove(sequence)

    def abort_all(self) -> None:
        """End everything that runs or waits."""
        self._under_way.clear()
        for sequence in [*self.scheduler.waiting, *self.scheduler.prefilling, *self.scheduler.decoding]:
            sequence.abort()
            self.scheduler.remove(sequence)
        self._staged = []

    def step(self) -> None:
        """Do one round: at most one prefill, one launch, and the reading of one earlier launch."""
        self._prefill()
        if self.scheduler.decoding:
            self._launch()
        while len(self._under_way) > (self._lookahead if self.scheduler.decoding else 0):
            self._read_oldest()

    def _prefill(self) -> None:
        chunks = self.scheduler.next_chunks()
        if chunks:
            began = time.perf_counter()
            self.runner.prefill(chunks)
            self.stats.prefill_seconds += time.perf_counter() - began
            self.stats.prefilled_tokens += sum(chunk.end - chunk.start for chunk in chunks)
        self.scheduler.prefilled(chunks)

    def _launch(self) -> None:
        num_steps, pages_changed = self._reserve_pages(self.runner.steps_per_launch)
        if self.scheduler.decoding != self._staged:
            self._drain()  # what is under way belongs to the rows as they were
            self._staged = []
            rows = list(self.scheduler.decoding)
            if not rows:
                return
            self.runner.stage_rows(rows)
            self._staged = rows
        elif pages_changed:
            self.runner.stage_pages(self._staged)
        launch = self.runner.launch(self._staged, num_steps)
        self._under_way.append(launch)
        self.stats.batch_sizes[len(self._staged)] += num_steps
        self.stats.bucket_steps[launch.bucket] += num_steps

    def _reserve_pages(self, num_steps: int) -> tuple[int, bool]:
        """Find pages for the next steps; return how many steps there are pages for, and whether pages changed."""
        under_way = sum(launch.num_steps for launch in self._under_way)
        try:
            return num_steps, self.scheduler.reserve(under_way + num_steps)
        except CacheFullError:
            self._drain()
            return self.scheduler.make_room(num_steps), True

    def _drain(self) -> None:
        while self._under_way:
            self._read_oldest()

    def _read_oldest(self) -> None:
        launch = self._under_way.popleft()
        steps = self.runner.read(launch)
        for step in steps:
            self._accept(launch, step)
        ran = sum(any(token >= 0 for token in step.tokens) for step in steps)
        now = time.perf_counter()
        self.stats.step_seconds.append((now - max(self._last_read, launch.started)) / max(ran, 1))
        self._last_read = now

    def _accept(self, launch: Launch, step: StepTokens) -> None:
        page_size = self.scheduler.cache.page_size
        for row, (sequence, token) in enumerate(zip(launch.sequences, step.tokens, strict=True)):
            if sequence.finished or token < 0:
                continue
            if step.logprobs is not None and sequence.params.logprobs is not None:
                self._record_logprobs(sequence, token, row, step.logprobs)
            sequence.accept(token)
            self.stats.generated_tokens += 1
            metrics = sequence.request.metrics
            if metrics.first_token_time is None:
                metrics.first_token_time = time.perf_counter()
            if sequence.finished:
                metrics.finished_time = time.perf_counter()
                self.stats.finished_answers += 1
                self.scheduler.remove(sequence)
            elif sequence.cached_length // page_size > sequence.published_length // page_size:
                self.scheduler.publish(sequence)

    def _record_logprobs(self, sequence: Sequence, token: int, row: int, logprobs: StepLogprobs) -> None:
        top = list(zip(logprobs.top_ids[row], logprobs.top[row], strict=True))
        entries = {
            other: Logprob(value, rank, self._decode(other))
            for rank, (other, value) in enumerate(top[: sequence.params.logprobs], 1)
            if other >= 0
        }
        if token not in entries:
            known = logprobs.top_ids[row]
            rank = known.index(token) + 1 if token in known else None
            entries[token] = Logprob(logprobs.sampled[row], rank, self._decode(token))
        output = sequence.output
        if output.logprobs is None:
            output.logprobs = []
        output.logprobs.append(entries)
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs.sampled[row]

    def _decode(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)  # type: ignore[attr-defined]
