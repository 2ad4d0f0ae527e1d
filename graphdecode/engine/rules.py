"""What an engine can serve, as plain data: a front refuses by it what the engine would refuse, in any process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral

from graphdecode.engine.capacity import Capacity
from graphdecode.engine.request import Request, RequestError
from graphdecode.engine.sampling_params import SamplingParams
from graphdecode.errors import shown
from graphdecode.kernels.sampling.sampling_slots import BAD_WORD_LENGTH, SamplingCapacity


@dataclass(frozen=True)
class RequestRules:
    """The limits of an engine.

    Attributes:
        vocab_size: token ids are below it.
        eos_token_ids: that end an answer unless the request ignores them.
        capacity: what fits.
        page_size: tokens of a page of the cache.
        sampling: how much one request may ask of sampling.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    capacity: Capacity
    page_size: int
    sampling: SamplingCapacity

    def check(self, request: Request) -> None:
        """Refuse what can never be served.

        Raises:
            RequestError: says what does not fit, and the range.
        """
        params, vocab_size = request.sampling_params, self.vocab_size
        tokens = request.prompt_token_ids
        if params.n != 1:
            raise RequestError(f"the engine gives one answer to a request: n must be 1, got {params.n}")
        if params.stop_strings:
            raise RequestError(f"the engine knows no text: stop must be resolved above it, got {shown(params.stop)}")
        if not len(tokens):
            raise RequestError("the prompt is empty, and the model has no beginning-of-sequence token to start from")
        wrong = [token for token in tokens if not (isinstance(token, Integral) and 0 <= token < vocab_size)]
        if wrong:
            raise RequestError(f"token ids must be in 0..{vocab_size - 1}, got {shown(wrong[:5])}")
        if params.truncate_prompt_tokens is not None:
            raise RequestError(
                f"prompts are cut above the engine: truncate_prompt_tokens must be None, got "
                f"{params.truncate_prompt_tokens}"
            )
        capacity = self.capacity
        to_generate = 0 if params.max_tokens == 0 else 1
        if len(tokens) + to_generate > capacity.token_limit:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; with {('none', 'one token')[to_generate]} to generate, at most "
                f"{capacity.token_limit - to_generate} fit (max_sequence_length {capacity.max_sequence_length}, "
                f"{capacity.total_num_pages} pages of {self.page_size} tokens)"
            )
        self._check_sampling(request)

    def _check_sampling(self, request: Request) -> None:
        params, limits = request.sampling_params, self.sampling
        if params.bad_words:
            raise RequestError(
                f"the engine knows no text: bad_words must be resolved above it, got {shown(params.bad_words)}"
            )
        if params.structured_outputs is not None:
            raise RequestError("the engine knows no text: structured_outputs must be resolved above it, to a grammar")
        if request.grammar is not None and params.allowed_token_ids is not None:
            raise RequestError("structured_outputs: not together with allowed_token_ids, for one mask holds either")
        bad_words, stop_ids = request.bad_words_token_ids, self.stop_ids(request)
        for name, count, key in (
            ("logprobs", self.counted(params.logprobs), "max_logprobs"),
            ("prompt_logprobs", self.counted(params.prompt_logprobs), "max_logprobs"),
            ("stop_token_ids and the model's own", len(stop_ids), "max_stop_token_ids"),
            ("logit_bias", len(params.logit_bias or ()), "max_logit_biases"),
            ("bad_words", len(bad_words), "max_bad_words"),
        ):
            limit = getattr(limits, key)
            if count is not None and count > limit:
                raise RequestError(
                    f"{name}: at most {key}={limit} (section [capacity] of the configuration), got {shown(count)}"
                )
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

    def counted(self, logprobs: int | None) -> int | None:
        """Return how many log-probabilities are asked for; -1 is all of the vocabulary."""
        return self.vocab_size if logprobs == -1 else logprobs

    def resolved(self, params: SamplingParams) -> SamplingParams:
        """Return parameters whose numbers of log-probabilities are counted."""
        if -1 not in (params.logprobs, params.prompt_logprobs):
            return params
        logprobs, prompt_logprobs = self.counted(params.logprobs), self.counted(params.prompt_logprobs)
        return replace(params, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def stop_ids(self, request: Request) -> tuple[int, ...]:
        """Return the tokens that end the answer to a request."""
        params = request.sampling_params
        eos = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys([*(params.stop_token_ids or ()), *eos]))
