"""One answer in the making: what the engine knows of it between its steps."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from graphdecode.engine.constraint import Constraint, ConstraintError
from graphdecode.engine.metrics import RequestMetrics
from graphdecode.engine.request import TokenLogprobs
from graphdecode.engine.sampling_params import SamplingParams
from graphdecode.engine.steps import NO_CHOICE, RowInputs, RowSampling


@dataclass(eq=False)
class Sequence:
    """A prompt and its tokens so far.

    Keys and values are kept for all tokens but the last: the last one is fed to the next decode step, which writes its
    keys and values and samples its successor. A prompt is no different: its last token is fed to a decode step, so a
    token is sampled in one place only, and a sequence that was preempted goes on exactly where it was.

    Attributes:
        request_id: names it, in the engine and in the cache.
        token_ids: prompt and answer.
        params: what was asked for.
        prompt_length: tokens of the prompt.
        max_length: tokens that prompt and answer may have together.
        stop_ids: tokens that end it.
        eos_token_ids: those of them that are the model's.
        sampling: what the step is told of it.
        metrics: times and counts.
        precedence: of the request, its priority and its turn: the lowest is served first and gives way last.
        cached_length: tokens whose keys and values are in the cache; the one book of it.
        drafted_length: tokens that a source of drafts with keys of its own has seen.
        finish_reason: "stop", "length" or "error" once it has ended; None before.
        stop_reason: the request's stop token that ended it.
        prompt_logprobs: of the prompt's tokens from the second on, as far as they are computed.
        has_told_prompt: whether an event has brought them to the owner.
        constraint: holds the answer to a form; None: it may have any.
        mask_is_stale: whether `sampling.token_mask` is not what the constraint allows next.
        failure: why the constraint cannot be kept any further; the answer ends with it.
        is_complete: whether the constraint has ended the answer.
    """

    request_id: int
    token_ids: list[int]
    params: SamplingParams
    prompt_length: int
    max_length: int
    stop_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    sampling: RowSampling
    metrics: RequestMetrics
    precedence: tuple[int, float] = (0, 0.0)
    cached_length: int = 0
    drafted_length: int = 0
    finish_reason: str | None = None
    stop_reason: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_told_prompt: bool = False
    constraint: Constraint | None = None
    mask_is_stale: bool = False
    failure: ConstraintError | None = None
    is_complete: bool = False

    @property
    def turn(self) -> tuple[int, float, int]:
        """Where it stands in line: the lowest is served first."""
        return *self.precedence, self.request_id

    @property
    def unscored(self) -> bool:
        """Whether tokens of its prompt are still to be scored, so that the whole prompt has to be computed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - 1

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    @property
    def prefilled(self) -> bool:
        """Whether only the last token waits to be fed, so that decode steps can take over."""
        return self.cached_length >= len(self.token_ids) - 1

    @property
    def is_full(self) -> bool:
        """Whether it has all the tokens that it may have."""
        return len(self.token_ids) >= self.max_length

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.prompt_length

    def score(self, start: int, entries: SequenceOf[TokenLogprobs]) -> None:
        """Take log-probabilities of the prompt: those at the places behind `start` tokens and so on."""
        self.prompt_logprobs[start:] = entries[: self.prompt_length - 1 - start]

    def told_prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Return the log-probabilities of the prompt, once; None where they were not asked for, and later."""
        if self.params.prompt_logprobs is None or self.has_told_prompt:
            return None
        self.has_told_prompt = True
        return self.prompt_logprobs

    def accept(self, token_id: int) -> None:
        """Take a sampled token, and decide whether it ends the answer.

        The step that sampled it has also cached the token before it.

        Raises:
            ConstraintError: the constraint cannot be kept any further.
        """
        self.cached_length = len(self.token_ids)
        self.token_ids.append(token_id)
        if token_id in self.stop_ids and self.num_generated > self.params.min_tokens:
            self.finish_reason = "stop"
            self.stop_reason = None if token_id in self.eos_token_ids else token_id
        elif self.constraint is not None and self.constraint.accept(token_id):
            self.finish_reason, self.is_complete = "stop", True
        elif self.is_full:
            self.finish_reason = "length"
        else:
            self.mask_is_stale = self.constraint is not None

    def fill_mask(self) -> None:
        """Let `sampling.token_mask` be what the constraint allows next; what it cannot do is kept as the failure."""
        if self.mask_is_stale and self.failure is None:
            assert self.constraint is not None
            assert self.sampling.token_mask is not None
            try:
                self.constraint.fill(self.sampling.token_mask, self.stop_ids)
            except ConstraintError as failure:
                self.failure = failure
            self.mask_is_stale = False

    def fail(self, why: int | ConstraintError) -> str:
        """End it, for no token can be chosen; return an error that says so.

        Args:
            why: one of NO_CHOICE, or what its constraint says.
        """
        self.finish_reason = "error"
        if isinstance(why, ConstraintError):
            return f"request {self.request_id} was ended: {why}"
        return (
            f"request {self.request_id} was ended: no token can be chosen at position {len(self.token_ids)} "
            f"(temperature {self.params.temperature:g}): {NO_CHOICE[why]}"
        )

    def row_inputs(self, pages: SequenceOf[int]) -> RowInputs:
        """Return what a step is told of it.

        Args:
            pages: of the cache that it owns.
        """
        may_draft = self.constraint is None
        guide = None if self.constraint is None else self.constraint.guide
        return RowInputs(self.token_ids, self.prompt_length, pages, self.sampling, may_draft, guide)
