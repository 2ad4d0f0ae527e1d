"""The rows that are staged, and launches of them in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from graphdecode.engine.runner import Launch, LaunchPlan
from graphdecode.engine.scheduler import Sequence


@dataclass
class StagedBatch:
    """The staged rows, and what all of them share."""

    sequences: list[Sequence] = field(default_factory=list)
    has_adapters: bool = False  # whether any row has an adapter
    logprobs: int | None = None  # largest number of top tokens that a row asked for
    steady_plan: LaunchPlan | None = None  # of a step that is like the one before


class InFlight(NamedTuple):
    """A launch, and what it was launched with."""

    launch: Launch
    batch: StagedBatch
    prefilled: int  # prompt tokens that were computed right before it
    since: float  # when that began
    draft_candidates: list[tuple[int, int]]  # before its first step, row by row: drafts, match length
