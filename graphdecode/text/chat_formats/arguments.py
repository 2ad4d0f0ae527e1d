"""Readers of a call's arguments, in each syntax; what they find is passed on as JSON, piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from graphdecode.text.chat_formats.chat_format import (
    ArgumentSyntax,
    LiteralArguments,
    TaggedArguments,
)
from graphdecode.text.chat_formats.schemas import TYPES, property_schema, types_of, value_types
from graphdecode.text.chat_formats.source import NoCallError, Reading, Sink, TextSource, words

_MAX_DEPTH, _MAX_NAME = 64, 256
_MARKS = re.compile(r'[{}\[\]"]')  # between JSON values
_IN_TEXT = re.compile(r'["\\]')
_SCALAR_ENDS = (",", "}", "]", ")", ":", " ", "\n", "\t", "\r")
_CONSTANTS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def read_arguments(
    source: TextSource,
    syntax: ArgumentSyntax,
    ending: str,
    schema: Mapping[str, Any],
    sink: Sink,
    *,
    is_constrained: bool,
) -> Reading[None]:
    """Read arguments up to `ending`, which is read too if they are literals; raises NoCallError.

    `schema`: of the function's parameters; `is_constrained`: what begins as JSON is JSON.
    """
    if isinstance(syntax, LiteralArguments):
        yield from _members(source, syntax, ending.strip(), syntax.assign, sink, 0)
    elif isinstance(syntax, TaggedArguments):
        yield from _tagged(source, syntax, ending, schema, sink, is_constrained)
    else:
        if (yield from source.space()) != "{":
            raise NoCallError
        yield from json_value(source, sink)


def is_json(text: str) -> bool:
    """Return whether it is JSON whose numbers are finite."""
    try:
        json.dumps(json.loads(text), allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def _is_value(text: str) -> bool:
    """Return whether it is JSON, with numbers of any size."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (NoCallError, ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise NoCallError(name)


def json_value(source: TextSource, sink: Sink) -> Reading[None]:
    """Pass on the JSON value that comes next, up to where it ends by its brackets; raises NoCallError."""
    first = yield from source.space()
    if first not in ("{", "[", '"'):
        stop = yield from source.until(_SCALAR_ENDS, sink)
        if not stop and not first:
            raise NoCallError
        return
    depth, in_text = 0, False
    while True:
        if (yield from source.peek()) == "":
            raise NoCallError
        match = (_IN_TEXT if in_text else _MARKS).search(source.text, source.at)
        end = len(source.text) if match is None else match.end()
        sink(source.text[source.at : end])
        source.at = end
        if match is None:
            continue
        mark = match[0]
        if mark == "\\":
            sink((yield from source.peek()))
            source.at = min(source.at + 1, len(source.text))
        elif mark == '"':
            in_text = not in_text
        elif not in_text:
            depth += 1 if mark in "{[" else -1
        if depth <= 0 and not in_text:
            return


def text_of(source: TextSource, stops: str, sink: Sink) -> Reading[None]:
    """Pass on a name, up to a space or one of some characters."""
    length = 0

    def counted(piece: str) -> None:
        nonlocal length
        length += len(piece)
        if length > _MAX_NAME:
            raise NoCallError
        sink(piece)

    yield from source.until([*stops, " ", "\n", "\t", "\r"], counted)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _tagged(
    source: TextSource,
    syntax: TaggedArguments,
    ending_marker: str,
    schema: Mapping[str, Any],
    sink: Sink,
    is_constrained: bool,
) -> Reading[None]:
    opening, ending = words(syntax.opening)[0], words(ending_marker)[0]
    named, named_json = words(syntax.named), words(syntax.named_json)
    is_first = True
    sink("{")
    while (yield from source.first_of([opening, ending])) == opening:
        yield from source.marker(syntax.opening)
        key: list[str] = []
        yield from text_of(source, named[0][0], key.append)
        is_text: bool | None = None
        if named_json:
            shared = next(n for n, pair in enumerate(zip(named, named_json, strict=False)) if len(set(pair)) > 1)
            yield from source.marker(" ".join(named[:shared]))
            is_text = (yield from source.first_of([named[shared], named_json[shared]])) == named[shared]
            yield from source.marker(" ".join((named if is_text else named_json)[shared:]))
        else:
            yield from source.marker(syntax.named)
        name = "".join(key)
        if not name:
            raise NoCallError
        sink(("" if is_first else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        is_first = False
        if is_text is None:
            types = types_of(property_schema(schema, name), schema)
        else:
            types = frozenset({"string"}) if is_text else TYPES - {"string"}
        yield from _tagged_value(source, syntax, (opening, ending), types, sink, is_constrained)
    if not (yield from source.first_of([ending])):
        raise NoCallError
    sink("}")


def _tagged_value(
    source: TextSource,
    syntax: TaggedArguments,
    next_words: tuple[str, str],
    types: frozenset[str],
    sink: Sink,
    is_constrained: bool,
) -> Reading[None]:
    """Read a value of some types: a text as it is, another one as JSON."""
    if syntax.named.endswith("\n"):
        yield from source.literal("\n")
    if types == {"string"}:
        sink('"')
        yield from _until_closed(source, syntax, next_words, lambda piece: sink(_escaped(piece)))
        sink('"')
        return
    pieces: list[str] = []
    if (is_constrained or "string" not in types) and (yield from source.peek()) in ("{", "["):
        yield from json_value(source, pieces.append)  # its texts may have the closing marker
    yield from _until_closed(source, syntax, next_words, pieces.append)
    text = "".join(pieces)
    value = _CONSTANTS.get(text.strip(), text.strip())
    is_value = _is_value(value)
    if is_value and "string" in types:
        is_value = bool(value_types(json.loads(value)) & (types - {"string"}))
    sink(value if is_value else json.dumps(text, ensure_ascii=False))


def _until_closed(
    source: TextSource, syntax: TaggedArguments, next_words: tuple[str, str], sink: Sink
) -> Reading[None]:
    """Pass on a value up to its closing marker, which another argument follows or the end of the call."""
    closing = words(syntax.closing)[0]
    strips = syntax.closing.startswith("\n")
    waiting = ""  # a newline that may belong to the closing marker

    def passed(piece: str) -> None:
        nonlocal waiting
        text = waiting + piece
        waiting = "\n" if strips and text.endswith("\n") else ""
        if end := len(text) - len(waiting):
            sink(text[:end])

    while True:
        if not (yield from source.until([closing], passed)):
            raise NoCallError
        source.at += len(closing)
        after: list[str] = []
        yield from _spaces(source, after.append)
        if (yield from source.peek()) == "" or (yield from source.first_of(next_words)):
            return  # the newline that waits is the marker's
        passed(closing + "".join(after))


def _spaces(source: TextSource, sink: Sink) -> Reading[None]:
    while (yield from source.peek()).isspace():
        sink(source.text[source.at])
        source.at += 1


def _members(
    source: TextSource, syntax: LiteralArguments, closing: str, assign: str, sink: Sink, depth: int
) -> Reading[None]:
    """Read names and values up to a closing text, which is read too."""
    if depth > _MAX_DEPTH:
        raise NoCallError
    is_first = True
    sink("{")
    while not (yield from source.first_of([closing])):
        if not is_first:
            yield from source.marker(",")
            sink(", ")
            if (yield from source.first_of([closing])):  # a comma after the last one
                raise NoCallError
        is_first = False
        quote = yield from source.first_of(syntax.quotes)
        if quote:
            source.at += len(quote)
            yield from _quoted(source, syntax, quote, sink)
        else:
            name: list[str] = []
            yield from text_of(source, assign, name.append)
            if not "".join(name):
                raise NoCallError
            sink(json.dumps("".join(name), ensure_ascii=False))
        yield from source.marker(assign)
        sink(": ")
        yield from _literal(source, syntax, sink, depth + 1)
    yield from source.marker(closing)
    sink("}")


def _literal(source: TextSource, syntax: LiteralArguments, sink: Sink, depth: int) -> Reading[None]:
    if depth > _MAX_DEPTH:
        raise NoCallError
    if quote := (yield from source.first_of(syntax.quotes)):
        source.at += len(quote)
        yield from _quoted(source, syntax, quote, sink)
    elif (first := (yield from source.space())) == "{":
        source.at += 1
        yield from _members(source, syntax, "}", ":", sink, depth + 1)
    elif first in ("[", "("):
        source.at += 1
        closing, is_first = "]" if first == "[" else ")", True
        sink("[")
        while not (yield from source.first_of([closing])):
            if not is_first:
                yield from source.marker(",")
                if (yield from source.first_of([closing])):  # as in a tuple of one
                    break
                sink(", ")
            is_first = False
            yield from _literal(source, syntax, sink, depth + 1)
        yield from source.marker(closing)
        sink("]")
    else:
        pieces: list[str] = []
        yield from source.until(_SCALAR_ENDS, pieces.append)
        value = "".join(pieces)
        value = _CONSTANTS.get(value, value)
        if not _is_value(value):
            raise NoCallError
        sink(value)


def _quoted(source: TextSource, syntax: LiteralArguments, quote: str, sink: Sink) -> Reading[None]:
    """Read a text whose opening quote was read."""
    sink('"')
    stops = [quote, "\\"] if syntax.is_escaped else [quote]
    while True:
        stop = yield from source.until(stops, lambda piece: sink(_escaped(piece)))
        if not stop:
            raise NoCallError
        source.at += len(stop)
        if stop == quote:
            break
        yield from _escape(source, sink)
    sink('"')


def _escape(source: TextSource, sink: Sink) -> Reading[None]:
    """Read what follows a backslash."""
    letter = yield from source.peek()
    source.at = min(source.at + 1, len(source.text))
    if letter not in _HEX_DIGITS:
        sink(_escaped(_ESCAPES.get(letter, letter if letter in "\"'\\/" else "\\" + letter)))
        return
    digits = ""
    while len(digits) < _HEX_DIGITS[letter]:
        digit = yield from source.peek()
        if digit not in "0123456789abcdefABCDEF" or not digit:
            raise NoCallError
        digits += digit
        source.at += 1
    code = int(digits, 16)
    if code > 0x10FFFF:
        raise NoCallError
    sink(f"\\u{code:04x}" if code < 0x10000 else _escaped(chr(code)))  # halves of a pair are joined as in JSON
