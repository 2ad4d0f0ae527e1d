"""Calls of tools are found in the text of an answer, however it comes in pieces, and nothing else is taken from it."""

import json
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from command_line import run_command
from served import serving

from graphdecode.server.tool_calls import FORMATS, ToolCall, ToolCallReader, ToolFormat, format_of

HERMES, MISTRAL, GRANITE, LLAMA = FORMATS
NAMES = frozenset({"add", "look_up"})
ADD = ToolCall("add", '{"a": 417, "b": 385}')
LOOK_UP = ToolCall("look_up", '{"word": "\\u00e9 }] </tool_call>"}')
ADD_JSON = '{"name": "add", "arguments": {"a": 417, "b": 385}}'
LOOK_UP_JSON = '{"name": "look_up", "arguments": {"word": "\\u00e9 }] </tool_call>"}}'

ANSWERS = [
    (HERMES, f"<tool_call>\n{ADD_JSON}\n</tool_call>", "", [ADD]),
    (HERMES, f"I add.\n<tool_call>{ADD_JSON}</tool_call>", "I add.", [ADD]),
    (HERMES, f"<tool_call>{ADD_JSON}</tool_call>\n<tool_call>{LOOK_UP_JSON}</tool_call>", "", [ADD, LOOK_UP]),
    (HERMES, f"<tool_call>{ADD_JSON}</tool_call>That is it.", "That is it.", [ADD]),
    (HERMES, f"<tool_call>{{}}</tool_call> <tool_call>{ADD_JSON}</tool_call>", "<tool_call>{}</tool_call>", [ADD]),
    (HERMES, f"<tool_call>oh\n<tool_call>{ADD_JSON}</tool_call>", "<tool_call>oh", [ADD]),
    (HERMES, f"<tool_call>{ADD_JSON}", "", [ADD]),  # the end of the text is the end of the call
    (MISTRAL, f"[TOOL_CALLS] [{ADD_JSON}, {LOOK_UP_JSON}]", "", [ADD, LOOK_UP]),
    (MISTRAL, f"I add.[TOOL_CALLS][{ADD_JSON}]", "I add.", [ADD]),
    (GRANITE, f"<|tool_call|>[{ADD_JSON}]", "", [ADD]),
    (LLAMA, '{"name": "add", "parameters": {"a": 417, "b": 385}}', "", [ADD]),
    (LLAMA, f"{ADD_JSON}; {LOOK_UP_JSON}", "", [ADD, LOOK_UP]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "", [ToolCall("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [ToolCall("add", "{}")]),
]
CONTENT = [
    (HERMES, "1 < 2 and <tool_ or <tool_call"),
    (HERMES, 'Hi \n<tool_call>{"name": "other"}</tool_call>\n'),
    (HERMES, "  Hello,\n\n world  "),
    (HERMES, '<tool_call>{"name": "drop_tables", "arguments": {}}</tool_call>'),
    (HERMES, "<tool_call>no JSON</tool_call> and on"),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {}} </tool>'),
    (HERMES, "<tool_call>[1, null, {}]</tool_call>"),
    (HERMES, '<tool_call>{"name": {"add": 1}}</tool_call>'),
    (HERMES, "<tool_call>" + "[" * 5000),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1e400}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add"]</tool_call>'),
    (MISTRAL, "[TOOL_CALLS"),
    (MISTRAL, '[TOOL_CALLS][{"name": "other"}]'),
    (LLAMA, "Hello {world}"),
    (LLAMA, '{"answer": 42}'),
    (LLAMA, "  \n"),
    (LLAMA, ""),
]


def read(form: ToolFormat, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    reader, content, calls = ToolCallReader(form, NAMES), "", list[ToolCall]()
    for number, piece in enumerate(pieces, 1):
        released, found = reader.feed(piece, final=number == len(pieces))
        content, calls = content + released, calls + found
    return content, calls


def splits(text: str) -> list[list[str]]:
    every = [[text[:at], text[at:]] for at in range(0, len(text) + 1, max(len(text) // 200, 1))]
    return [[text], list(text) or [""], [*text, ""], *every]


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS, ids=lambda value: getattr(value, "name", ""))
def test_a_call_is_found_however_the_text_is_split(form, text, content, calls):
    for pieces in splits(text):
        found, called = read(form, pieces)
        assert (found, [call.name for call in called]) == (content, [call.name for call in calls]), pieces
        assert [json.loads(call.arguments) for call in called] == [json.loads(call.arguments) for call in calls]


@pytest.mark.parametrize(("form", "text"), CONTENT, ids=lambda value: getattr(value, "name", ""))
def test_what_only_looks_like_a_call_stays_content(form: ToolFormat, text: str) -> None:
    for pieces in splits(text) if len(text) < 1000 else [[text], [text[:20], text[20:]]]:
        assert read(form, pieces) == (text, []), pieces


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": "', "xy"),
        ('<tool_call>{"name": "add", "arguments": {"a": "', "}]"),
        ('<tool_call>{"name": "add", "arguments": [', "[],"),
        (f'<tool_call>{{"name": "add", "arguments": {{"a": "{"x" * 60_000}"}}}}', "\n"),
    ],
)
def test_a_call_in_many_pieces_takes_time_in_proportion_to_them(begins: str, goes_on: str) -> None:
    def seconds(count: int) -> float:
        reader, began = ToolCallReader(HERMES, NAMES), time.process_time()
        assert reader.feed(begins, final=False) == ("", [])
        for _ in range(count):
            assert reader.feed(goes_on, final=False) == ("", [])
        reader.feed("", final=True)
        return time.process_time() - began

    short = min(seconds(4_000) for _ in range(3))
    assert min(seconds(64_000) for _ in range(2)) < 64 * short  # the square would be 256


def test_content_is_not_held_back_longer_than_it_may_be_a_call() -> None:
    reader = ToolCallReader(HERMES, NAMES)
    assert reader.feed("Hello <tool", final=False) == ("Hello", [])
    assert reader.feed("box>", final=False) == (" <toolbox>", [])
    reader = ToolCallReader(LLAMA, NAMES)
    assert reader.feed("Hello", final=False) == ("Hello", [])


def test_a_call_is_told_as_soon_as_it_is_whole() -> None:
    reader = ToolCallReader(HERMES, NAMES)
    assert reader.feed(f"<tool_call>{ADD_JSON}</tool_call", final=False) == ("", [])
    assert [call.name for call in reader.feed(">", final=False)[1]] == ["add"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_template_tells_its_format(form: ToolFormat) -> None:
    assert format_of(f"{{{{ x }}}}{form.sign}") is form
    assert format_of("{{ messages }}") is None
    assert format_of(None) is None


def test_a_template_of_ones_own_is_what_conversations_go_through(tmp_path: Path) -> None:
    """With a server, by flag and by key; the demo's own knows of no tools."""
    file, config = tmp_path / "own.jinja", tmp_path / "own.toml"
    file.write_text("{% for tool in tools or [] %}<tool_call>{{ tool }}{% endfor %}{{ messages[-1].content }}=")
    config.write_text(f"[server]\nchat_template = {json.dumps(str(file))}\n")
    for options in (["--chat-template", str(file)], ["--config", str(config)]):
        with serving(*options) as served:
            said = {"messages": [{"role": "user", "content": "12+30"}], "temperature": 0, "max_tokens": 8}
            answer = httpx.post(f"{served.address}/v1/chat/completions", json=said, timeout=60).json()
            assert answer["choices"][0]["message"]["content"] == "42"
            told = httpx.get(f"{served.address}/tokenizer_info").json()
            assert told["chat_template"] == file.read_text()


def test_a_file_without_a_template_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% for")
    for name, said in (("none.jinja", "no such file"), ("broken.jinja", "the chat template refuses")):
        result = run_command("serve", "--chat-template", str(tmp_path / name))
        assert result.returncode == 2
        assert said in result.stderr
