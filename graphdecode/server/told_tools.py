"""Tools for models whose chat template has no place for them: a message tells of them, and calls are bare JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from graphdecode.server.tool_calls import ToolFormat

BARE_JSON = ToolFormat("json", "", "", "")
_SHAPE = '{"name": "...", "arguments": {...}}'


def told_messages(
    messages: Sequence[Any], tools: Sequence[Mapping[str, Any]] | None, choice: Any, *, to_user: bool = False
) -> list[Any]:
    """Return a conversation that says which tools there are, if any, in messages that every template knows.

    Earlier calls become the words of the assistant that they were, and what tools returned comes from the user.

    Args:
        messages: in OpenAI's form; what is malformed is left for whoever reads them.
        tools: likewise; without any nothing is told of them.
        choice: the request's `tool_choice`.
        to_user: tell it in the first message of the user, for templates without a system's.
    """
    said = _in_words(messages)
    if not tools:
        return said
    told = _instructions(tools, choice)
    role = "user" if to_user else "system"
    place = next((n for n, each in enumerate(said) if isinstance(each, Mapping) and each.get("role") == role), None)
    if place is None or (not to_user and place > 0):
        return [{"role": role, "content": told}, *said]
    return [*said[:place], {**said[place], "content": _joined(told, said[place].get("content"))}, *said[place + 1 :]]


def _instructions(tools: Sequence[Mapping[str, Any]], choice: Any) -> str:
    functions = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    must = "Call one of them."
    if isinstance(choice, Mapping):
        function = choice.get("function")
        must = f"Call {function.get('name')}." if isinstance(function, Mapping) else must
    elif choice != "required":
        must = "Where none of them helps, answer in words."
    how = f"To call one, answer with nothing but JSON of the form {_SHAPE}."
    return f"You can call these functions, given with the JSON schemas of their parameters:\n{functions}\n{how} {must}"


def _in_words(messages: Sequence[Any]) -> list[Any]:
    said: list[Any] = []
    names: dict[Any, Any] = {}  # of the functions, by the number of their call
    follows_result = False
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        is_result = isinstance(message, Mapping) and message.get("role") in ("tool", "function")
        if isinstance(calls, list) and calls and all(map(_is_call, calls)):
            names |= {_key(call.get("id")): call["function"]["name"] for call in calls}
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            said.append({**rest, "content": _joined(message.get("content") or "", "\n".join(map(_as_json, calls)))})
        elif is_result:
            name = message.get("name") or names.get(_key(message.get("tool_call_id"))) or "the function"
            result = _joined(f"{name} returned:", message.get("content"))
            if follows_result:
                result = _joined(said.pop()["content"], result)
            said.append({"role": "user", "content": result})
        else:
            said.append(message)
        follows_result = is_result
    return said


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _as_json(call: Mapping[str, Any]) -> str:
    name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(name)}, "arguments": {written}}}'


def _key(call_id: Any) -> str:
    return str(call_id)


def _joined(first: Any, second: Any) -> Any:
    """Return two contents as one; each may be a text or a list of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}" if first and second else first + second
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)]
    return [*parts[0], *parts[1]] if all(isinstance(each, list) for each in parts) else (second or first)
