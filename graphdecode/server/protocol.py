"""Request bodies: OpenAI's fields and vLLM's additions, with strict types.

`SamplingParams` checks ranges. Fields that are not here are in `model_extra`: see `request_fields`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from graphdecode.engine import SamplingParams
from graphdecode.errors import ArgumentError, shown
from graphdecode.text.arguments import MAX_SALT_LENGTH

_TEXTS = ("prompt", "messages", "tools", "bad_words", "stop", "documents", "guided_choice", "input", "text_1", "text_2")
_NUMBERS = ("allowed_token_ids", "stop_token_ids", "logit_bias")

T = TypeVar("T")
OTHER_TYPES = ("logprobs", "logit_bias", "max_tokens", "structured_outputs", "detokenize")  # see `Generation`
_LARGE = {
    *("prompt", "messages", "tools", "response_format", "structured_outputs", "stop", "bad_words", "logit_bias"),
    *("stop_token_ids", "allowed_token_ids", "chat_template", "chat_template_kwargs", "documents"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"),
    *("regex", "grammar", "json_schema"),
}
_MAX_UNKNOWN, _MAX_UNKNOWN_LENGTH = 10, 40
_FROM_SAMPLING_PARAMS = {field.name for field in fields(SamplingParams) if field.init} - {*OTHER_TYPES}
Listed = Annotated[list[T], Field(fail_fast=True)]  # one error, not one for each wrong element
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_LENGTH)]
_MAX_LOCATION_LENGTH = 200
_TYPE_ERRORS = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    **dict.fromkeys(("dict_type", "model_type"), "an object"),
}
_TYPES: dict[Any, str] = {  # pydantic's names of the types that a field may have
    "str": "a string",
    "list[str]": "an array of strings",
    "list[int]": "an array of integers",
    "list[list[int]]": "an array of arrays of integers",
    "dict[str,any]": "an object",
    "list[dict[str,any]]": "an array of objects",
}
MAX_ID_LENGTH = 256  # characters of a request's id
GeneratingPath = Literal["/v1/completions", "/v1/chat/completions"]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None

    @property
    def parts(self) -> int:
        """Estimated cost of preparing it: the texts and messages in its lists; 64 numbers count as one."""
        lists = [each for name in _TEXTS if isinstance(each := getattr(self, name, None), list)]
        texts = [each for each in lists if not (each and isinstance(each[0], int))]  # no prompt of token ids
        numbers = [getattr(self, name, None) or () for name in _NUMBERS]
        return sum(map(len, texts)) + sum(map(len, numbers)) // 64


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool = False
    continuous_usage_stats: bool = False


if TYPE_CHECKING:

    class SamplingFields(Body):
        """The fields of `SamplingParams` that are read by name here."""

        n: int | None = None
        prompt_logprobs: int | None = None
        skip_special_tokens: bool | None = None

else:
    _KINDS = get_type_hints(SamplingParams, localns={"Sequence": Listed}, include_extras=True)
    _FIELDS = {
        each.name: (_KINDS[each.name] | None, None)
        for each in fields(SamplingParams)
        if each.name in _FROM_SAMPLING_PARAMS
    }
    SamplingFields = create_model("SamplingFields", __base__=Body, **_FIELDS)


class Generation(SamplingFields):
    """Fields that completions and chat completions share: `SamplingParams`, with other types for `OTHER_TYPES`."""

    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Salt | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None  # the others are names of fields of `structured_outputs`
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    priority: int | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def length_field(self) -> str:
        """The field that limits the output."""
        return "max_tokens"

    ends_at_context: ClassVar[bool] = False  # a limit of the output beyond the context is no error

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of an output that the body asks for; None: as many as fit."""
        return getattr(self, self.length_field)  # type: ignore[no-any-return]


class Completion(Generation):
    """`POST /v1/completions`."""

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatFields(Body):
    """Fields of requests that render a conversation."""

    tools: Listed[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def begins_message(self) -> bool:
        """Whether the prompt ends with the beginning of an assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        return dict(self.chat_template_kwargs or {})


class ChatCompletion(ChatFields, Generation):
    """`POST /v1/chat/completions`."""

    messages: Listed[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    documents: Listed[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template; as in vLLM, an effort says whether the model is to think."""
        variables, effort = super().template_variables, self.reasoning_effort
        if effort is not None:
            variables = {"enable_thinking": effort != "none", **variables, "reasoning_effort": effort}
        return variables if self.documents is None else {**variables, "documents": self.documents}

    @property
    def echoed(self) -> str:
        """The text before the answer in its message: as in vLLM, that of the last message if both are one's."""
        last = self.messages[-1] if self.messages and self.echo else {}
        content = last.get("content")
        if not content or (self.begins_message and last.get("role") != "assistant"):
            return ""
        return content if isinstance(content, str) else "\n".join(part["text"] for part in content)

    @property
    def length_field(self) -> str:
        """The field that limits the output; `max_tokens` is its old name."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class TranslatedChat(ChatCompletion):
    """A request of another API as a chat completion; an output that reaches the end of the context ends there."""

    ends_at_context = True


class Tokenize(ChatFields):
    """`POST /tokenize`: a text, or a conversation."""

    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class LoadAdapter(Body):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str


class UnloadAdapter(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str


class Detokenize(Body):
    """`POST /detokenize`."""

    tokens: Listed[int]


B = TypeVar("B", bound=Body)


def without_large_parts(body: B) -> B:
    """Return a copy without the fields of unbounded size."""
    unset = dict.fromkeys(_LARGE & type(body).model_fields.keys())
    slim = body.model_copy(update=unset)
    slim.__pydantic_extra__ = {}
    return slim


def for_log(names: Iterable[str]) -> tuple[str, ...]:
    """Return the first names of unknown fields, cut and escaped for a log."""
    return tuple(ascii(name[:_MAX_UNKNOWN_LENGTH])[1:-1] for name in islice(names, _MAX_UNKNOWN))


class BodyProblem(NamedTuple):
    """What is wrong with a body."""

    message: str
    param: str | None  # such as `stop[1]`
    code: str


def problem_of(error: ValidationError) -> BodyProblem:
    """Return the first error of a body.

    A field of several types has one error for each: that of the type that fits furthest counts, or all types are named.
    """
    errors = error.errors(include_url=False)
    field = errors[0]["loc"][:1]
    errors = [each for each in errors if each["loc"][:1] == field]
    located = [(tuple(key for key in each["loc"] if not _is_type(key)), each) for each in errors]
    location, first = max(located, key=lambda pair: (len(pair[0]), [key for key in pair[0] if isinstance(key, int)]))
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in location).removeprefix(".")
    path = path[:_MAX_LOCATION_LENGTH]
    types = list(dict.fromkeys(_type_of(each) for keys, each in located if keys == location))
    if first["type"] == "missing":
        message = f"{path} is required"
    elif None in types:
        message = f"{path}: {first['msg']}" if path else first["msg"]
    else:
        expected = " or ".join(filter(None, (", ".join(map(str, types[:-1])), types[-1])))
        message = f"{path or 'the body'} must be {expected}, got {shown(first['input'])}"
    return BodyProblem(message, path or None, first["type"])


def _is_type(key: int | str) -> bool:
    """Whether a part of an error's location names a type of the field, as pydantic does for a field of several."""
    return key in _TYPES or (isinstance(key, str) and key.startswith("literal["))


def _type_of(error: Any) -> str | None:
    """Return the type that an error asks for, in JSON's words; None for an error of another kind."""
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    return _TYPES.get(error["loc"][-1] if error["loc"] else None) or _TYPE_ERRORS.get(error["type"])


def sampling_params(
    body: Generation, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, **others: Any
) -> SamplingParams:
    """Return the sampling parameters of a request, with `defaults` for null; raises `ArgumentError`."""
    requested = {
        name: value for name in _FROM_SAMPLING_PARAMS - set(others) if (value := getattr(body, name)) is not None
    }
    return replace(
        defaults, **requested, logit_bias=_logit_bias(body), max_tokens=max_tokens, logprobs=logprobs, **others
    )


def _logit_bias(body: Generation) -> dict[int, float] | None:
    if body.logit_bias is None:
        return None
    try:
        return {int(token): value for token, value in body.logit_bias.items()}
    except ValueError:
        raise ArgumentError(f"logit_bias must name token ids, got {list(body.logit_bias)[:5]}") from None
