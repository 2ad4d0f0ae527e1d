"""What a parser finds in an output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graphdecode.text.chat_formats import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatFormat,
    Content,
    Reasoning,
    ReplyParser,
)


class Reply(NamedTuple):
    reasoning: str = ""
    content: str = ""
    calls: Sequence[tuple[str, Any]] = ()


def replied(
    chat_format: ChatFormat,
    pieces: Sequence[str],
    tools: Mapping[str, Any],
    *,
    checks_json: bool = True,
    **options: Any,
) -> Reply:
    """Return what the parser finds; the events must be in order, and their calls begun before they go on."""
    parser = ReplyParser(chat_format, tools=tools, **options)
    reasoning, content, names, arguments, ended = "", "", list[str](), list[str](), list[int]()
    for number, piece in enumerate(pieces, 1):
        for event in parser.feed(piece, final=number == len(pieces)):
            if isinstance(event, Reasoning):
                reasoning += event.text
            elif isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallStart):
                assert event.index == len(names) == len(ended)
                names.append(event.name)
                arguments.append("")
            elif isinstance(event, CallArguments):
                arguments[event.index] += event.text
            else:
                assert isinstance(event, CallEnd)
                ended.append(event.index)
    assert ended == list(range(len(names)))
    read = [json.loads(text) for text in arguments] if checks_json else arguments
    return Reply(reasoning, content, tuple(zip(names, read, strict=True)))
