"""What goes into the engine and what comes out of it: tokens, and no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphdecode.engine.metrics import RequestMetrics
from graphdecode.engine.sampling_params import SamplingParams
from graphdecode.errors import ArgumentError


class RequestError(ArgumentError):
    """A request that the engine can never serve; it was refused before anything changed."""


class ContextLengthError(RequestError):
    """A prompt is longer than what fits."""


@dataclass(frozen=True)
class Request:
    """One answer to be generated.

    Args:
        prompt_token_ids: at least one token, each in the model's vocabulary.
        sampling_params: with `n` 1, and without what is resolved above the engine: stop texts, bad words, forms of the
            answer, cuts of the prompt; without a seed, one is derived from the engine's and the request's number.
        bad_words_token_ids: sequences of tokens whose last one is not generated behind the others, in place of the
            parameters' `bad_words`.
        grammar: of the answer, in place of the parameters' `structured_outputs`: a text that the engine's `constrain`
            can read; None: it may have any form.
        priority: the lowest is served first and gives way last; requests of one priority are served by their `turn`.
        turn: the lowest is served first; requests of one turn are served as they come.
    """

    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    grammar: str | None = None
    priority: int = 0
    turn: float = 0.0


class TokenLogprobs(NamedTuple):
    """Log-probabilities, natural logarithm, at the place of one token.

    Attributes:
        sampled: of the token.
        rank: its place among all tokens, from 1, the most likely; of equals the lower id comes first.
        top: the most likely tokens with their log-probabilities, most likely first, as many as were asked for.
    """

    sampled: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Event(NamedTuple):
    """What became of one request in one step of the engine.

    Attributes:
        request_id: what `Engine.add` returned.
        token_ids: the new tokens, the one that ended the answer included.
        logprobs: one entry for each of them; None where they were not asked for.
        finish_reason: "stop" or "length" with the last tokens; "error" where the request had to be given up; None
            before.
        stop_reason: the token of `stop_token_ids` that ended the answer; None for end-of-sequence.
        metrics: times and counts of the request so far.
        error: why it was given up.
        prompt_logprobs: with the first tokens, where they were asked for: one entry for each token of the prompt but
            the first one.
        error_code: what sort of error it was, for a program: "form_too_complex" where the answer's form could not be
            followed further; None: no sort of its own.
        completes: the last token ended the answer because nothing can follow it, and not because it is one that ends.
    """

    request_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | None
    metrics: RequestMetrics
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    completes: bool = False
    error_code: str | None = None

    @property
    def is_part(self) -> bool:
        """Whether it brings log-probabilities of the prompt alone, of which others follow."""
        return self.prompt_logprobs is not None and not self.token_ids and self.finish_reason is None

    def in_parts(self, entries: int) -> list[Event]:
        """Return events that say the same together, none of them with many more log-probabilities of the prompt."""
        scores = self.prompt_logprobs
        if not scores:
            return [self]
        size = max(entries // (len(scores[0].top) + 1), 1)
        cuts = range(0, max(len(scores) - size, 0), size)
        nothing = self._replace(token_ids=[], logprobs=None, finish_reason=None, stop_reason=None, error=None)
        parts = [nothing._replace(prompt_logprobs=scores[cut : cut + size]) for cut in cuts]
        return [*parts, self._replace(prompt_logprobs=scores[len(parts) * size :])]
