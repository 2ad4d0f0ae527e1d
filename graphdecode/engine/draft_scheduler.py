"""Speculation: how many drafts of each row a launch verifies, and how many were accepted."""

from __future__ import annotations

from collections.abc import Iterable

from graphdecode.engine.draft_pace import DraftPace
from graphdecode.engine.metrics import EngineStats
from graphdecode.engine.runner import Launch, LaunchPlan, Runner
from graphdecode.engine.scheduler import Scheduler, Sequence
from graphdecode.engine.steps import Drafting, StepTokens


class DraftScheduler:
    """Chooses the queries per row of each launch.

    Attributes:
        pace: chooses by times and acceptance rates.
        is_cheap: whether drafts take no model; else the draft model computes tokens of plain steps first.
        candidates: before the next step, row by row: number of drafts, match length.
    """

    def __init__(self, drafting: Drafting, runner: Runner, scheduler: Scheduler, stats: EngineStats) -> None:
        self._drafting, self._runner, self._scheduler, self._stats = drafting, runner, scheduler, stats
        self.is_cheap = drafting.is_cheap
        self.pace = DraftPace(runner.graphs.ladder.queries, is_fixed=drafting.is_fixed, is_cheap=drafting.is_cheap)
        self.candidates: list[tuple[int, int]] = []

    def queries(self, rows: int, most: int) -> int:
        """Return how many tokens each row feeds per step of the next launch; at most `most`."""
        candidates = self._drafting.candidates(rows)
        if candidates is not None:
            self.candidates = candidates
        return self.pace.choose(self._runner.graphs.bucket_for(rows), self.candidates, most)

    def catch_up(self, sequences: Iterable[Sequence]) -> None:
        """Compute with the draft model the tokens that plain steps fed; nothing may be in flight."""
        for chunks in self._scheduler.draft_gaps(sequences, self._runner.setting.prefill_tokens):
            self._runner.stage(chunks=chunks)
            self._runner.launch(LaunchPlan.of_chunks(chunks, catches_up=True))

    def record(
        self, launch: Launch, candidates: list[tuple[int, int]], steps: list[StepTokens], seconds: float
    ) -> list[tuple[int, int]]:
        """Record the steps of a launch and their time; return the candidates behind them, given those before."""
        self.pace.record_step(launch.bucket, launch.queries, seconds)
        for step in steps:
            if step.drafts is None:
                continue
            self.pace.record_drafts(candidates, step.drafts)
            for verified, accepted in zip(step.drafts.verified, step.drafts.accepted, strict=True):
                if verified:
                    self._stats.count_drafts(verified, accepted)
            candidates = list(zip(step.drafts.candidates, step.drafts.match_lengths, strict=True))
        return candidates
