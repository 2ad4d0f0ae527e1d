"""Calls of tools are found in the text of an answer, however it comes in pieces, and nothing else is taken from it."""

import json
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest
from command_line import run_command
from llguidance import LLMatcher, LLTokenizer, grammar_from
from preprocessors import demo_preprocessor, demo_tokenizer
from served import Served, serving
from tokenizers import AddedToken

from graphdecode.errors import ArgumentError
from graphdecode.hub.model_path import installable
from graphdecode.server.chat_completions import prepared_chat
from graphdecode.server.protocol import ChatCompletion
from graphdecode.server.reply import Prepared
from graphdecode.server.tool_prompts import messages_with_tools
from graphdecode.text.chat_formats import (
    BARE_JSON,
    FAMILIES,
    CallArguments,
    CallStart,
    ChatFormat,
    ChatFormatFamily,
    Content,
    ReplyParser,
    format_of,
)
from graphdecode.text.chat_formats.constraint import Calling, grammar_of_calls

HERMES, MISTRAL, GRANITE, LLAMA = (
    next(each.chat_format for each in FAMILIES if each.chat_format.name == name)
    for name in ("hermes", "mistral", "granite", "llama3_json")
)
TOOLS: dict[str, dict[str, Any]] = {"add": {}, "look_up": {}}


class ToolCall(NamedTuple):
    name: str
    arguments: str


ADD = ToolCall("add", '{"a": 417, "b": 385}')
LOOK_UP = ToolCall("look_up", '{"word": "\\u00e9 }] </tool_call>"}')
ODD = '{"b":1E5,  "a": "ü\\u00fc", "a":1.50, "c": 12345678901234567890}'
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
    # arguments stay as they are written
    (HERMES, f'<tool_call>{{"name": "add", "arguments" : {ODD} }}</tool_call>', "", [ToolCall("add", ODD)]),
    (MISTRAL, f'[TOOL_CALLS][{{ "arguments":{ODD}, "name":"add"}} , {ADD_JSON}]', "", [ToolCall("add", ODD), ADD]),
    # what `max_tokens` cuts does not take the calls before it along
    (MISTRAL, f'[TOOL_CALLS][{ADD_JSON}, {{"name": "look_up", "argu', '{"name": "look_up", "argu', [ADD]),
    (MISTRAL, f"[TOOL_CALLS][{ADD_JSON}, {LOOK_UP_JSON}", "", [ADD, LOOK_UP]),
    (GRANITE, f"<|tool_call|>[{ADD_JSON},", "", [ADD]),
    (HERMES, f"<tool_call>{ADD_JSON}</tool_call><tool_call>{{", "<tool_call>{", [ADD]),
    (HERMES, f"<tool_call>{ADD_JSON}</tool_", "", [ADD]),
    (LLAMA, f'{ADD_JSON}; {{"name"', '{"name"', [ADD]),
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


def read(form: ChatFormat, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parser, content, calls = ReplyParser(form, tools=TOOLS), "", list[ToolCall]()
    for number, piece in enumerate(pieces, 1):
        for event in parser.feed(piece, final=number == len(pieces)):
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallStart):
                assert event.index == len(calls)
                calls.append(ToolCall(event.name, ""))
            elif isinstance(event, CallArguments):
                calls[event.index] = calls[event.index]._replace(arguments=calls[event.index].arguments + event.text)
    return content, calls


def splits(text: str) -> list[list[str]]:
    every = [[text[:at], text[at:]] for at in range(0, len(text) + 1, max(len(text) // 200, 1))]
    return [[text], list(text) or [""], [*text, ""], *every]


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS, ids=lambda value: getattr(value, "name", ""))
def test_a_call_is_found_however_the_text_is_split(form, text, content, calls):
    for pieces in splits(text):
        found, called = read(form, pieces)
        assert (found, called) == (content, calls), pieces


@pytest.mark.parametrize(("form", "text"), CONTENT, ids=lambda value: getattr(value, "name", ""))
def test_what_only_looks_like_a_call_stays_content(form: ChatFormat, text: str) -> None:
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
        parser, began = ReplyParser(HERMES, tools=TOOLS), time.process_time()
        assert parser.feed(begins, final=False) == []
        for _ in range(count):
            assert parser.feed(goes_on, final=False) == []
        parser.feed("", final=True)
        return time.process_time() - began

    short = min(seconds(4_000) for _ in range(3))
    assert min(seconds(64_000) for _ in range(2)) < 64 * short  # the square would be 256


def test_a_call_has_an_id_that_all_templates_take() -> None:
    parser = ReplyParser(HERMES, tools=TOOLS)
    text = f"<tool_call>{ADD_JSON}</tool_call>" * 100
    ids = [event.call_id for event in parser.feed(text, final=True) if isinstance(event, CallStart)]
    assert len(set(ids)) == 100
    assert all(len(name) == 9 and name.isalnum() and name.isascii() for name in ids)


def test_content_is_released_once_it_cannot_be_a_call() -> None:
    parser = ReplyParser(HERMES, tools=TOOLS)
    assert parser.feed("Hello <tool", final=False) == [Content("Hello")]
    assert parser.feed("box>", final=False) == [Content(" <toolbox>")]
    assert ReplyParser(LLAMA, tools=TOOLS).feed("Hello", final=False) == [Content("Hello")]


def test_a_call_is_returned_once_complete() -> None:
    parser = ReplyParser(HERMES, tools=TOOLS)
    assert parser.feed(f"<tool_call>{ADD_JSON}</tool_call", final=False) == []
    start, arguments, _ = parser.feed(">", final=False)
    assert isinstance(start, CallStart)
    assert (start.index, start.name) == (0, "add")
    assert arguments == CallArguments(0, ADD.arguments)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.chat_format.name}-{len(family.signs)}")
def test_a_template_determines_the_tool_format(family: ChatFormatFamily) -> None:
    assert format_of("{{ x }}" + "".join(family.signs)) == family.chat_format
    assert format_of("{{ messages }}") is None
    assert format_of(None) is None


def test_chat_template_renders_the_conversations(tmp_path: Path) -> None:
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
        result = run_command("serve", "--model", "demo", "--chat-template", str(tmp_path / name))
        assert result.returncode == 2
        assert said in result.stderr


# as SmolLM2's: no tools, and a system's message of its own where there is none
TEMPLATE = """{% if messages[0].role != 'system' %}system: none\n{% endif %}{% for message in messages -%}
{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TEMPLATE
# as Mistral's: users and assistants by turns, and no other roles
ALTERNATING = (
    "{% for message in messages %}{% if message.role != ('assistant' if loop.index0 % 2 else 'user') %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
) + TEMPLATE
# short ones: the demo's tokens are bytes, and it has 512 of them
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"enum": [{"place": "Oslo"}]}}}
SQUARE = {"type": "function", "function": {"name": "square", "parameters": {"enum": [{"n": 7}, {"n": 8}]}}}
NAMED = {"type": "function", "function": {"name": "square"}}
ASKED = [{"role": "user", "content": "What is 7 times 7?"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "square", "arguments": '{"n": 7}'}}
CALLED = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "49"},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("templates") / "plain.jinja"
    file.write_text(TEMPLATE)
    (file.parent / "settings.toml").write_text("[server]\ntrust_request_chat_template = true\n")
    options = ("--chat-template", str(file), "--config", str(file.parent / "settings.toml"))
    with serving(*options, "--max-sequence-length", "2048") as server:
        yield server


def response_to(served: Served, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.address}/v1/chat/completions", json=body, timeout=60)


def answer_of(served: Served, messages: list[dict[str, Any]] = ASKED, **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "tools": [WEATHER, SQUARE], "max_tokens": 64, "temperature": 1, "seed": 3, **fields}
    response = response_to(served, **body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def prompt_of(served: Served, **fields: Any) -> str:
    address = served.address
    tokens = httpx.post(f"{address}/tokenize", json={"messages": ASKED, **fields}, timeout=60).json()["tokens"]
    return str(httpx.post(f"{address}/detokenize", json={"tokens": tokens}, timeout=60).json()["prompt"])


def test_a_required_call_matches_its_function(served: Served) -> None:
    for choice, names in (("required", {"weather", "square"}), (NAMED, {"square"})):
        for seed in range(4):
            answer = answer_of(served, tool_choice=choice, seed=seed)
            (call,) = answer["message"]["tool_calls"]
            assert call["function"]["name"] in names
            told = WEATHER if call["function"]["name"] == "weather" else SQUARE
            assert json.loads(call["function"]["arguments"]) in told["function"]["parameters"]["enum"]
            assert answer["finish_reason"] == ("stop" if choice == NAMED else "tool_calls")
            assert answer["message"]["content"] is None


def test_a_function_without_parameters_is_called_with_none(served: Served) -> None:
    nothing = {"title": "Nothing", "type": "object", "properties": {}, "required": []}
    dialect = {"$schema": "http://json-schema.org/draft-07/schema#"}
    for parameters in (None, {}, {"type": "object", "properties": {}}, nothing, dialect, {"description": "none"}):
        tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
        (call,) = answer_of(served, tools=[tool], tool_choice="required", temperature=2)["message"]["tool_calls"]
        assert call["function"] == {"name": "now", "arguments": "{}"}, parameters
    for function in ({"name": "now"}, {"name": "now", "strict": True}):
        tool = {"type": "function", "function": function}
        (call,) = answer_of(served, tools=[tool], tool_choice="required", temperature=2)["message"]["tool_calls"]
        assert call["function"] == {"name": "now", "arguments": "{}"}


def test_parameters_that_are_open_stay_open() -> None:
    for given in ({"type": "object"}, {"type": "object", "properties": {}, "additionalProperties": {"const": 1}}):
        grammar = grammar_of_calls(HERMES, Calling({"f": given}, must=True))
        (schema,) = re.findall("%json (.*)", grammar or "")
        assert {name: value for name, value in json.loads(schema).items() if name != "x-guidance"} == given


def test_parameters_without_a_type_are_those_of_an_object(served: Served) -> None:
    schema = {"properties": {"n": {"enum": [7, 8]}}, "required": ["n"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for seed in range(3):
        (call,) = answer_of(served, tools=[tool], tool_choice="required", seed=seed)["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) in ({"n": 7}, {"n": 8})


def test_numbers_of_parameters_are_enforced_or_refused(served: Served) -> None:
    schema = {"type": "object", "properties": {"id": {"const": 2**53 + 1}}, "required": ["id"]}
    tool = {"type": "function", "function": {"name": "find", "parameters": schema}}
    refused = response_to(served, messages=ASKED, tools=[tool], tool_choice="required")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    assert "properties.id.const must be" in refused.json()["error"]["message"]
    schema["properties"]["id"]["const"] = 2**53 - 1  # type: ignore[index]
    (call,) = answer_of(served, tools=[tool], tool_choice="required")["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"id": 9007199254740991}'


def test_the_servers_call_id_is_valid_in_the_next_turn(served: Served) -> None:
    refuses = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    template = (
        f"{refuses}{{{{ raise_exception('nine letters') }}}}{{% endif %}}{{% endfor %}}{{% endfor %}}[TOOL_CALLS]"
    )
    (call,) = answer_of(served, tool_choice=NAMED)["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "49"}
    turn = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert answer_of(served, turn, chat_template=template, max_tokens=1)["message"]["role"] == "assistant"


def test_the_same_call_comes_as_a_stream(served: Served) -> None:
    whole = answer_of(served, tool_choice=NAMED)["message"]["tool_calls"][0]["function"]
    tools, sampling = [WEATHER, SQUARE], {"max_tokens": 64, "temperature": 1, "seed": 3}
    body = {"messages": ASKED, "tools": tools, "tool_choice": NAMED, **sampling}
    text = httpx.post(f"{served.address}/v1/chat/completions", json={**body, "stream": True}, timeout=60).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls if "id" in call] == [whole["name"]] == ["square"]
    assert len(calls) > 1  # the arguments come as they are written
    assert "".join(call["function"]["arguments"] for call in calls) == whole["arguments"]


def test_tool_choice_auto_constrains_nothing(served: Served) -> None:
    free = answer_of(served, tool_choice="auto", temperature=0)
    assert "tool_calls" not in free["message"]
    assert free["message"]["content"]
    assert "tool_calls" not in answer_of(served, tool_choice="none", temperature=0)["message"]


def test_the_prompt_describes_tools_and_earlier_calls(served: Served) -> None:
    prompt = prompt_of(served, messages=CALLED, tools=[SQUARE])
    assert prompt.startswith("system: You can call these functions")
    assert json.dumps(SQUARE["function"]) in prompt
    assert 'assistant: {"name": "square", "arguments": {"n": 7}}\nuser: square returned:\n49\n' in prompt
    assert "functions" not in prompt_of(served)
    in_user = prompt_of(served, tools=[SQUARE], chat_template=NO_SYSTEM)
    assert "user: You can call these functions" in in_user
    assert in_user.rstrip().endswith("What is 7 times 7?\nassistant:")


def test_earlier_calls_are_in_words_where_no_tools_are_offered(served: Served) -> None:
    answered = [*CALLED, {"role": "assistant", "content": "49."}, {"role": "user", "content": "And 8?"}]
    said = 'assistant: {"name": "square", "arguments": {"n": 7}}\nuser: square returned:\n49\nassistant: 49.\n'
    for template in (TEMPLATE, ALTERNATING):
        for tools in ({}, {"tools": []}):
            prompt = prompt_of(served, messages=answered, chat_template=template, **tools)
            assert prompt.startswith("system: none\nuser: What is 7 times 7?\n")
            assert said in prompt
    given = {"messages": answered, "chat_template": ALTERNATING, "tool_choice": "none", "return_token_ids": True}
    refused = response_to(served, tools=[SQUARE], max_tokens=64, **given).json()
    assert "tool_calls" not in refused["choices"][0]["message"]
    ids = {"tokens": refused["prompt_token_ids"]}
    prompt = httpx.post(f"{served.address}/detokenize", json=ids, timeout=60).json()["prompt"]
    assert said in prompt
    assert "functions" not in prompt


def test_the_template_for_tools_determines_the_tool_format() -> None:
    tokenizer = demo_tokenizer()
    preprocessor = demo_preprocessor(tokenizer, tokens=2048)

    def prepared(**fields: Any) -> Prepared:
        return prepared_chat(preprocessor, ChatCompletion(messages=ASKED, **fields))

    taught = "{{ tools | tojson }}<tool_call>" + TEMPLATE
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": taught}
    offered, refused = prepared(tools=[SQUARE]), prepared(tools=[SQUARE], tool_choice="none")
    assert offered.chat_format == format_of(taught)
    assert str(offered.prompts[0].prompt).startswith('[{"type"')
    assert "You can call" not in str(offered.prompts[0].prompt)
    assert str(refused.prompts[0].prompt).startswith("system: none")
    tokenizer.chat_template = {"default": TEMPLATE}
    assert prepared(tools=[SQUARE]).chat_format is BARE_JSON
    for none in (None, {"other": TEMPLATE}):
        tokenizer.chat_template = none
        with pytest.raises(ArgumentError, match="chat.template"):
            prepared(tools=[SQUARE])


@pytest.mark.parametrize("is_special", [True, False])
def test_a_call_may_begin_with_the_token_of_its_marker_and_not_with_its_letters(is_special: bool) -> None:
    tokenizer = demo_tokenizer()
    marker = AddedToken("<tool_call>", special=is_special, normalized=False)
    backend = tokenizer.backend_tokenizer
    (backend.add_special_tokens if is_special else backend.add_tokens)([marker])
    tokenizer.chat_template = "{{ tools | tojson }}{# <tool_call> #}"
    preprocessor = demo_preprocessor(tokenizer, tokens=2048)
    prepared = prepared_chat(preprocessor, ChatCompletion(messages=ASKED, tools=[SQUARE]))
    assert prepared.structured is not None
    vocabulary = LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size())
    encode = partial(backend.encode, add_special_tokens=False)
    token = backend.token_to_id("<tool_call>")

    def refused(ids: list[int]) -> list[int]:
        matcher = LLMatcher(vocabulary, grammar_from("grammar", str(prepared.structured.params.grammar)), log_level=0)
        return ids[matcher.try_consume_tokens(ids) :]

    spelled = [each for letter in "<tool_call>" for each in encode(letter).ids]
    assert refused([*encode("I ").ids, token, *encode('\n{"name": "square"').ids]) == []
    assert refused([*encode("I ").ids, token, *encode(" no").ids]) == encode(" no").ids
    assert refused([*encode("I ").ids, *spelled]) == spelled[-1:]


def test_the_tool_description_follows_tool_choice_and_messages() -> None:
    tools, system = [WEATHER], {"role": "system", "content": "Be short."}

    def content(choice: Any, messages: list[Any]) -> str:
        return str(messages_with_tools(messages, tools, choice)[0]["content"])

    assert content("required", ASKED).endswith("Call one of them.")
    assert content({"type": "function", "function": {"name": "weather"}}, ASKED).endswith("Call weather.")
    assert content("auto", ASKED).endswith("Where none of them helps, answer in words.")
    assert content("auto", [system, *ASKED]).endswith("answer in words.\nBe short.")
    results = [{"role": "tool", "name": name, "content": f"of {name}"} for name in ("one", "two")]
    told = messages_with_tools([*ASKED, *results], tools, "auto")
    assert [message["role"] for message in told] == ["system", "user", "user"]
    assert told[-1]["content"] == "one returned:\nof one\ntwo returned:\nof two"
    malformed = ["words", {"role": "assistant", "tool_calls": [3]}, {"role": "tool", "content": [3]}]
    assert messages_with_tools(malformed, tools, "auto")[1:3] == malformed[:2]


PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] %}"
    "{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)


def test_tools_reach_a_template_that_shows_those_of_a_system_message() -> None:
    """As Phi-4-mini's."""
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = PHI
    prepared = prepared_chat(demo_preprocessor(tokenizer, tokens=2048), ChatCompletion(messages=CALLED, tools=[SQUARE]))
    prompt = str(prepared.prompts[0].prompt)
    assert prompt.startswith(f"<|system|><|tool|>{json.dumps([SQUARE['function']])}<|/tool|>")
    assert '<|assistant|><|tool_call|>[{"name": "square", "arguments": {"n": 7}}]<|/tool_call|><|end|>' in prompt
    assert "square returned:\n49" in prompt
    assert prepared.is_constrained


SMOLLM2 = installable("smollm2")


@pytest.mark.skipif(SMOLLM2 is None or SMOLLM2.installed_file() is None, reason="needs smollm2: tools/quickstart")
def test_smollm2_calls_the_function_that_must_be_called() -> None:
    place = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": place}}, SQUARE]
    with serving(model="smollm2") as server:
        said = [{"role": "user", "content": "What is the weather in Paris?"}]
        answer = answer_of(server, said, tools=tools, tool_choice="required", temperature=0)
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["place"].startswith("Paris")
