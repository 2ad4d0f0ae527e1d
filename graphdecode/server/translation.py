"""Translation of other APIs' requests to chat completions: their parts, and the turns that these make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from graphdecode.errors import shown
from graphdecode.server.http import HttpError
from graphdecode.server.protocol import TranslatedChat, problem_of


class Turns:
    """Chat messages, put together from parts in their order.

    What follows itself is joined, as templates expect: systems' texts at the beginning, a user's, and an assistant's
    thoughts, texts and calls. A system's text behind the beginning, which most templates refuse, is a user's.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def system(self, text: str) -> None:
        """Add instructions."""
        is_first = all(message["role"] == "system" for message in self.messages)
        self._add("system" if is_first else "user", text)

    def user(self, text: str) -> None:
        """Add what a user says."""
        self._add("user", text)

    def result(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def reasoning(self, text: str) -> None:
        """Add a thought of the assistant's."""
        message = self._assistant()
        message["reasoning_content"] = _joined(message.get("reasoning_content", ""), text)

    def content(self, text: str) -> None:
        """Add what the assistant says."""
        self._add("assistant", text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of a function, with its arguments in JSON."""
        function = {"name": name, "arguments": arguments}
        self._assistant().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _add(self, role: str, text: str) -> None:
        message = self._last(role)
        message["content"] = _joined(message["content"], text)

    def _assistant(self) -> dict[str, Any]:
        return self._last("assistant")

    def _last(self, role: str) -> dict[str, Any]:
        """Return the last message if it has a role, else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]


def _joined(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first and second else first or second


def translated(fields: dict[str, Any]) -> TranslatedChat:
    """Return the chat completion of some fields; raises `HttpError` for a wrong one."""
    try:
        return TranslatedChat(**fields)
    except ValidationError as error:
        problem = problem_of(error)
        raise HttpError(400, problem.message, param=problem.param, code=problem.code) from None


def parts_of(content: Any, where: str, *, text_type: str = "text") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each part of a content is, and the part; a text alone is one of the type `text_type`.

    Raises `HttpError` for what is no part.
    """
    if isinstance(content, str):
        yield where, {"type": text_type, "text": content}
        return
    if not isinstance(content, list):
        raise HttpError(400, f"{where} must be a string or an array of parts, got {shown(content)}", param=where)
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(part, dict) or not isinstance(part.get("type", text_type), str):
            raise HttpError(400, f"{place} must be an object with a type, got {shown(part)}", param=place)
        yield place, {"type": text_type, **part}


def string_in(part: dict[str, Any], name: str, where: str) -> str:
    """Return a field of a part that must be a string; raises `HttpError`."""
    value = part.get(name)
    if not isinstance(value, str):
        raise HttpError(400, f"{where}.{name} must be a string, got {shown(value)}", param=f"{where}.{name}")
    return value


def unsupported(what: str, kind: str, why: str, where: str) -> HttpError:
    """Return the error for a part of a kind that cannot be served."""
    return HttpError(400, f"{where}: {what} {shown(kind, plain=True)} is not supported: {why}", param=where)
