"""Calls of tools in the text of an answer, in the forms that families of models write them in."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

_MARKS = re.compile(r'[{}\[\]"]')  # between values
_IN_TEXT = re.compile(r'["\\]')
_BETWEEN = "\n; "  # what stands between two calls, or behind the last one


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls.

    Attributes:
        name: of the format.
        opening: text before a call, or before a list of calls; "" where an answer that begins with `{` is one.
        closing: text behind it; "" where it ends with its JSON.
        sign: what the chat template of such a model contains.
        is_special: whether `opening` is a special token, which is left out of texts unless asked for.
        arguments: what a call's arguments are called.
    """

    name: str
    opening: str
    closing: str
    sign: str
    is_special: bool = False
    arguments: str = "arguments"


FORMATS = (
    ToolFormat("hermes", "<tool_call>", "</tool_call>", "<tool_call>"),
    ToolFormat("mistral", "[TOOL_CALLS]", "", "[TOOL_CALLS]", is_special=True),
    ToolFormat("granite", "<|tool_call|>", "", "<|tool_call|>", is_special=True),
    ToolFormat("llama", "", "", "<|python_tag|>", arguments="parameters"),
)


class ToolCall(NamedTuple):
    """A call that is complete.

    Attributes:
        name: of the function.
        arguments: JSON, as the model wrote it.
    """

    name: str
    arguments: str

    def as_choice(self, index: int) -> dict[str, Any]:
        """Return it in OpenAI's form.

        Args:
            index: among the calls of the answer.
        """
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def format_of(chat_template: str | None) -> ToolFormat | None:
    """Return the format that a chat template teaches, None where it knows of no tools."""
    return next((form for form in FORMATS if chat_template and form.sign in chat_template), None)


class _Extent:
    """Finds where a JSON object or array ends in a text that comes in pieces, looking at each character once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._is_escaped = False

    def end(self, piece: str) -> int | None:
        """Return behind which character of the next piece it ends; None: not in this one."""
        at = 0
        while at < len(piece):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_TEXT if self._in_text else _MARKS).search(piece, at)
            if found is None:
                return None
            mark, at = found[0], found.end()
            if self._in_text:
                self._is_escaped, self._in_text = mark == "\\", mark != '"'
            elif mark == '"':
                self._in_text = True
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return at
        return None


class ToolCallReader:
    """Takes an answer's text piece by piece, and tells calls from content.

    What looks like a call and is none stays content: nothing that a model wrote is lost.

    Args:
        form: of the calls.
        names: of the tools that there are; a call of another name is content.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._text = ""  # that is neither content nor a call yet
        self._pieces: list[str] = []  # behind it, in which a call that has begun does not end
        self._extent: _Extent | None = None  # of that call, as far as it has come
        self._found: tuple[Any, int] | None = None  # what it says, and where that ends, while its closing is waited for
        self._is_inside = False  # it begins like a call, behind white space
        self._is_behind = False  # a call came last
        self._may_begin = True  # where calls are bare: at the beginning, and behind another call

    def feed(self, piece: str, *, final: bool) -> tuple[str, list[ToolCall]]:
        """Take a piece; return the content and the calls that are complete.

        Args:
            piece: of the text.
            final: nothing follows.
        """
        if self._extent is not None and not final and self._extent.end(piece) is None:
            self._pieces.append(piece)
            return "", []
        self._text = "".join([self._text, *self._pieces, piece])
        self._pieces, self._extent = [], None
        content, calls = "", list[ToolCall]()
        while True:
            if not self._is_inside:
                content += self._content(final)
                if not self._is_inside:
                    return content, calls
            found = self._complete(final)
            if found is None:
                return content, calls
            calls += found
            if not found:
                content += self._no_call()

    def _content(self, final: bool) -> str:
        """Return content up to the next call, holding back what may become its beginning."""
        if self._is_behind:
            self._text = self._text.lstrip(_BETWEEN)
            self._is_behind = not self._text
        opening, text = self._form.opening, self._text
        if not opening:
            self._is_inside = self._may_begin and text.lstrip().startswith("{")
            if self._is_inside or (self._may_begin and not text.strip() and not final):
                return ""
            self._may_begin = False
            return self._release(len(text))
        at = text.find(opening)
        if at < 0 and final:
            return self._release(len(text))
        if at < 0:
            held = next((n for n in range(len(opening) - 1, 0, -1) if text.endswith(opening[:n])), 0)
            return self._release(len(text[: len(text) - held].rstrip()))
        self._is_inside = True
        return self._release(len(text[:at].rstrip()))

    def _release(self, length: int) -> str:
        released, self._text = self._text[:length], self._text[length:]
        return released

    def _no_call(self) -> str:
        """Return as content what looked like the beginning of a call."""
        self._is_inside = self._may_begin = False
        self._found = None
        opening = self._form.opening
        return self._release(self._text.find(opening) + len(opening) if opening else len(self._text))

    def _complete(self, final: bool) -> list[ToolCall] | None:
        """Take calls from the front of the text; None where they are not complete yet, nothing where there is none."""
        form = self._form
        body = self._text.lstrip()[len(form.opening) :]
        start = len(body) - len(body.lstrip())
        if start == len(body):
            return [] if final else None
        if self._found is None:
            extent = _Extent()
            length = extent.end(body[start:]) if body[start] in "{[" else 0
            if length is None and not final:
                self._extent = extent
                return None
            end = start + (length or 0)
            try:
                self._found = json.loads(body[start:end], parse_float=_finite, parse_constant=_no_number), end
            except (ValueError, RecursionError):
                return []
        value, end = self._found
        rest = body[end:].lstrip()
        if form.closing:
            if not rest.startswith(form.closing):
                if not final and form.closing.startswith(rest):
                    return None
                return [] if rest else (self._taken(value, "") if final else None)
            rest = rest[len(form.closing) :]
        return self._taken(value, rest)

    def _taken(self, value: Any, rest: str) -> list[ToolCall]:
        self._found = None
        calls = list(self._calls(value))
        if calls:
            self._text = rest
            self._is_inside, self._is_behind, self._may_begin = False, True, True
        return calls

    def _calls(self, value: Any) -> Iterator[ToolCall]:
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict) or not isinstance(item.get("name"), str):
                continue
            if item["name"] not in self._names:
                continue
            arguments = item.get("arguments", item.get("parameters", {}))
            yield ToolCall(item["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number that JSON could say again")
