"""The engine's requests and events, in tokens, and the limits of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from graphdecode.config.sampling_params import SamplingParams
from graphdecode.engine.capacity import Capacity
from graphdecode.engine.constraint import ReasoningMarkers
from graphdecode.engine.metrics import RequestMetrics
from graphdecode.errors import ArgumentError, shown
from graphdecode.kernels.sampling.sampling_slots import BAD_WORD_LENGTH, SamplingCapacity


class RequestError(ArgumentError):
    """A request that the engine can never serve; nothing was changed."""


class ContextLengthError(RequestError):
    """The prompt is too long, or leaves too little room for the output."""


@dataclass(frozen=True)
class Request:
    """One output to be generated."""

    prompt_token_ids: Sequence[int]  # at least one token, each in the model's vocabulary
    # with `n` 1, and without stop texts, bad words, structured outputs and truncation, which the caller resolves.
    # Without a seed, one is derived from the engine's and the request's id
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    bad_words_token_ids: Sequence[Sequence[int]] = ()  # the tokens of `bad_words`
    grammar: str | None = None  # grammar of the structured output, for the engine's `constrain`
    priority: int = 0  # the lowest is served first and preempted last
    # within a priority, the lowest is served first (start-time fair queuing); ties: the first added
    start_tag: float = 0.0
    adapter: str | None = None  # name of a loaded adapter, or None
    cache_salt: str | None = None  # cached prefixes are shared by requests of one salt alone
    is_checked: bool = False  # whether the engine's `rules` were already checked
    pools: bool = False  # the prompt's hidden states are pooled, and nothing is generated
    scores: bool = False  # it pools, and the event has the logits of the labels instead
    reasoning: ReasoningMarkers | None = None  # the output may begin with reasoning, and `grammar` is behind it


class TokenLogprobs(NamedTuple):
    """Log-probabilities (natural logarithm) at the position of one token.

    `sampled` is the token's, `rank` its rank in the vocabulary from 1 (ties: the lower id first), `top` the most likely
    tokens with theirs.
    """

    sampled: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Event(NamedTuple):
    """One step's output for one request."""

    request_id: int  # what `Engine.add` returned
    token_ids: list[int]  # the new tokens, including the one that ended the output
    logprobs: list[TokenLogprobs] | None  # one entry per token, if requested
    finish_reason: str | None  # "stop" or "length" with the last tokens, "error" if the request failed, else None
    stop_reason: int | None  # the token of `stop_token_ids` that ended the output; None for end-of-sequence
    metrics: RequestMetrics  # the request's times and counts so far
    error: str | None = None  # the error message
    # with the first tokens, if requested: of each prompt token from the second
    prompt_logprobs: list[TokenLogprobs] | None = None
    completes: bool = False  # the last token completed the structured output, and is text, not an end-of-sequence token
    error_code: str | None = None  # "form_too_complex" if the structured output could not be followed further
    # float32 [hidden], of a request that pools, with its end; [labels]: the logits of a model that scores pairs
    embedding: np.ndarray | None = None

    @property
    def is_part(self) -> bool:
        """Whether it holds only log-probabilities of the prompt; further events follow."""
        return self.prompt_logprobs is not None and not self.token_ids and self.finish_reason is None


@dataclass(frozen=True)
class RequestRules:
    """The limits of requests, as plain data: other processes check requests before they send them."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]  # tokens that end an output unless the request ignores them
    capacity: Capacity
    page_size: int  # tokens of a page of the cache
    sampling: SamplingCapacity  # limits of sampling parameters
    model_max_length: int  # tokens of a sequence that the model was trained for
    hidden_size: int | None = None  # channels of an embedding; None: the model gives none
    num_labels: int = 0  # logits of an embedding of a model that scores pairs

    @property
    def length_hint(self) -> str:
        """Advice: the settings to change for longer sequences."""
        if self.capacity.max_sequence_length >= self.model_max_length:
            return f"the model's own limit is {self.model_max_length}"
        return (
            f"--max-sequence-length N (max_sequence_length) allows longer sequences, up to {self.model_max_length}, "
            "the model's own limit"
        )

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served.

        Raises:
            RequestError: names the value and its range.
        """
        params = request.sampling_params
        is_constrained = request.grammar is not None or request.reasoning is not None
        self.check_sampling(params, request.bad_words_token_ids, is_structured=is_constrained)
        self.check_prompt(request.prompt_token_ids, 0 if request.pools else params.max_tokens)
        priority: Any = request.priority
        start_tag: Any = request.start_tag
        if not isinstance(priority, Integral) or isinstance(priority, bool):
            raise RequestError(f"priority must be an integer, got {shown(priority)}")
        if not isinstance(start_tag, Real) or not math.isfinite(start_tag):
            raise RequestError(f"start_tag must be a finite number, got {shown(start_tag)}")

    def check_prompt(self, tokens: Sequence[int], max_tokens: int | None) -> None:
        """Refuse a prompt that can never be served, with `max_tokens` to generate; see `check`."""
        if not len(tokens):
            raise RequestError("the prompt is empty: it must have at least one token id")
        capacity, vocab_size = self.capacity, self.vocab_size
        to_generate = 0 if max_tokens == 0 else 1
        if len(tokens) + to_generate > capacity.token_limit:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens; with {('none', 'one token')[to_generate]} to generate, at most "
                f"{capacity.token_limit - to_generate} fit (max_sequence_length {capacity.max_sequence_length}, "
                f"{capacity.total_num_pages} pages of {self.page_size} tokens); {self.length_hint}"
            )
        wrong = self._beyond(tokens)
        if wrong:
            raise RequestError(f"token ids must be in 0..{vocab_size - 1}, got {shown(wrong[:5])}")

    def check_pools(self, dimensions: int | None = None, *, scores: bool = False) -> None:
        """Refuse an embedding that the model cannot give, or of more `dimensions` than it has; see `check`."""
        if self.hidden_size is None:
            raise RequestError("embeddings: this model gives no hidden states")
        if scores and not self.num_labels:
            raise RequestError("scores: this model has no labels, it compares embeddings")
        if dimensions is not None and not 1 <= dimensions <= self.hidden_size:
            raise RequestError(f"dimensions must be in 1..{self.hidden_size}, got {shown(dimensions)}")

    def check_sampling(
        self, params: SamplingParams, bad_words: Sequence[Sequence[int]], *, is_structured: bool
    ) -> None:
        """Refuse sampling parameters that can never be served; see `check`."""
        if params.n != 1:
            raise RequestError(f"the engine generates one output per request: n must be 1, got {params.n}")
        cut = params.truncate_prompt_tokens
        if cut is not None:
            raise RequestError(f"prompts are cut above the engine: truncate_prompt_tokens must be None, got {cut}")
        for name in ("stop", "bad_words", "structured_outputs"):
            if value := getattr(params, name):
                raise RequestError(f"the engine knows no text: {name} must be resolved above it, got {shown(value)}")
        if is_structured and params.allowed_token_ids is not None:
            raise RequestError("structured_outputs: not together with allowed_token_ids, for one mask holds either")
        stop_ids = (*self.stop_ids(params), *self.masked_only_ids(params))
        for name, count, key in (
            ("logprobs", self.counted(params.logprobs), "max_logprobs"),
            ("prompt_logprobs", self.counted(params.prompt_logprobs), "max_logprobs"),
            ("stop_token_ids and the model's own", len(stop_ids), "max_stop_token_ids"),
            ("logit_bias", len(params.logit_bias or ()), "max_logit_biases"),
            ("bad_words", len(bad_words), "max_bad_words"),
        ):
            self.check_count(name, count, key)
        long = next((word for word in bad_words if not 1 <= len(word) <= BAD_WORD_LENGTH), None)
        if long is not None:
            raise RequestError(f"bad_words: each is 1..{BAD_WORD_LENGTH} tokens, got one of {len(long)}")
        for name, ids in {
            "stop_token_ids": params.stop_token_ids or (),
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words": [token for word in bad_words for token in word],
        }.items():
            beyond = [token for token in ids if not 0 <= token < self.vocab_size]
            if beyond:
                raise RequestError(f"{name} names {shown(beyond[:5])}, the vocabulary ends at {self.vocab_size - 1}")
        forbidden = {word[0] for word in bad_words if len(word) == 1} | (set(stop_ids) if params.min_tokens else set())
        if params.allowed_token_ids is not None and forbidden.issuperset(params.allowed_token_ids):
            raise RequestError("none of allowed_token_ids is left by bad_words, and by stop tokens before min_tokens")

    def check_count(self, name: str, count: int | None, key: str) -> None:
        """Refuse a count above the limit `key` of `SamplingCapacity`; see `check`."""
        limit = getattr(self.sampling, key)
        if count is not None and count > limit:
            raise RequestError(
                f"{name}: at most {key}={limit} (section [capacity] of the configuration), got {shown(count)}"
            )

    def _beyond(self, tokens: Sequence[int]) -> list[Any]:
        """Return the values that are not token ids; fast if there are none."""
        are_ints = type(tokens) is list and set(map(type, tokens)) == {int}
        if are_ints and 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            return []
        return [token for token in tokens if not (isinstance(token, Integral) and 0 <= token < self.vocab_size)]

    def counted(self, logprobs: int | None) -> int | None:
        """Return how many log-probabilities are requested; -1 means the whole vocabulary."""
        return self.vocab_size if logprobs == -1 else logprobs

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the tokens that end an output."""
        eos = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys([*(params.stop_token_ids or ()), *eos]))

    def masked_only_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the ignored end-of-sequence tokens, which are masked before `min_tokens` but end no output."""
        if not (params.min_tokens and params.ignore_eos):
            return ()
        return tuple(token for token in self.eos_token_ids if token not in (params.stop_token_ids or ()))
