"""Chats with thoughts: apart from the content, counted, before calls, and back to the template."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from preprocessors import demo_preprocessor, demo_tokenizer
from served import Served, serving

from graphdecode.errors import ArgumentError
from graphdecode.server.chat_completions import prepared_chat
from graphdecode.server.protocol import ChatCompletion
from graphdecode.text.chat import check_parsers, render_chat

TEMPLATE = (
    "{# <tool_call> #}{% for m in messages %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}=<think>\n{% endif %}"
)
ASKED = [{"role": "user", "content": "12+30"}]
SQUARE = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "square", "parameters": SQUARE}}]
CLOSING = len("</think>")  # the demo's tokens are bytes


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("templates") / "thinks.jinja"
    file.write_text(TEMPLATE)
    with serving("--chat-template", str(file), "--max-sequence-length", "1024") as server:
        yield server


def posted(served: Served, **fields: Any) -> httpx.Response:
    body = {"messages": ASKED, "max_tokens": 60, "temperature": 1, "seed": 5, "thinking_token_budget": 6, **fields}
    response = httpx.post(f"{served.address}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def gathered(response: httpx.Response) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message that the deltas of a stream make, and the usage."""
    message: dict[str, Any] = {"reasoning": "", "reasoning_content": "", "content": "", "arguments": "", "names": []}
    usage: dict[str, Any] = {}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            for name in ("reasoning", "reasoning_content", "content"):
                message[name] += choice["delta"].get(name) or ""
            for call in choice["delta"].get("tool_calls", ()):
                message["arguments"] += call["function"]["arguments"]
                message["names"] += [call["function"]["name"]] if "id" in call else []
    return message, usage


def test_a_thought_is_apart_and_counted(served: Served) -> None:
    answer = posted(served, ignore_eos=True).json()
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert "</think>" not in message["reasoning"] + message["content"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 6 + CLOSING}
    assert usage["completion_tokens"] == 60
    stream = posted(served, ignore_eos=True, stream=True, stream_options={"include_usage": True})
    parts, streamed_usage = gathered(stream)
    assert {name: parts[name] for name in ("reasoning", "reasoning_content", "content")} == {
        name: message[name] for name in ("reasoning", "reasoning_content", "content")
    }
    assert streamed_usage == usage
    hidden = posted(served, ignore_eos=True, include_reasoning=False).json()["choices"][0]["message"]
    assert "reasoning" not in hidden
    assert hidden["content"] == message["content"]


def test_a_call_that_must_come_is_behind_the_thought(served: Served) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    message = posted(served, **fields).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert message["reasoning"]
    assert message["content"] is None
    assert json.loads(call["function"]["arguments"]) in ({"n": 7}, {"n": 8})
    parts, _ = gathered(posted(served, stream=True, **fields))
    assert parts["names"] == ["square"]
    assert parts["arguments"] == call["function"]["arguments"]
    assert parts["reasoning"] == message["reasoning"]


def test_a_call_that_a_stop_text_cuts_is_none_to_be_made(served: Served) -> None:
    choice = posted(served, tools=TOOLS, tool_choice="required", max_tokens=200, stop=['"n"']).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "square", "arguments": "{"}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '"n"')
    body = {"messages": ASKED, "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 6}}
    body |= {"tools": [{"name": "square", "input_schema": SQUARE}], "tool_choice": {"type": "any"}}
    message = httpx.post(f"{served.address}/v1/messages", json=body | {"stop_sequences": ['"n"']}, timeout=60).json()
    assert message["content"][-1]["name"] == "square"
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", '"n"')


@pytest.mark.parametrize("is_strict", [False, True])
def test_what_is_no_call_has_the_response_format(served: Served, is_strict: bool) -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": is_strict}}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["<tool_call>", "no"]}}}
    fields = {"tools": tools, "response_format": form, "max_tokens": 200}
    for seed in range(3):
        message = posted(served, seed=seed, **fields).json()["choices"][0]["message"]
        for call in message.get("tool_calls", ()):
            assert json.loads(call["function"]["arguments"]) in ({"n": 7}, {"n": 8})
        assert message.get("tool_calls") or json.loads(message["content"]) in ("<tool_call>", "no")
    assert posted(served, tool_choice="required", **fields).json()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_once_begun_is_constrained_where_a_grammar_can_be_made() -> None:
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = TEMPLATE
    preprocessor = demo_preprocessor(tokenizer, tokens=2048)

    def prepared(parameters: dict[str, Any], **fields: Any) -> Any:
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        return prepared_chat(preprocessor, ChatCompletion(messages=ASKED, tools=[tool], **fields))

    free = prepared(SQUARE)
    assert free.is_constrained
    assert free.structured.is_optional
    assert free.in_reasoning
    assert not prepared(SQUARE, tool_choice="none").is_constrained
    either = prepared(SQUARE, response_format={"type": "json_object"})
    assert either.is_constrained
    assert either.structured.otherwise.field == "response_format"
    assert not prepared(SQUARE, structured_outputs={"regex": "a+"}).is_constrained
    assert not prepared(SQUARE, tool_choice="required").structured.is_optional
    plain = prepared_chat(preprocessor, ChatCompletion(messages=ASKED))
    assert plain.structured is None
    assert plain.chat_format is not None  # it thinks
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert prepared_chat(preprocessor, ChatCompletion(messages=ASKED)).chat_format is None


def test_a_response_format_leaves_the_messages_of_harmony_their_headers() -> None:
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = "{# <|channel|>analysis #}{{ messages[0].content }}"
    preprocessor = demo_preprocessor(tokenizer, tokens=2048)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"one": 1}]}}}
    prepared = prepared_chat(preprocessor, ChatCompletion(messages=ASKED, response_format=form))
    assert prepared.structured is not None
    backend = tokenizer.backend_tokenizer
    vocabulary = LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size())

    def is_allowed(text: str) -> bool:
        matcher = LLMatcher(vocabulary, grammar_from("grammar", str(prepared.structured.params.grammar)), log_level=0)
        ids = backend.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids)

    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert is_allowed(thought + '<|channel|>final<|message|>{"one": 1}')
    assert is_allowed('<|channel|>final<|message|>{"one": 1}')
    assert not is_allowed(thought + "<|channel|>final<|message|>no")
    assert not is_allowed('{"one": 1}')


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ messages[1].reasoning_content }}|{{ messages[1].content }}", "Hm|Hi"),
        ("{{ messages[1].reasoning }}|{{ messages[1].content }}", "Hm|Hi"),
        ("{{ messages[1].thinking }}|{{ messages[1].content }}", "Hm|Hi"),
        ("{# [THINK] #}{{ messages[1].content[0].thinking }}|{{ messages[1].content[1].text }}", "Hm|Hi"),
        ("{{ messages[1].content }}", "Hi"),
    ],
)
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_thought_goes_back_where_the_template_looks_for_it(template: str, shown: str, name: str) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "Hi", name: "Hm"}]
    assert render_chat(demo_tokenizer(), messages, chat_template=template).text == shown


def test_unknown_parsers_are_refused() -> None:
    check_parsers("hermes", "qwen3")
    for wrong in (("no", None), (None, "no")):
        with pytest.raises(ArgumentError, match="must be one of"):
            check_parsers(*wrong)


def test_names_of_parsers_take_the_place_of_the_templates(tmp_path: Path) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}=[THINK]{% endif %}"
    )
    options = ("--chat-template", str(file), "--reasoning-parser", "mistral", "--tool-call-parser", "qwen3_xml")
    with serving(*options, "--max-sequence-length", "1024") as server:
        message = posted(server, tools=TOOLS, tool_choice="required", max_tokens=200).json()["choices"][0]["message"]
        assert message["reasoning"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) in ({"n": 7}, {"n": 8})
