"""Chunked prefill: which prompt tokens a step computes, in a pass of their own or in a mixed step."""

from __future__ import annotations

import math
import time

import numpy as np

from graphdecode.engine.chunk_budget import ChunkBudget
from graphdecode.engine.metrics import EngineStats
from graphdecode.engine.outputs import OutputProcessor, token_logprobs
from graphdecode.engine.prompts import PromptChunk
from graphdecode.engine.runner import LaunchPlan, Runner
from graphdecode.engine.scheduler import FailedSequence, Scheduler, Sequence
from graphdecode.kernels.sampling.sampling_slots import WITHOUT_NUMBERS


class PromptScheduler:
    """Chooses the prompt chunks of each step, and computes those that no mixed step takes.

    Attributes:
        budget: how many prompt tokens a step computes.
        chunks: those of this step that wait for a mixed step.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, outputs: OutputProcessor, stats: EngineStats, target_itl_ms: float
    ) -> None:
        self._scheduler, self._runner, self._outputs, self._stats = scheduler, runner, outputs, stats
        self.budget = ChunkBudget(runner.setting.prefill_tokens, target_itl_ms / 1000)
        self.chunks: list[tuple[Sequence, PromptChunk]] = []
        self._mixed: list[tuple[Sequence, PromptChunk]] = []  # chunks that the next launch takes
        self._num_tokens = 0  # of the chunks of this step

    def choose(self) -> int:
        """Choose the chunks of this step; return their tokens."""
        budget = self.budget.tokens(others_wait=bool(self._scheduler.decoding))
        while True:
            try:
                self.chunks = self._scheduler.next_chunks(budget)
                break
            except FailedSequence as error:
                self._outputs.fail(error.sequence, error.reason)
        self._num_tokens = sum(len(chunk.token_ids) for _, chunk in self.chunks)
        self._stats.prefilled_tokens += self._num_tokens
        return self._num_tokens

    def start(self) -> None:
        """Compute the chosen chunks if no mixed step can take them; complete prompts decode from this step on."""
        chunks, saves_last = self.chunks, self._scheduler.saves_last
        is_alone = any(chunk.scored or each.is_full or saves_last(each, chunk) for each, chunk in chunks)
        if is_alone or not self.can_mix(1):
            self.compute()
            chunks = [(sequence, chunk) for sequence, chunk in chunks if not sequence.finished]
        for sequence in self._scheduler.prefilled(chunks):  # no token was to be generated
            sequence.finish_reason = "length" if sequence.pooling is None else "stop"
            unknown = any(math.isnan(entry.sampled) for entry in sequence.prompt_logprobs)
            if sequence.pooled is not None:
                unknown = not np.isfinite(sequence.pooled).all()
            self._outputs.emit(sequence, [], None, self._outputs.failed(sequence, WITHOUT_NUMBERS) if unknown else None)

    def can_mix(self, rows: int) -> bool:
        """Whether a step of some rows can take the chunks."""
        return self._runner.graphs.can_mix(rows, self._num_tokens)

    def stage_mixed(self) -> list[PromptChunk]:
        """Stage the chunks for a mixed step, and return them."""
        self._mixed, self.chunks = self.chunks, []
        chunks = [chunk for _, chunk in self._mixed]
        self._stats.mixed_steps += 1
        self._runner.stage(chunks=chunks)
        return chunks

    def save_mixed(self) -> None:
        """Save the recurrent states of the mixed step that was launched."""
        self._scheduler.save_states(self._mixed)
        self._mixed = []

    def compute(self) -> None:
        """Compute the chunks in one pass; if it raises, end the sequences whose chunks do so alone."""
        pending, self.chunks = self.chunks, []
        if not pending:
            return
        try:
            self._run(pending)
        except Exception as error:
            if not self._runner.may_repeat:
                raise
            # a second pass would advance recurrent states twice
            has_states = any(state is not None and state.shapes for state in self._runner.model.config.recurrent)
            alone = None if has_states else lambda index: self._run([pending[index]])
            self._outputs.fail_some([sequence for sequence, _ in pending], alone, error)

    def _run(self, pending: list[tuple[Sequence, PromptChunk]]) -> None:
        began, scored = time.perf_counter(), [each for each in pending if each[1].scored]
        pooled = [each for each in pending if each[1].pools]
        # a pass gives logits or hidden states
        for each in (scored, [each for each in pending if not each[1].scored]) if scored and pooled else (pending,):
            self._pass(each)
        self._stats.prefill_seconds += time.perf_counter() - began

    def _pass(self, pending: list[tuple[Sequence, PromptChunk]]) -> None:
        chunks = [chunk for _, chunk in pending]
        self._runner.stage(chunks=chunks)
        scores_of_chunks = self._runner.launch(LaunchPlan.of_chunks(chunks)).scores
        self._scheduler.save_states(pending)
        for (sequence, chunk), scores in zip(pending, scores_of_chunks, strict=True):
            if scores is not None:
                entries = [token_logprobs(scores, index, chunk.num_logprobs) for index in range(len(chunk.token_ids))]
                sequence.prompt_logprobs[chunk.start :] = entries[: sequence.prompt_length - 1 - chunk.start]
        if any(chunk.pools for chunk in chunks):
            rows = self._runner.prompts.read_pooled(len(chunks))
            for (sequence, chunk), row in zip(pending, rows, strict=True):
                if chunk.pools:
                    sequence.pooled = row if sequence.pooled is None else sequence.pooled + row

    def reset(self) -> None:
        """Drop all chunks."""
        self.chunks, self._mixed = [], []
