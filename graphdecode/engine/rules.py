"""What an engine can serve, as plain data: a front refuses by it what the engine would refuse, in any process."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from graphdecode.engine.capacity import Capacity
from graphdecode.engine.request import Request, RequestError
from graphdecode.errors import shown
from graphdecode.kernels.sampling.sampling_slots import MAX_STOP_IDS


@dataclass(frozen=True)
class RequestRules:
    """The limits of an engine.

    Attributes:
        vocab_size: token ids are below it.
        eos_token_ids: that end an answer unless the request ignores them.
        capacity: what fits.
        page_size: tokens of a page of the cache.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    capacity: Capacity
    page_size: int

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
        stop_ids = self.stop_ids(request)
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"at most {MAX_STOP_IDS} tokens can end an answer, the model's and stop_token_ids are {len(stop_ids)}"
            )
        named = {"stop_token_ids": params.stop_token_ids or (), "logit_bias": params.logit_bias or ()}
        for name, ids in named.items():
            beyond = [token for token in ids if token >= vocab_size]
            if beyond:
                raise RequestError(f"{name} names {shown(beyond)}, the vocabulary ends at {vocab_size - 1}")

    def stop_ids(self, request: Request) -> tuple[int, ...]:
        """Return the tokens that end the answer to a request."""
        params = request.sampling_params
        eos = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys([*(params.stop_token_ids or ()), *eos]))
