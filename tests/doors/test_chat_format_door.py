"""The door of chat formats: Kimi K2's comes from a package outside, by its entry point."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from parsed_replies import Reply, replied
from random_calls import Vocabulary

from graphdecode.errors import ArgumentError
from graphdecode.extensions import EntryPoints
from graphdecode.text.chat_formats import (
    FAMILIES,
    CallStart,
    ChatFormat,
    ChatFormatFamily,
    ReplyParser,
    format_of,
    register_chat_format,
)
from graphdecode.text.chat_formats.constraint import Calling, grammar_of_calls

PACKAGE = """
from graphdecode.text.chat_formats import ChatFormat, ChatFormatFamily
from graphdecode.text.chat_formats.chat_format import CallSyntax, JsonArguments, NamedCall

KIMI = ChatFormatFamily(
    ChatFormat(
        "kimi_k2",
        calls=CallSyntax(
            NamedCall("functions.", "<|tool_call_argument_begin|>", "", JsonArguments(), number_marker=":"),
            opening="<|tool_call_begin|>",
            closing="<|tool_call_end|>",
            separator="",
            section_opening="<|tool_calls_section_begin|>",
            section_closing="<|tool_calls_section_end|>",
        ),
        call_id="functions.{name}:{index}",
    ),
    signs=("<|tool_calls_section_begin|>",),
    tool_call_parsers=("kimi_k2",),
)
"""
OUTPUT = (
    "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": "<|tool_call_end|>"}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, "g": {}}


@pytest.fixture
def kimi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatFormat]:
    information = tmp_path / "kimi_format-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kimi-format\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[graphdecode.tool_parsers]\nkimi = kimi_format:KIMI\n")
    (tmp_path / "kimi_format.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    before = FAMILIES.copy()
    EntryPoints("graphdecode.tool_parsers", lambda _, family: register_chat_format(family), FAMILIES).find()
    found = format_of("{{ x }}<|tool_calls_section_begin|>")
    assert found is not None
    yield found
    FAMILIES[:] = before
    sys.modules.pop("kimi_format", None)


def test_a_format_from_outside_is_read_and_constrained(kimi: ChatFormat) -> None:
    assert format_of(None, tool_call_parser="kimi_k2") is kimi
    wanted = Reply("", "Sure.", (("f", {"a": "<|tool_call_end|>"}), ("g", {})))
    for pieces in ([OUTPUT], list(OUTPUT), *([OUTPUT[:at], OUTPUT[at:]] for at in range(len(OUTPUT)))):
        assert replied(kimi, pieces, TOOLS) == wanted
    events = ReplyParser(kimi, tools=TOOLS).feed(OUTPUT, final=True)
    assert [e.call_id for e in events if isinstance(e, CallStart)] == ["functions.f:0", "functions.g:1"]

    vocabulary = Vocabulary(kimi)
    grammar = grammar_of_calls(kimi, Calling(TOOLS, must=True))
    for seed in range(5):
        text, is_complete = vocabulary.output(vocabulary.matcher(grammar or ""), np.random.default_rng(seed))
        if is_complete:
            found = replied(kimi, [text], TOOLS, is_constrained=True)
            assert found.calls
            for name, arguments in found.calls:
                jsonschema.validate(json.loads(json.dumps(arguments)), TOOLS[name])


def test_a_name_that_is_taken_is_refused(kimi: ChatFormat) -> None:
    family = ChatFormatFamily(kimi, tool_call_parsers=("mine",))
    with pytest.raises(ArgumentError, match="kimi_k2.*replace"):
        register_chat_format(family)
    register_chat_format(family, replace=True)
    assert format_of(None, tool_call_parser="mine") is kimi
    with pytest.raises(ArgumentError, match="ChatFormatFamily"):
        register_chat_format(kimi)  # type: ignore[arg-type]
