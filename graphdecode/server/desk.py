"""Prepares requests for the engine: tokenizer, chat template and limits, in this process or in a child."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from graphdecode.config import ServerConfig
from graphdecode.engine import SamplingParams
from graphdecode.engine.request import RequestRules
from graphdecode.errors import GraphdecodeError
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS
from graphdecode.server.http import HttpError
from graphdecode.text.input_processor import Asked, InputProcessor, Resolved, as_prompt


class Serves(NamedTuple):
    """What an `InputProcessor` knows of an engine in another process."""

    rules: RequestRules
    seed: int


@dataclass
class Desk:
    """Prepares prompts and parameters for the engine; picklable."""

    model_name: str
    tokenizer: Any  # of transformers
    limits: ServerConfig
    sampling_defaults: SamplingParams  # of the checkpoint
    serves: Serves
    max_open: int  # answers that run and wait at a time

    @cached_property
    def input_processor(self) -> InputProcessor:
        """Prompts to tokens."""
        return InputProcessor(self.serves, self.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "input_processor"}

    @property
    def mask_words(self) -> int:
        """32-bit words of a token mask."""
        return -(-self.serves.rules.vocab_size // MASK_BITS)

    def warm(self) -> Desk:
        """Return this with what all grammars share made; where grammars cannot be read, each request says so."""
        with suppress(GraphdecodeError):
            self.input_processor.grammars.warm()
        return self

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model; None is this one.

        Raises:
            HttpError: it is for another one.
        """
        if name is not None and name != self.model_name:
            raise HttpError(
                404,
                f"the model {name[:200]!r} does not exist; there is {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def asked(self, params: SamplingParams, prompts: int, *, priority: int, is_structured: bool) -> Asked:
        """Check and resolve the parameters that all prompts of a request share.

        Raises:
            HttpError: there are too many prompts, or answers.
            ArgumentError: no prompt can be served with these parameters.
        """
        most = self.limits.max_prompts
        if not 1 <= prompts <= most:
            raise HttpError(400, f"prompt must be 1..{most} prompts, got {prompts}", param="prompt")
        if params.n > self.limits.max_answers:
            raise HttpError(400, f"n must be at most {self.limits.max_answers}, got {params.n}", param="n")
        if prompts * params.n > self.max_open:
            raise HttpError(
                400,
                f"n: {prompts} prompts with {params.n} answers each are {prompts * params.n}, and {self.max_open} "
                "answers at most run and wait at a time (max_batch_size and max_waiting)",
                param="n" if params.n > 1 else "prompt",
            )
        asked = self.input_processor.asked(params, priority=priority)
        self.serves.rules.check_sampling(asked.of_answer, asked.bad_words, has_form=is_structured)
        return asked

    def resolved(self, prompt: str | list[int], asked: Asked, *, special: bool = True) -> Resolved:
        """Return a prompt in tokens.

        Args:
            special: add the special tokens that the tokenizer begins a text with.

        Raises:
            ArgumentError: it is no prompt, or can never be served.
        """
        prompt = as_prompt(prompt)
        return self.checked(prompt, self.input_processor.encode(prompt, special=special), asked)

    def checked(self, prompt: str | list[int], token_ids: list[int], asked: Asked) -> Resolved:
        """Return a prompt that was tokenized; see `resolved`."""
        resolved = self.input_processor.resolved(prompt, token_ids, asked)
        self.serves.rules.check_prompt(resolved.token_ids, asked.params.max_tokens)
        return resolved
