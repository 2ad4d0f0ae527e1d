"""Tools in prompts: descriptions of functions, calls and results as messages, for templates without tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphdecode.text.chat_formats.chat_format import CallSyntax

_SHAPE = '{"name": "...", "arguments": {...}}'


def messages_with_tools(
    messages: Sequence[Any], tools: Sequence[Mapping[str, Any]] | None, choice: Any, *, to_user: bool = False
) -> list[Any]:
    """Describe tools in messages, for templates without tools; calls become content, results become user messages.

    `choice` is the request's `tool_choice`. `to_user`: in the user's first message, for templates without system
    messages.
    """
    converted = _without_tools(messages)
    if not tools:
        return converted
    functions = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    must = "Call one of them." if choice == "required" else "Where none of them helps, answer in words."
    if (name := function_name(choice)) is not None:
        must = f"Call {name}."
    description = (
        f"You can call these functions, given with the JSON schemas of their parameters:\n{functions}\n"
        f"To call one, answer with nothing but JSON of the form {_SHAPE}. {must}"
    )
    role = "user" if to_user else "system"
    index = next(
        (n for n, each in enumerate(converted) if isinstance(each, Mapping) and each.get("role") == role), None
    )
    if index is None or (not to_user and index > 0):
        return [{"role": role, "content": description}, *converted]
    converted[index] = {**converted[index], "content": _joined(description, converted[index].get("content"))}
    return converted


def messages_with_system_tools(
    messages: Sequence[Any], tools: Sequence[Mapping[str, Any]] | None, calls: CallSyntax
) -> list[Any]:
    """Put tools into the system message, for templates that show them there, and no calls and results."""

    def written(items: list[str]) -> str:
        return f"{calls.opening}[{calls.separator.join(items)}]{calls.closing}"

    converted = _without_tools(messages, written)
    if not tools:
        return converted
    functions = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if not converted or not isinstance(converted[0], Mapping) or converted[0].get("role") != "system":
        converted = [{"role": "system", "content": ""}, *converted]
    return [{**converted[0], "tools": functions}, *converted[1:]]


def _without_tools(messages: Sequence[Any], as_text: Callable[[list[str]], str] = "\n".join) -> list[Any]:
    converted: list[Any] = []
    names: dict[Any, Any] = {}  # function names by call id
    follows_result = False
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        is_result = isinstance(message, Mapping) and message.get("role") in ("tool", "function")
        if isinstance(calls, list) and calls and None not in map(function_name, calls):
            names |= {str(call.get("id")): function_name(call) for call in calls}
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            written = [
                f'{{"name": {json.dumps(function["name"])}, "arguments": {_arguments_text(function)}}}'
                for function in (call["function"] for call in calls)
            ]
            converted.append({**rest, "content": _joined(message.get("content") or "", as_text(written))})
        elif is_result:
            name = message.get("name") or names.get(str(message.get("tool_call_id"))) or "the function"
            result = _joined(f"{name} returned:", message.get("content"))
            if follows_result:
                result = _joined(converted.pop()["content"], result)
            converted.append({"role": "user", "content": result})
        else:
            converted.append(message)
        follows_result = is_result
    return converted


def function_name(tool: Any) -> str | None:
    """Return the function's name of a tool, a call or a `tool_choice`; None if there is none."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _arguments_text(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _joined(first: Any, second: Any) -> Any:
    """Return two contents as one; each may be a text or a list of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}" if first and second else first + second
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)]
    return [*parts[0], *parts[1]] if all(isinstance(each, list) for each in parts) else (second or first)
