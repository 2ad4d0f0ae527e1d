"""The bodies of requests: OpenAI's fields, and those that vLLM adds to them.

Types are strict, as OpenAI's are; ranges are the business of `SamplingParams`. A field that is not known is kept in
`model_extra`, and ignored.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

GeneratingPath = Literal["/v1/completions", "/v1/chat/completions"]


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generation(Body):
    """What completions and chat completions have in common."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    return_token_ids: bool | None = None


class Completion(Generation):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatCompletion(Generation):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokenize(Body):
    """`POST /tokenize`: of a text, or of a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class Detokenize(Body):
    """`POST /detokenize`."""

    tokens: list[int] = Field(min_length=0)


def problem_of(error: ValidationError) -> tuple[str, tuple[int | str, ...], str]:
    """Return what is wrong with a body first: for people, the place of it, and the kind for programs."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"], first["loc"], first["type"]
