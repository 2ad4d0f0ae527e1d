"""Bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, and what they are as chat completions."""

from __future__ import annotations

import json
from typing import Any

from graphdecode.errors import shown
from graphdecode.server.http import HttpError
from graphdecode.server.protocol import Body, Listed, TranslatedChat
from graphdecode.server.translation import Turns, parts_of, string_in, translated, unsupported

_BILLING = "x-anthropic-billing-header:"  # begins a block that is no instruction, and that differs between requests
_TEXT_ONLY = "only text models are served"


class CountTokens(Body):
    """`POST /v1/messages/count_tokens`."""

    messages: Listed[dict[str, Any]]
    system: str | Listed[dict[str, Any]] | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    @property
    def parts(self) -> int:
        """See `Body.parts`."""
        contents = (message.get("content") for message in self.messages)
        return super().parts + sum(len(content) for content in contents if isinstance(content, list))

    @property
    def omits_thinking(self) -> bool:
        """Whether thinking blocks come without their text."""
        return (self.thinking or {}).get("display") == "omitted"

    def as_chat(self, **others: Any) -> TranslatedChat:
        """Return the chat completion that this asks for, with `others` of its fields; raises `HttpError`."""
        turns = Turns()
        for where, block in parts_of(self.system or [], "system"):
            text = _text_of(where, block)
            if not text.startswith(_BILLING):
                turns.system(text)
        for index, message in enumerate(self.messages):
            _add_message(turns, message, f"messages[{index}]")
        if not turns.messages or not self.messages:
            raise HttpError(400, "messages must have at least one message with content", param="messages")
        fields = {"messages": turns.messages} | _choice(self.tool_choice) | _output(self.output_config) | others
        if self.tools:
            fields["tools"] = [_function(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)]
        last = turns.messages[-1]
        if last["role"] == "assistant" and not last.get("tool_calls"):
            fields["continue_final_message"] = True
        return translated(fields | _thinking(self.thinking) | {"model": self.model})


class Messages(CountTokens):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: Listed[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    def as_chat(self, **others: Any) -> TranslatedChat:
        """See `CountTokens.as_chat`."""
        if self.max_tokens < 1:
            raise HttpError(400, f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens")
        sampling = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")}
        return super().as_chat(stop=self.stop_sequences, **sampling, **others)


def _add_message(turns: Turns, message: dict[str, Any], where: str) -> None:
    role, blocks = message.get("role"), list(parts_of(message.get("content"), f"{where}.content"))
    if role == "assistant":
        for place, block in blocks:
            _add_of_assistant(turns, block, place)
    elif role == "user":
        results = [pair for pair in blocks if pair[1]["type"] == "tool_result"]
        for place, block in results:  # they follow the calls, whatever else the user says
            turns.result(str(block.get("tool_use_id")), _result_text(block, place))
        for pair in blocks:
            if pair not in results:
                turns.user(_text_of(*pair))
    elif role == "system":
        for place, block in blocks:
            turns.system(_text_of(place, block))
    else:
        raise HttpError(
            400, f"{where}.role must be user, assistant or system, got {shown(role)}", param=f"{where}.role"
        )


def _add_of_assistant(turns: Turns, block: dict[str, Any], where: str) -> None:
    match block["type"]:
        case "thinking":
            turns.reasoning(string_in(block, "thinking", where))
        case "redacted_thinking":
            pass  # it cannot be read
        case "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise HttpError(400, f"{where}.input must be an object, got {shown(arguments)}", param=f"{where}.input")
            name = string_in(block, "name", where)
            turns.call(str(block.get("id")), name, json.dumps(arguments, ensure_ascii=False))
        case _:
            turns.content(_text_of(where, block))


def _text_of(where: str, block: dict[str, Any]) -> str:
    if block["type"] == "text":
        return string_in(block, "text", where)
    source = block.get("source")
    if block["type"] == "document" and isinstance(source, dict) and source.get("type") == "text":
        title = block.get("title")
        return f"{title}\n\n{string_in(source, 'data', where)}" if title else string_in(source, "data", where)
    raise unsupported("a block of the type", block["type"], _TEXT_ONLY, where)


def _result_text(block: dict[str, Any], where: str) -> str:
    """Return the text of a tool's result; templates have no other sign of an error than its text."""
    content = block.get("content")
    parts = parts_of("" if content is None else content, f"{where}.content")
    text = "\n".join(_text_of(*each) for each in parts)
    return f"Error: {text}" if block.get("is_error") is True else text


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool as a function of a chat; raises `HttpError` for one that a server would have to run."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        why = "the server runs no tools; describe one of your own by a name and an input_schema"
        raise unsupported("the tool", str(kind), why, where)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise HttpError(
            400, f"{where}.input_schema must be an object, got {shown(schema)}", param=f"{where}.input_schema"
        )
    function = {"name": string_in(tool, "name", where), "description": tool.get("description"), "parameters": schema}
    function["strict"] = tool.get("strict")
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a chat for a `tool_choice`."""
    if choice is None:
        return {}
    kind = choice.get("type")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    choices = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    if not isinstance(kind, str) or kind not in choices:
        message = f"tool_choice.type must be auto, any, tool or none, got {shown(kind)}"
        raise HttpError(400, message, param="tool_choice.type")
    return {
        "tool_choice": choices[kind],
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") is True else None,
    }


def _thinking(thinking: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a chat for `thinking`; left out, the template decides."""
    if thinking is None:
        return {}
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive", "between_tools"):
        message = f"thinking.type must be enabled, adaptive or disabled, got {shown(kind)}"
        raise HttpError(400, message, param="thinking.type")
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": kind != "disabled"}}
    if kind != "enabled":
        return fields
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        message = f"thinking.budget_tokens must be an integer of at least 1, got {shown(budget)}"
        raise HttpError(400, message, param="thinking.budget_tokens")
    return fields | {"thinking_token_budget": budget}


def _output(config: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a chat for an `output_config`."""
    config = config or {}
    written, effort = config.get("format"), config.get("effort")
    fields: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if written is None:
        return fields
    schema = written.get("schema") if isinstance(written, dict) and written.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        where = "output_config.format"
        raise HttpError(400, f"{where} must be a json_schema with a schema, got {shown(written)}", param=where)
    wrapped = {"name": "output", "schema": schema}
    return fields | {"response_format": {"type": "json_schema", "json_schema": wrapped}}
