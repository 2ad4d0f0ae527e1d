"""Each family's form of thoughts and calls is read as it is written, however it comes, and written as it is read."""

import json
import random
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from parsed_replies import Reply, replied
from random_calls import Vocabulary, tools

from graphdecode.errors import ArgumentError
from graphdecode.text.chat_formats import (
    BARE_JSON,
    FAMILIES,
    CallArguments,
    CallEnd,
    CallStart,
    ChatFormat,
    ChatFormatFamily,
    Content,
    Reasoning,
    ReplyParser,
    format_of,
    with_bare_calls,
)
from graphdecode.text.chat_formats.constraint import Calling, grammar_of_calls

FORMATS = {each.chat_format.name: each.chat_format for each in FAMILIES}
# which markers are special tokens in the tokenizers of these families
SPECIAL = {
    "mistral": ("[TOOL_CALLS]",),
    "mistral_named": ("[TOOL_CALLS]", "[ARGS]"),
    "mistral_with_ids": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "granite": ("<|tool_call|>",),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "phi4_mini_json": ("<|tool_call|>", "<|/tool_call|>"),
    "openai": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"type": "array"},
        "d": {"type": "boolean"},
        "e": {"type": ["string", "null", "integer"]},
    },
}
TOOLS = {"f": SCHEMA, "g-1": {}}


def splits(text: str) -> list[list[str]]:
    every = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    return [[text], list(text) or [""], [*text, ""], *every]


WRITTEN = [
    (each["format"], each["text"], each["content"], [tuple(call) for call in each["calls"]])
    for each in json.loads(Path(__file__).with_name("written_calls.json").read_text(encoding="utf-8"))
]
HARMONY = [
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I call.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "1"}<|call|>',
        Reply("Hm.", "I call.", (("f", {"a": "1"}),)),
    ),
    (
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
        Reply("Hm.", "", (("f", {}),)),
    ),
    ("<|channel|>final<|message|>Hello <|return|>", Reply("", "Hello ")),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", Reply("a", "b")),
    ("no header", Reply("", "no header")),
    ("<|channel|>commentary to=functions.f json<|message|>no JSON<|call|>", Reply("", "no JSON")),
    ("<|channel|>commentary to=functions.other json<|message|>{}<|call|>", Reply("", "{}")),
]


@pytest.mark.parametrize("is_constrained", [False, True])
@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    WRITTEN,
    ids=lambda value: value if isinstance(value, str) and value in FORMATS else "",
)
def test_calls_are_read_however_the_text_is_split(
    name: str, text: str, content: str, calls: Any, is_constrained: bool
) -> None:
    for pieces in splits(text):
        assert replied(FORMATS[name], pieces, TOOLS, is_constrained=is_constrained) == Reply(
            "", content, tuple(calls)
        ), pieces


@pytest.mark.parametrize(("text", "reply"), HARMONY)
def test_messages_with_channels_are_told_apart(text: str, reply: Reply) -> None:
    for pieces in splits(text):
        assert replied(FORMATS["openai"], pieces, TOOLS) == reply, pieces


@pytest.mark.parametrize(
    "name", sorted({name for name, *_ in WRITTEN} - {"llama3_json", "pythonic", "llama4_pythonic"})
)
def test_what_is_no_valid_call_stays_text(name: str) -> None:
    text = next(text for each, text, *_ in WRITTEN if each == name)
    for broken in (text.replace("f", "drop", 1), text[: len(text) * 2 // 3].partition('"b"')[0]):
        found = replied(FORMATS[name], [broken], {"g-1": {}})
        assert not [call for call in found.calls if call[0] != "g-1"]
        assert replied(FORMATS[name], list(broken), {"g-1": {}}) == found
    assert replied(FORMATS[name], [text], {}) == Reply("", text)


def test_arguments_come_as_they_are_written_if_a_grammar_makes_them() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=a>\nA long\ntext\n</parameter>\n</function>\n</tool_call>"
    for is_constrained in (True, False):
        parser = ReplyParser(FORMATS["qwen_xml"], tools=TOOLS, is_constrained=is_constrained)
        early = [event for letter in text.partition("t\n</parameter")[0] for event in parser.feed(letter, final=False)]
        written = "".join(event.text for event in early if isinstance(event, CallArguments))
        assert written == ('{"a": "A long\\ntex' if is_constrained else "")


def test_a_constrained_call_that_is_cut_keeps_what_came() -> None:
    parser = ReplyParser(FORMATS["hermes"], tools=TOOLS, is_constrained=True)
    events = parser.feed('<tool_call>\n{"name": "f", "arguments": {"a": "x', final=True)
    assert isinstance(events[0], CallStart)
    assert events[1:] == [CallArguments(0, '{"a": "x'), CallEnd(0)]
    assert parser.is_cut


THINKS = format_of("<think></think><tool_call>")
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
THOUGHTS = [
    ("<think>\nHm. </thin\n</think>\n\nHi", False, Reply("Hm. </thin", "Hi")),
    ("Hm.\n</think>\n\nHi", True, Reply("Hm.", "Hi")),
    ("<think>Hm.</think>Hi", True, Reply("Hm.", "Hi")),  # the marker comes again
    ("\n Hi <think>", False, Reply("", "\n Hi <think>")),
    ("<think>\n\n</think>\n\nHi", False, Reply("", "Hi")),
    ("Hm. " + CALL, True, Reply("Hm. " + CALL)),  # a thought of a call calls nothing
    (f"Hm.</think>{CALL}", True, Reply("Hm.", "", (("f", {}),))),
    ("never ends \n", True, Reply("never ends \n")),
]


@pytest.mark.parametrize(("text", "in_reasoning", "reply"), THOUGHTS)
def test_thoughts_are_apart(text: str, in_reasoning: bool, reply: Reply) -> None:
    assert THINKS is not None
    for pieces in splits(text):
        assert replied(THINKS, pieces, TOOLS, in_reasoning=in_reasoning) == reply, pieces


def test_no_event_has_half_a_marker() -> None:
    assert THINKS is not None
    text = f"<think>Hm. </think>\nHi <tool_ {CALL}"
    parser = ReplyParser(THINKS, tools=TOOLS)
    events = [event for letter in text for event in parser.feed(letter, final=False)]
    assert not [
        event for event in events if isinstance(event, Content | Reasoning) and event.text.strip() in ("</", "<tool_c")
    ]
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "Hm."


@pytest.mark.parametrize(
    "begins",
    ["<tool_call>", '<tool_call>{"name": "f", "arguments": {"a": "', "<tool_call><function=f><parameter=a>", " \n"],
)
@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "openai"])
def test_time_is_in_proportion_to_the_text(begins: str, name: str) -> None:
    def seconds(count: int, *, by_letter: bool) -> float:
        text = begins * count + "x"
        began = time.process_time()
        replied(FORMATS[name], list(text) if by_letter else [text], TOOLS)
        return time.process_time() - began

    for by_letter in (False, True):
        short = min(seconds(50, by_letter=by_letter) for _ in range(3))
        assert min(seconds(800, by_letter=by_letter) for _ in range(2)) < 64 * short + 0.05  # the square would be 256


def test_names_of_parsers_are_vllms_and_unknown_ones_are_refused() -> None:
    for name in (
        "hermes",
        "mistral",
        "llama3_json",
        "pythonic",
        "llama4_pythonic",
        "granite",
        "phi4_mini_json",
        "lfm2",
    ):
        assert format_of(None, tool_call_parser=name) is not None
    for name in ("qwen3_coder", "qwen3_xml", "glm45", "glm47", "deepseek_v3", "deepseek_v31", "deepseek_v32", "openai"):
        assert format_of(None, tool_call_parser=name) is not None
    for name in ("deepseek_r1", "qwen3", "glm45", "mistral", "granite", "gemma4"):
        found = format_of(None, reasoning_parser=name)
        assert found is not None
        assert found.thinking is not None
    assert format_of("<tool_call>", reasoning_parser="openai_gptoss") is FORMATS["openai"]
    for wrong in ({"tool_call_parser": "no"}, {"reasoning_parser": "no"}):
        with pytest.raises(ArgumentError, match="must be one of.*hermes|must be one of.*qwen3"):
            format_of(None, **wrong)
    assert with_bare_calls(None) is BARE_JSON


def test_every_format_has_a_name_of_its_own() -> None:
    by_name: dict[str, ChatFormatFamily] = {}
    for family in FAMILIES:
        assert by_name.setdefault(family.chat_format.name, family).chat_format == family.chat_format


def check_constrained_calls(chat_format: ChatFormat, seed: int, outputs: int) -> int:
    """Let random logits write outputs under the grammar of random functions; return the number of calls."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    functions = tools(draw)
    vocabulary = Vocabulary(chat_format, SPECIAL.get(chat_format.name, ()) if seed % 2 else ())
    must, several = seed % 3 > 0, seed % 5 > 0
    calling = Calling(functions, must=must, several=several, special_tokens=vocabulary.special_tokens)
    grammar = grammar_of_calls(chat_format, calling)
    if grammar is None:
        assert not must
        return 0
    matcher, count = vocabulary.matcher(grammar), 0
    assert not matcher.is_error(), matcher.get_error()
    for _ in range(outputs):
        text, is_complete = vocabulary.output(matcher.deep_copy(), rng)
        if not is_complete:
            continue
        found = replied(chat_format, [text], functions, is_constrained=True)
        count += len(found.calls)
        assert found.calls or not must, (seed, text)
        assert several or len(found.calls) <= 1, (seed, text)
        assert not must or chat_format.channels or not found.content.strip(), (seed, text)
        for name, arguments in found.calls:
            jsonschema.validate(arguments, functions[name])
    return count


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_constrained_calls_are_what_their_schemas_say(name: str) -> None:
    outputs = 1 if FORMATS[name].channels is None else 8  # a call is one of many messages
    assert sum(check_constrained_calls(FORMATS[name], seed, outputs) for seed in range(1, 7)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_thousands_of_constrained_calls_are_what_their_schemas_say(name: str) -> None:
    calls = seed = 0
    few = FORMATS[name].channels is not None  # a call is one of many messages
    while calls < (500 if few else 100_000 // (len(FORMATS) - 1)):
        seed += 1
        calls += check_constrained_calls(FORMATS[name], seed, 8)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_output_calls_or_has_the_content_that_a_schema_says(name: str) -> None:
    calling = Calling({"f": SCHEMA}, must=False, content={"enum": [{"one": 1}]})
    grammar = grammar_of_calls(FORMATS[name], calling)
    if grammar is None:  # nothing marks its calls
        return
    vocabulary, seen = Vocabulary(FORMATS[name]), set[str]()
    matcher, rng = vocabulary.matcher(grammar), np.random.default_rng(0)
    assert not matcher.is_error(), matcher.get_error()
    for _ in range(12):
        text, is_complete = vocabulary.output(matcher.deep_copy(), rng)
        if not is_complete:
            continue
        found = replied(FORMATS[name], [text], {"f": SCHEMA}, is_constrained=True)
        seen.add("call" if found.calls else "content")
        if FORMATS[name].channels is not None:  # other messages come before
            assert found.calls or found.content.endswith("}")
        elif found.calls:
            assert not found.content.strip()
        else:
            assert json.loads(found.content) == {"one": 1}
    assert "content" in seen


def test_a_schema_that_a_form_cannot_enforce_is_refused() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "idn-email"}}, "required": ["a"]}
    for name in ("qwen_xml", "glm45", "gemma4"):
        with pytest.raises(ArgumentError, match="idn-email"):
            grammar_of_calls(FORMATS[name], Calling({"f": odd}, must=True))
