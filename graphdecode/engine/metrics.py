"""Metrics of one request, and statistics of an engine."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

_MAX_STEP_TIMES = 100_000


@dataclass
class RequestMetrics:
    """Times of a request, in seconds of `time.perf_counter` (None: not yet), and counts."""

    arrival_time: float  # the request was added
    first_scheduled_time: float | None = None  # it first got a row and pages
    first_token_time: float | None = None  # its first token was read by the host
    finished_time: float | None = None  # its last output was finished
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0  # how often it was preempted

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


class DraftCounts(NamedTuple):
    """Counts of verified and accepted drafts, and of accepted ones by draft position."""

    drafted: int
    accepted: int
    accepted_by_position: tuple[int, ...]


@dataclass
class EngineStats:
    """Counts since the engine was made; `spec_decode_*` are named as in vLLM."""

    generated_tokens: int = 0  # sampled tokens that were kept
    finished_outputs: int = 0
    prefilled_tokens: int = 0  # tokens computed by prefill
    prefill_seconds: float = 0.0  # host time of prefills
    mixed_steps: int = 0  # decode steps with prompt chunks
    batch_sizes: Counter[int] = field(default_factory=Counter)  # live rows -> decode steps
    bucket_steps: Counter[int] = field(default_factory=Counter)  # bucket -> decode steps
    # times of the last decode steps: from the launch, or the previous read if later, to the read
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_STEP_TIMES), repr=False)
    # of those, the steps that computed no prompts
    decode_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_STEP_TIMES), repr=False)
    # host times of the last launches; on a CPU, of the whole step
    launch_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_STEP_TIMES), repr=False)
    # tokens of the last steps: prompt tokens that were computed, and generated ones that were kept
    step_tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_STEP_TIMES), repr=False)
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def count_drafts(self, verified: int, accepted: int) -> None:
        """Count one row's drafts of a step."""
        self.spec_decode_num_drafts += 1
        self.spec_decode_num_draft_tokens += verified
        self.spec_decode_num_accepted_tokens += accepted
        by_position = self.spec_decode_num_accepted_tokens_per_pos
        by_position += [0] * (verified - len(by_position))
        for position in range(accepted):
            by_position[position] += 1

    @property
    def speculation(self) -> DraftCounts:
        """The counts of drafts."""
        by_position = tuple(self.spec_decode_num_accepted_tokens_per_pos)
        return DraftCounts(self.spec_decode_num_draft_tokens, self.spec_decode_num_accepted_tokens, by_position)

    @property
    def padding_share(self) -> float:
        """The share of computed rows that were padding."""
        computed = sum(bucket * steps for bucket, steps in self.bucket_steps.items())
        live = sum(size * steps for size, steps in self.batch_sizes.items())
        return 1.0 - live / computed if computed else 0.0

    def __str__(self) -> str:
        parts = [f"{self.generated_tokens} tokens in {self.finished_outputs} finished outputs"]
        parts.append(f"{self.prefilled_tokens} prompt tokens prefilled in {self.prefill_seconds:.2f} s")
        steps = f"{sum(self.batch_sizes.values())} decode steps"
        if self.mixed_steps:
            steps += f", {self.mixed_steps} of them with prompts"
        parts.append(", ".join([steps, *self.step_times()]))
        return "; ".join([*parts, *self.shares()])

    def shares(self) -> list[str]:
        """Return the steps of each bucket, the padding, and the accepted drafts, if there were any, as text."""
        buckets = ", ".join(f"{b} x{n}" for b, n in sorted(self.bucket_steps.items())) or "none"
        parts = [f"buckets {buckets}", f"padding {100 * self.padding_share:.0f}%"]
        drafted, accepted, _ = self.speculation
        if drafted:
            mean = 1 + accepted / self.spec_decode_num_drafts
            parts.append(f"{accepted} of {drafted} drafts accepted, {mean:.2f} tokens a verification")
        return parts

    def step_times(self) -> list[str]:
        """Return the median and 99th percentile of the times of steps without prompts as text; [] if there are none."""
        if not self.decode_seconds:
            return []
        p50, p99 = np.percentile(np.array(self.decode_seconds) * 1000, [50, 99])
        return [f"{p50:.2f} ms per token p50, {p99:.2f} p99"]
