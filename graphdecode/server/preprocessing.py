"""Prepares requests for the engine: tokenizer, chat template and limits, in this process or in a child."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from graphdecode.config import ServerConfig
from graphdecode.config.sampling_params import MAX_OUTPUTS
from graphdecode.engine import SamplingParams
from graphdecode.engine.request import ContextLengthError
from graphdecode.errors import GraphdecodeError, shown
from graphdecode.models.sentence_transformers import SentenceFiles
from graphdecode.server.http import HttpError
from graphdecode.server.messages import EngineReady
from graphdecode.server.protocol import ChatCompletion, Generation, sampling_params
from graphdecode.text.chat_formats import ChatFormat, format_of
from graphdecode.text.input_processor import InputProcessor, TokenizedParams, TokenizedPrompt
from graphdecode.text.pooling import Pooler


@dataclass
class Preprocessor:
    """Prepares prompts and parameters for the engine; picklable."""

    model_name: str
    tokenizer: Any  # from transformers
    config: ServerConfig
    sampling_defaults: SamplingParams  # from the checkpoint
    engine: EngineReady
    max_open: int  # outputs that run and wait at a time
    pooler: Pooler = field(default_factory=lambda: Pooler(SentenceFiles()))
    adapters: Collection[str] = ()  # names that requests may give as their model; a child does not see later ones

    @cached_property
    def input_processor(self) -> InputProcessor:
        """The input processor: prompts to tokens."""
        thoughts = self.config.reasoning_parser
        return InputProcessor(self.engine.rules, self.engine.seed, self.tokenizer, reasoning_parser=thoughts)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "input_processor"}
        return state | {"adapters": tuple(self.adapters)}

    def warm(self) -> Preprocessor:
        """Return this, after computing what all grammars share; if that fails, each request with a grammar will."""
        with suppress(GraphdecodeError):
            self.input_processor.grammars.warm()
        return self

    def chat_format(self, chat_template: str | None, tools: Any) -> ChatFormat | None:
        """Return how the model writes with a request's template; None: there is nothing to be parsed."""
        try:
            template = self.tokenizer.get_chat_template(chat_template, tools)
        except ValueError:  # it has none, or several and no default
            template = None
        calls, thoughts = self.config.tool_call_parser, self.config.reasoning_parser
        return format_of(template, tool_call_parser=calls, reasoning_parser=thoughts)

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a model's name means; None: the base model."""
        return None if name == self.model_name else name

    def check_model(self, name: str | None) -> None:
        """Raise HttpError for an unknown model; None is this one."""
        if self.adapter_of(name) is not None and name not in self.adapters:
            served = " and ".join(map(repr, (self.model_name, *self.adapters)))
            message = f"the model {str(name)[:200]!r} does not exist; there is {served}"
            raise HttpError(404, message, param="model", code="model_not_found")

    def sampling_params(self, body: Generation, **others: Any) -> SamplingParams:
        """Return the sampling parameters of a request; see `protocol.sampling_params`."""
        most = min(self.config.max_answers, MAX_OUTPUTS)
        if body.n is not None and not 1 <= body.n <= most:
            raise HttpError(400, f"n must be an integer in 1..{most}, got {body.n}", param="n")
        return sampling_params(body, self.sampling_defaults, **others)

    def check_counts(self, prompts: int, outputs: int, name: str) -> None:
        """Raise HttpError for a number of prompts, or of outputs of all together, that is not served."""
        most = self.config.max_prompts
        if not 1 <= prompts <= most:
            raise HttpError(400, f"{name} must be 1..{most} prompts, got {prompts}", param=name)
        if prompts * outputs > self.max_open:
            message = (
                f"n: {prompts} prompts with {outputs} outputs each are {prompts * outputs}, and {self.max_open} "
                "outputs at most run and wait at a time (max_batch_size and max_waiting)"
            )
            raise HttpError(400, message, param="n" if outputs > 1 else name)

    def tokenized_params(
        self, params: SamplingParams, prompts: int, body: Generation, *, is_structured: bool
    ) -> TokenizedParams:
        """Check the parameters that all prompts of a request share; raises `HttpError` or `ArgumentError`."""
        self.check_counts(prompts, params.n, "prompt")
        if body.stream and body.prompt_logprobs is not None:
            raise HttpError(400, "prompt_logprobs must be null with stream", param="prompt_logprobs")
        shared = self.input_processor.tokenized_params(params, is_structured=is_structured)
        return shared._replace(
            priority=body.priority or 0,
            adapter=self.adapter_of(body.model),
            cache_salt=body.cache_salt,
            truncation_side=body.truncation_side or "left",
        )

    def tokenized_prompt(
        self, prompt: str | list[int], token_ids: list[int], params: TokenizedParams, body: Generation
    ) -> TokenizedPrompt:
        """Truncate a tokenized prompt; raises `RequestError` if it, or the output that the body asks for, cannot fit.

        The message of the latter is vLLM's.
        """
        begins_message = isinstance(body, ChatCompletion) and body.begins_message
        process = self.input_processor.tokenized_prompt
        tokenized = process(prompt, token_ids, params, begins_message=begins_message)
        length, limit = len(tokenized.token_ids), self.engine.rules.capacity.token_limit
        if body.most_tokens is not None and not body.ends_at_context and length + body.most_tokens > limit:
            requested = shown(body.most_tokens)
            raise ContextLengthError(
                f"{body.length_field} is too large: {requested}. This model's maximum context length is {limit} tokens "
                f"and your request has {length} input tokens ({requested} > {limit} - {length}). "
                f"Ask for fewer, or {self.engine.rules.length_hint}"
            )
        return tokenized
