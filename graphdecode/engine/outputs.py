"""Sampled tokens are appended to their sequences and turned into events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from graphdecode.distributed import RankError
from graphdecode.engine.metrics import EngineStats
from graphdecode.engine.request import Event, TokenLogprobs
from graphdecode.engine.scheduler import Scheduler, Sequence
from graphdecode.engine.steps import ENDED_BEFORE, StepLogprobs, StepTokens
from graphdecode.kernels.sampling.sampling_slots import WITHOUT_NUMBERS

log = logging.getLogger(__name__)


class OutputProcessor:
    """Appends tokens to sequences, ends them, and makes the events of both.

    Attributes:
        events: those that no step has returned yet.
        ended: ids of requests that have ended; the engine empties it.
    """

    def __init__(self, scheduler: Scheduler, stats: EngineStats, logits_hint: Callable[[], str]) -> None:
        self._scheduler, self._stats, self._logits_hint = scheduler, stats, logits_hint
        self._page_size, self._checkpoint_tokens = scheduler.cache.page_size, scheduler.cache.checkpoint_tokens
        self.events: list[Event] = []
        self.ended: list[int] = []

    def take_events(self) -> list[Event]:
        """Return the events, each once."""
        events, self.events = self.events, []
        return events

    def accept(self, sequence: Sequence, row: int, steps: list[StepTokens], *, is_last: bool) -> int:
        """Append the tokens of a launch to one sequence, and emit an event; return how many tokens it took.

        `is_last`: no other launch is in flight.
        """
        accepted: list[int] = []
        num_top = sequence.params.logprobs
        logprobs: list[TokenLogprobs] | None = None if num_top is None else []
        error: str | None = None
        for step in steps:
            token = step.tokens[row]
            if token == ENDED_BEFORE:  # or the previous draft was rejected
                continue
            if token < 0 or sequence.failure is not None:
                error = self.failed(sequence, sequence.failure or token)
                break
            try:
                sequence.accept(token)
            except Exception as failure:
                error = sequence.fail(failure)
                break
            accepted.append(token)
            if logprobs is not None and num_top is not None and step.logprobs:
                logprobs.append(token_logprobs(step.logprobs, row, num_top))
            if not sequence.cached_length % self._page_size:
                self._scheduler.publish(sequence)
            if sequence.finish_reason is not None:
                break
        else:  # the state is that behind the last token, unless another launch has changed it
            if self._checkpoint_tokens is not None and not sequence.cached_length % self._checkpoint_tokens and is_last:
                self._scheduler.save_state(sequence)
        if accepted or error is not None:
            self.emit(sequence, accepted, logprobs, error)
        return len(accepted)

    def emit(
        self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None, error: str | None = None
    ) -> None:
        """Emit an event of new tokens or an error; remove the sequence if it has ended."""
        metrics, finish_reason = sequence.metrics, sequence.finish_reason
        if metrics.first_token_time is None and tokens:
            metrics.first_token_time = time.perf_counter()
        if finish_reason is not None:
            metrics.finished_time = time.perf_counter()
            self._stats.finished_outputs += error is None
            self._scheduler.remove(sequence, keeps_prefix=error is None)
            self.ended.append(sequence.request_id)
        scores = None
        if sequence.params.prompt_logprobs is not None and not sequence.prompt_reported:
            scores, sequence.prompt_reported = sequence.prompt_logprobs, True
        outcome = (finish_reason, sequence.stop_reason, metrics, error, scores, sequence.is_complete)
        embedding = sequence.embedding if error is None else None
        self.events.append(Event(sequence.request_id, tokens, logprobs, *outcome, sequence.error_code, embedding))

    def failed(self, sequence: Sequence, reason: int | Exception) -> str:
        """End a sequence, see `Sequence.fail`, and return the message, with the cause if that is known."""
        hint = self._logits_hint() if reason == WITHOUT_NUMBERS else ""
        return sequence.fail(reason) + (hint and f"; {hint}")

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End one sequence with an error."""
        log.warning("request %d failed", sequence.request_id, exc_info=error)
        sequence.prompt_reported = True  # what is there may be a part
        self.emit(sequence, [], None, sequence.fail(error))

    def fail_some(self, sequences: list[Sequence], alone: Callable[[int], object] | None, error: Exception) -> bool:
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
                except Exception as alone_error:
                    failed.append((sequence, alone_error))
        for sequence, reason in failed:
            self.fail(sequence, reason)
        return bool(failed)


def token_logprobs(step: StepLogprobs, row: int, num_top: int) -> TokenLogprobs:
    """Return one row's log-probabilities of a step, with the `num_top` likeliest tokens."""
    top_ids = step.top_ids[row][:num_top]
    top = tuple((other, value) for other, value in zip(top_ids, step.top[row], strict=False) if other >= 0)
    return TokenLogprobs(step.sampled[row], step.ranks[row], top)
