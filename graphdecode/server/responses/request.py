"""The body of `POST /v1/responses`, and what it is as a chat completion."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from graphdecode.errors import shown
from graphdecode.server.http import HttpError
from graphdecode.server.protocol import Body, Listed, TranslatedChat
from graphdecode.server.translation import Turns, parts_of, string_in, translated, unsupported

_SEALED = "graphdecode:"  # begins the thoughts that clients keep as `encrypted_content`
_ENCRYPTED, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
_INCLUDABLE = {  # the others are of tools that are not run here
    *(_ENCRYPTED, _LOGPROBS, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
}
_TEXT_ONLY = "only text models are served"
_NO_TOOLS = "the server runs no tools; describe one of your own as a function"
_ID_PREFIXES = {
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}

Item = dict[str, Any]


class CallableTool(NamedTuple):
    """A tool that the model calls as a function of a chat."""

    name: str
    namespace: str | None = None  # of tools that it is one of
    is_custom: bool = False  # its input is a text, the one argument of the function


class Responses(Body):
    """`POST /v1/responses`."""

    input: str | Listed[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: Listed[str] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def references(self) -> list[str]:
        """Ids of stored items that the input refers to."""
        items = self.input if isinstance(self.input, list) else []
        return [str(item.get("id")) for item in items if _kind_of(item) == "item_reference"]

    @property
    def wants_encrypted(self) -> bool:
        """Whether thoughts come in a form that clients keep and send back, too."""
        return _ENCRYPTED in (self.include or ())

    @property
    def wants_summary(self) -> bool:
        """Whether clients show the summary of a thought: models write none, so that it is the thought itself."""
        reasoning = self.reasoning or {}
        return (reasoning.get("summary") or reasoning.get("generate_summary")) is not None

    def items(self, referred: Mapping[str, Item]) -> list[Item]:
        """Return the input as items that have ids, as they are stored."""
        if isinstance(self.input, str):
            return [_with_id({"role": "user", "content": self.input})]
        items = (referred.get(str(item.get("id")), item) if item.get("id") else item for item in self.input)
        return [_with_id(item) for item in items]

    def callable_tools(self) -> dict[str, CallableTool]:
        """Return the tools that are no plain functions, by the names of theirs; raises `HttpError` for a wrong one."""
        return {name: each for name, each, _ in _flat(self.tools or []) if each != CallableTool(name)}

    def as_chat(self, items: Sequence[Item]) -> TranslatedChat:
        """Return the chat completion that this asks for, after `items` of input; raises `HttpError`."""
        turns = Turns()
        if self.instructions:
            turns.system(self.instructions)
        for index, item in enumerate(items):
            _add_item(turns, item, f"input[{index}]")
        if not turns.messages:
            raise HttpError(400, "input must have at least one item", param="input")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= 20:
            message = f"top_logprobs must be an integer in 0..20, got {self.top_logprobs}"
            raise HttpError(400, message, param="top_logprobs")
        for name in self.include or ():
            if name not in _INCLUDABLE:
                allowed = ", ".join(sorted(_INCLUDABLE))
                raise HttpError(400, f"include must have some of {allowed}, got {shown(name)}", param="include")
        names = ("parallel_tool_calls", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "model")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        fields |= {"messages": turns.messages, "max_tokens": self.max_output_tokens} | self._tool_fields()
        fields["reasoning_effort"] = (self.reasoning or {}).get("effort")
        fields["response_format"] = _response_format((self.text or {}).get("format"))
        if self.truncation == "auto":
            fields["truncate_prompt_tokens"] = -1
        if _LOGPROBS in (self.include or ()):
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return translated(fields)

    def _tool_fields(self) -> dict[str, Any]:
        functions = {name: function for name, _, function in _flat(self.tools or [])}
        choice: Any = self.tool_choice
        if isinstance(choice, dict):
            kind = choice.get("type")
            if kind == "allowed_tools":
                allowed = [_named(each) for each in choice.get("tools") or [] if isinstance(each, dict)]
                functions = {name: function for name, function in functions.items() if name in allowed}
                choice = choice.get("mode")
            elif kind in ("function", "custom"):
                choice = {"type": "function", "function": {"name": _named(choice)}}
            else:
                raise unsupported("the choice", str(kind), _NO_TOOLS, "tool_choice")
        tools = [{"type": "function", "function": function} for function in functions.values()]
        return {"tools": tools or None, "tool_choice": choice}

    def echo(self) -> dict[str, Any]:
        """Return the fields of a response that repeat its request."""
        reasoning, text = self.reasoning or {}, self.text or {}
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {name: reasoning.get(name) for name in ("effort", "summary")},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }


def sealed(thought: str) -> str:
    """Return a thought as clients keep it and send it back; it is no secret of theirs, and only encoded."""
    return _SEALED + base64.b64encode(thought.encode("utf-8", "replace")).decode()


def _unsealed(sealed_thought: Any) -> str:
    """Return a thought that came back; empty for another server's."""
    if not isinstance(sealed_thought, str) or not sealed_thought.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(sealed_thought.removeprefix(_SEALED)).decode()
    except ValueError:
        return ""


def _kind_of(item: Item) -> str:
    kind = item.get("type")
    return str(kind) if kind is not None else "message" if "role" in item else "item_reference"


def _with_id(item: Item) -> Item:
    """Return an item as responses list it: with its type and id, a message's content as parts."""
    kind = _kind_of(item)
    item_id = item.get("id")
    if not isinstance(item_id, str):
        item_id = f"{_ID_PREFIXES.get(kind, 'msg')}_{uuid.uuid4().hex}"
    given: Item = {"type": kind, **item, "id": item_id}
    if kind == "message" and isinstance(item.get("content"), str):
        if item.get("role") == "assistant":
            part = {"type": "output_text", "text": item["content"], "annotations": []}
            return {**given, "content": [part], "status": "completed"}
        given["content"] = [{"type": "input_text", "text": item["content"]}]
    return given


def _add_item(turns: Turns, item: Item, where: str) -> None:
    kind = _kind_of(item)
    match kind:
        case "message":
            _add_message(turns, item, where)
        case "reasoning":
            turns.reasoning(_thought_of(item))
        case "function_call":
            turns.call(str(item.get("call_id")), _named(item), string_in(item, "arguments", where))
        case "custom_tool_call":
            arguments = json.dumps({"input": string_in(item, "input", where)}, ensure_ascii=False)
            turns.call(str(item.get("call_id")), _named(item), arguments)
        case "function_call_output" | "custom_tool_call_output":
            parts = parts_of(item.get("output"), f"{where}.output", text_type="input_text")
            turns.result(str(item.get("call_id")), "\n".join(_text_of(*each) for each in parts))
        case _:
            raise unsupported("an item of the type", kind, "the server runs no tools", where)


def _add_message(turns: Turns, item: Item, where: str) -> None:
    role = item.get("role")
    adds = {"assistant": turns.content, "user": turns.user, "system": turns.system, "developer": turns.system}
    if not isinstance(role, str) or role not in adds:
        where, roles = f"{where}.role", ", ".join(adds)
        raise HttpError(400, f"{where} must be one of {roles}, got {shown(role)}", param=where)
    for place, part in parts_of(item.get("content"), f"{where}.content", text_type="input_text"):
        adds[role](_text_of(place, part))


def _text_of(where: str, part: Item) -> str:
    if part["type"] in ("input_text", "output_text", "text"):
        return string_in(part, "text", where)
    if part["type"] == "refusal":
        return string_in(part, "refusal", where)
    raise unsupported("a part of the type", part["type"], _TEXT_ONLY, where)


def _thought_of(item: Item) -> str:
    """Return the text of a reasoning item: its content, what a client kept of it, or its summary."""
    texts = [
        "\n".join(str(part.get("text", "")) for part in item.get(name) or [] if isinstance(part, dict))
        for name in ("content", "summary")
    ]
    return texts[0] or _unsealed(item.get("encrypted_content")) or texts[1]


def _named(tool: Mapping[str, Any]) -> str:
    """Return the function's name of a tool, a call or a choice; those of a namespace have it before theirs."""
    name, namespace = str(tool.get("name")), tool.get("namespace")
    return f"{namespace}__{name}" if namespace else name


def _flat(tools: Sequence[Item]) -> Iterator[tuple[str, CallableTool, dict[str, Any]]]:
    """Yield the tools that can be called, those of namespaces too, each with its function of a chat."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "namespace":
            yield _function(tool, None, where)
            continue
        namespace = string_in(tool, "name", where)
        for place, part in parts_of(tool.get("tools"), f"{where}.tools", text_type="function"):
            yield _function(part, namespace, place)


def _function(tool: Item, namespace: str | None, where: str) -> tuple[str, CallableTool, dict[str, Any]]:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom"):
        raise unsupported("the tool", str(kind), _NO_TOOLS, where)
    name = string_in(tool, "name", where)
    called = CallableTool(name, namespace, is_custom=kind == "custom")
    function = {"name": _named({"name": name, "namespace": namespace}), "description": tool.get("description")}
    if called.is_custom:
        function |= {"parameters": _custom_parameters(tool.get("format"))}
    else:
        function |= {"parameters": tool.get("parameters"), "strict": tool.get("strict")}
    return str(function["name"]), called, {each: value for each, value in function.items() if value is not None}


def _custom_parameters(written: Any) -> dict[str, Any]:
    """Return the parameters of a custom tool: its input, with the form that it is to have as a description."""
    text: dict[str, Any] = {"type": "string"}
    if isinstance(written, dict) and written.get("type") == "grammar":
        text["description"] = f"A text of this {written.get('syntax')} grammar:\n{written.get('definition')}"
    return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


def _response_format(written: Any) -> dict[str, Any] | None:
    if written is None:
        return None
    kind = written.get("type") if isinstance(written, dict) else None
    if kind == "json_schema":
        return {"type": kind, "json_schema": {name: value for name, value in written.items() if name != "type"}}
    if kind not in ("text", "json_object"):
        message = f"text.format.type must be text, json_object or json_schema, got {shown(kind)}"
        raise HttpError(400, message, param="text.format.type")
    return {"type": kind}
