"""One answer in the making: what the engine knows of it between its steps."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from graphdecode.config.sampling_params import SamplingParams
from graphdecode.engine.constraint import Constraint, ConstraintError
from graphdecode.engine.metrics import RequestMetrics
from graphdecode.engine.request import TokenLogprobs
from graphdecode.engine.steps import NO_CHOICE, RowInputs, RowSampling
from graphdecode.kernels.sampling.sampling_slots import WITHOUT_FINITE


@dataclass(eq=False)
class Sequence:
    """A prompt and its tokens so far.

    Keys and values are kept for all tokens but the last: the last one is fed to the next decode step, which writes its
    keys and values and samples its successor. A prompt is no different: its last token is fed to a decode step, so a
    token is sampled in one place only, and a sequence that was preempted goes on exactly where it was.
    """

    request_id: int  # names it, in the engine and in the cache
    token_ids: list[int]  # prompt and answer
    params: SamplingParams  # what was asked for
    prompt_length: int  # tokens of the prompt
    max_length: int  # tokens that prompt and answer may have together
    stop_ids: tuple[int, ...]  # tokens that end it
    eos_token_ids: tuple[int, ...]  # those of them that are the model's
    sampling: RowSampling  # what the step is told of it
    metrics: RequestMetrics  # times and counts
    turn: tuple[int, float, int] = (0, 0.0, 0)  # priority, turn, id: the lowest is served first and gives way last
    constraint: Constraint | None = None  # holds the answer to a form; None: it may have any
    cached_length: int = 0  # tokens whose keys and values are in the cache; the one book of it
    drafted_length: int = 0  # tokens that a source of drafts with keys of its own has seen
    finish_reason: str | None = None  # "stop", "length" or "error" once it has ended; None before
    stop_reason: int | None = None  # the request's stop token that ended it
    # of the prompt's tokens from the second on, as far as they are computed
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_told_prompt: bool = False  # whether an event has brought them to the owner
    failure: ConstraintError | None = None  # why the constraint cannot be kept any further; the answer ends with it
    error_code: str | None = None  # of its error, as an event has it
    is_complete: bool = False  # whether the constraint has ended the answer, by a token that is part of its text

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

    def length_ahead(self, tokens_ahead: int) -> int:
        """Return how many of its tokens are cached in so many steps."""
        return min(self.cached_length + tokens_ahead, self.max_length)

    def accept(self, token_id: int) -> None:
        """Take a sampled token, and decide whether it ends the answer.

        The step that sampled it has also cached the token before it.

        Raises:
            ConstraintError: the constraint cannot be kept any further.
        """
        tokens, constraint = self.token_ids, self.constraint
        self.cached_length = len(tokens)
        tokens.append(token_id)
        if token_id in self.stop_ids and self.num_generated > self.params.min_tokens:
            self.finish_reason = "stop"
            self.stop_reason = None if token_id in self.eos_token_ids else token_id
        elif constraint is not None and constraint.accept(token_id):
            self.finish_reason, self.is_complete = "stop", token_id not in self.eos_token_ids
        elif len(tokens) >= self.max_length:
            self.finish_reason = "length"

    def fail(self, why: int | ConstraintError) -> str:
        """End it, for no token can be chosen (see NO_CHOICE, or its constraint); return an error that says so."""
        self.finish_reason = "error"
        if self.constraint is not None and why == WITHOUT_FINITE:
            why = ConstraintError("its grammar cannot be followed further: bad_words forbid all")
        if isinstance(why, ConstraintError):
            self.error_code = "form_too_complex"
            return f"request {self.request_id} was ended: {why}"
        return (
            f"request {self.request_id} was ended: no token can be chosen at position {len(self.token_ids)} "
            f"(temperature {self.params.temperature:g}): {NO_CHOICE[why]}"
        )

    def row_inputs(self, pages: SequenceOf[int]) -> RowInputs:
        """Return what a step is told of it, and of its pages of the cache."""
        may_draft = self.constraint is None
        guide = None if self.constraint is None else self.constraint.guide
        return RowInputs(self.token_ids, self.prompt_length, pages, self.sampling, may_draft, guide)
