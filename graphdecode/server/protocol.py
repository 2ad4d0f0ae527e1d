"""The bodies of requests: OpenAI's fields, and those that vLLM adds to them.

Types are strict, as OpenAI's are; ranges are the business of `SamplingParams`. A field that is not known is kept in
`model_extra`, and ignored.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from graphdecode.engine import SamplingParams

_TEXTS = ("prompt", "messages", "tools", "bad_words", "stop")
_NUMBERS = ("allowed_token_ids", "stop_token_ids", "logit_bias")

T = TypeVar("T")
Listed = Annotated[
    list[T], Field(fail_fast=True)
]  # one wrong element is enough: of a million, each would have its own error
GeneratingPath = Literal["/v1/completions", "/v1/chat/completions"]


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None

    @property
    def parts(self) -> int:
        """About how often preparing it asks a tokenizer, or goes round in a template; 64 numbers count as one."""
        texts = [getattr(self, name, None) for name in _TEXTS]
        numbers = [getattr(self, name, None) or () for name in _NUMBERS]
        return sum(len(each) for each in texts if isinstance(each, list) and not _is_numbers(each)) + (
            sum(map(len, numbers)) // 64
        )


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool = False
    continuous_usage_stats: bool = False


OTHERWISE = ("logprobs", "logit_bias", "max_tokens", "structured_outputs", "detokenize")  # see `Generation`


def _asking() -> Any:
    """Return a body with the fields of `SamplingParams`, but for those that a request states otherwise."""
    kinds = get_type_hints(SamplingParams, localns={"Sequence": Listed}, include_extras=True)
    asked = [each.name for each in fields(SamplingParams) if each.init and each.name not in OTHERWISE]
    return create_model("Asking", __base__=Body, **{name: (kinds[name] | None, None) for name in asked})  # type: ignore[call-overload]


class Generation(_asking()):  # type: ignore[misc]
    """What completions and chat completions have in common: `SamplingParams`, but what they state in another way."""

    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    return_token_ids: bool | None = None


class Completion(Generation):
    """`POST /v1/completions`."""

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatCompletion(Generation):
    """`POST /v1/chat/completions`."""

    messages: Listed[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokenize(Body):
    """`POST /tokenize`: of a text, or of a chat."""

    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Listed[dict[str, Any]] | None = None


class Detokenize(Body):
    """`POST /detokenize`."""

    tokens: Listed[int]


_LARGE = {
    *("prompt", "messages", "tools", "response_format", "structured_outputs", "stop", "bad_words", "logit_bias"),
    *("stop_token_ids", "allowed_token_ids", "chat_template", "chat_template_kwargs", "suffix", "user"),
}
_UNKNOWN_TOLD, _UNKNOWN_LENGTH = 10, 40

B = TypeVar("B", bound=Body)


def _is_numbers(given: list[Any]) -> bool:
    """Whether it is one prompt of token ids."""
    return bool(given) and isinstance(given[0], int)


def without_large_parts(body: B) -> B:
    """Return a body whose fields of any size are None, once they have been made into something else."""
    unset = dict.fromkeys(_LARGE & type(body).model_fields.keys())
    slim = body.model_copy(update=unset)
    slim.__pydantic_extra__ = {}
    return slim


def unknown_fields(body: Body) -> tuple[str, ...]:
    """Return the names of fields that are ignored, the first few, cut and escaped for a log."""
    names = islice(body.model_extra or (), _UNKNOWN_TOLD)
    return tuple(ascii(name[:_UNKNOWN_LENGTH])[1:-1] for name in names)


def problem_of(error: ValidationError) -> tuple[str, tuple[int | str, ...], str]:
    """Return what is wrong with a body first: for people, the place of it, and the kind for programs."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"], first["loc"], first["type"]
