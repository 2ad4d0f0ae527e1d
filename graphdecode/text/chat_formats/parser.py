"""The parser of outputs: reasoning, content and tool calls, as they come."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graphdecode.text.chat_formats.chat_format import ChatFormat
from graphdecode.text.chat_formats.events import CallArguments, CallEnd, CallStart, Content, ReplyEvent

_MARKS = re.compile(r'[{}\[\]"]')  # between values
_IN_TEXT = re.compile(r'["\\]')
_BETWEEN = "\n; "  # characters between two calls, or after the last one
_ID_LETTERS, _ID_LENGTH = string.ascii_letters + string.digits, 9  # Mistral's templates refuse other ids
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class _Call(NamedTuple):
    """A complete call."""

    name: str
    arguments: str  # JSON, as the model wrote it


class ReplyParser:
    """Parses an output, which comes in pieces, into events; `num_calls` are those begun so far.

    `tools` are the functions that may be called, with the schemas of their parameters; empty: no calls are looked for.
    `in_reasoning`: the prompt ends within the thought. `is_constrained`: a grammar makes the calls, so that their
    arguments come as they are written; else a call comes once it is complete, and what is no call is content.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        *,
        tools: Mapping[str, Mapping[str, Any]],
        in_reasoning: bool = False,
        is_constrained: bool = False,
    ) -> None:
        self._reader = _ToolCallReader(chat_format, frozenset(tools)) if tools else None
        self.num_calls = 0

    def feed(self, text: str, *, final: bool) -> list[ReplyEvent]:
        """Return the events that a piece of the output adds; `final`: it is the last piece."""
        content, calls = (text, list[_Call]()) if self._reader is None else self._reader.feed(text, final=final)
        events: list[ReplyEvent] = [Content(content)] if content else []
        for call in calls:
            index, self.num_calls = self.num_calls, self.num_calls + 1
            call_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
            events += [CallStart(index, call_id, call.name), CallArguments(index, call.arguments), CallEnd(index)]
        return events


class _JsonExtent:
    """Finds the end of a JSON object or array in a text that comes in pieces, in linear time."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._is_escaped = False

    def end(self, piece: str) -> int | None:
        """Return the end in the next piece; None: it goes on."""
        position = 0
        while position < len(piece):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            match = (_IN_TEXT if self._in_text else _MARKS).search(piece, position)
            if match is None:
                return None
            mark, position = match[0], match.end()
            if self._in_text:
                self._is_escaped, self._in_text = mark == "\\", mark != '"'
            elif mark == '"':
                self._in_text = True
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return position
        return None


class _ToolCallReader:
    """Splits an output, which comes in pieces, into content and calls of known names; anything else is content."""

    def __init__(self, tool_format: ChatFormat, names: frozenset[str]) -> None:
        self._format = tool_format
        self._names = names
        self._text = ""  # not yet known to be content or a call
        self._pieces: list[str] = []  # after it, while a call goes on
        self._json_extent: _JsonExtent | None = None  # end of that call's JSON
        self._unclosed: tuple[list[str], int] | None = None  # the calls' JSON and its end, while the closing is missing
        self._is_inside = False  # the text begins like a call
        self._follows_call = False  # a call came last
        self._may_begin = True  # a bare call may begin here: at the beginning, and after another call

    def feed(self, piece: str, *, final: bool) -> tuple[str, list[_Call]]:
        """Return the content and the complete calls that a piece adds."""
        if self._json_extent is not None and not final and self._json_extent.end(piece) is None:
            self._pieces.append(piece)
            return "", []
        self._text = "".join([self._text, *self._pieces, piece])
        self._pieces, self._json_extent = [], None
        content, calls = "", list[_Call]()
        while True:
            if not self._is_inside:
                content += self._content(final)
                if not self._is_inside:
                    return content, calls
            new_calls = self._complete(final)
            if new_calls is None:
                return content, calls
            calls += new_calls
            if not new_calls:  # it only looked like a call
                self._is_inside = self._may_begin = False
                self._unclosed = None
                opening = self._format.opening
                content += self._release(self._text.find(opening) + len(opening) if opening else len(self._text))

    def _content(self, final: bool) -> str:
        """Return content up to the next call, without what may become its beginning."""
        if self._follows_call:
            self._text = self._text.lstrip(_BETWEEN)
            self._follows_call = not self._text
        opening, text = self._format.opening, self._text
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
            held_back = next((n for n in range(len(opening) - 1, 0, -1) if text.endswith(opening[:n])), 0)
            return self._release(len(text[: len(text) - held_back].rstrip()))
        self._is_inside = True
        return self._release(len(text[:at].rstrip()))

    def _release(self, length: int) -> str:
        released, self._text = self._text[:length], self._text[length:]
        return released

    def _complete(self, final: bool) -> list[_Call] | None:
        """Remove calls from the front of the text; None: they are incomplete; empty: there is none."""
        tool_format = self._format
        body = self._text.lstrip()[len(tool_format.opening) :]
        start = len(body) - len(body.lstrip())
        if start == len(body):
            return [] if final else None
        if self._unclosed is None:
            extent = _JsonExtent()
            length = extent.end(body[start:]) if body[start] in "{[" else 0
            if length is None and not final:
                self._json_extent = extent
                return None
            if length is None and body[start] == "[":  # cut within a list
                items, end = _items(body, start)
                return self._calls_of([item for item in items if _is_json(item)], body[end:])
            end = start + (length or 0)
            if not _is_json(body[start:end]):
                return []
            self._unclosed = (_items(body, start)[0] if body[start] == "[" else [body[start:end]]), end
        items, end = self._unclosed
        rest = body[end:].lstrip()
        if tool_format.closing:
            if not rest.startswith(tool_format.closing):
                if not tool_format.closing.startswith(rest):
                    return []
                return self._calls_of(items, "") if final else None  # cut within the closing
            rest = rest[len(tool_format.closing) :]
        return self._calls_of(items, rest)

    def _calls_of(self, items: Sequence[str], rest: str) -> list[_Call]:
        self._unclosed = None
        members = (_members(item) for item in items if item.startswith("{"))
        calls = [call for each in members if (call := _call_of(each)) is not None and call.name in self._names]
        if calls:
            self._text = rest
            self._is_inside, self._follows_call, self._may_begin = False, True, True
        return calls


def _is_json(text: str) -> bool:
    """Return whether it is JSON whose numbers are finite."""
    try:
        json.dumps(json.loads(text), allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _items(text: str, start: int) -> tuple[list[str], int]:
    """Return the items of the JSON array at a place, as they are written, and the end; of one that was cut, its whole
    items, and where the next one begins."""
    items, at = list[str](), _after_space(text, start + 1)
    while at < len(text) and text[at] != "]":
        try:
            _, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return items, at
        items.append(text[at:end])
        at = _after_space(text, end)
        if text.startswith(",", at):
            at = _after_space(text, at + 1)
    return items, at


def _members(text: str) -> dict[str, str]:
    """Return the members of a JSON object, as they are written."""
    members, at = dict[str, str](), _after_space(text, 1)
    while text[at] != "}":
        name, end = _DECODER.raw_decode(text, at)
        start = _after_space(text, text.index(":", end) + 1)
        _, end = _DECODER.raw_decode(text, start)
        members[name] = text[start:end]
        at = _after_space(text, end)
        if text.startswith(",", at):
            at = _after_space(text, at + 1)
    return members


def _call_of(members: Mapping[str, str]) -> _Call | None:
    """Return the call that is written in the members of an object, if it is one."""
    name = json.loads(members.get("name", "null"))
    written = members.get("arguments", members.get("parameters", "{}"))
    arguments = json.loads(written) if written.startswith('"') else written
    return _Call(name, arguments) if isinstance(name, str) else None
