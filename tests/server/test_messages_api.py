"""Anthropic's Messages API: a real server's messages and events fit the official types; requests become chats."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest
from chain_model import THINKING_ANSWERS, THINKING_TEMPLATE, save_chain_model
from served import Served, serving

from graphdecode.server.anthropic.request import CountTokens, Messages
from graphdecode.server.http import HttpError
from graphdecode.server.request_fields import check_fields

KEY = "secret"
SCHEMAS = json.loads(Path(__file__).with_name("messages_schema.json").read_text())
EVENT_TYPES = {
    "message_start": "RawMessageStartEvent",
    "content_block_start": "RawContentBlockStartEvent",
    "content_block_delta": "RawContentBlockDeltaEvent",
    "content_block_stop": "RawContentBlockStopEvent",
    "message_delta": "RawMessageDeltaEvent",
    "message_stop": "RawMessageStopEvent",
    "error": "ErrorResponse",
}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Add two numbers.", "input_schema": NUMBERS}
QUESTION = {"role": "user", "content": "What is 417 + 385?"}
ASKED = {"model": "chain", "max_tokens": 64, "messages": [QUESTION]}


def check_type(data: dict[str, Any], name: str) -> dict[str, Any]:
    jsonschema.validate(data, {"$ref": f"#/$defs/{name}", "$defs": SCHEMAS["$defs"]})
    return data


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = save_chain_model(tmp_path_factory.mktemp("chain"), THINKING_ANSWERS, THINKING_TEMPLATE)
    options = f"--served-model-name chain --api-key {KEY} --max-batch-size 8 --max-sequence-length 256"
    with serving(*options.split(), model=str(model)) as server:
        yield server


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.client(headers={"x-api-key": KEY, "anthropic-version": "2023-06-01"}) as made:
        yield made


def message_of(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/messages", json=ASKED | fields)
    assert response.status_code == 200, response.text
    return check_type(response.json(), "Message")


def events_of(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each checked against the official types; pings are left out."""
    response = http.post("/v1/messages", json=ASKED | fields | {"stream": True})
    events = []
    for text in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event != {"type": "ping"}:
            events.append(check_type(event, EVENT_TYPES[event["type"]]))
    return events


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events of a stream make, as the official client does; they are in order."""
    start, *middle, delta, stop = events
    assert [start["type"], delta["type"], stop["type"]] == ["message_start", "message_delta", "message_stop"]
    message, texts = start["message"], dict[int, str]()
    for event in middle:
        index, content = event["index"], message["content"]
        if event["type"] == "content_block_start":
            assert index == len(content) == len(texts)
            content.append(event["content_block"])
            texts[index] = ""
        elif event["type"] == "content_block_delta":
            (value,) = (value for name, value in event["delta"].items() if name != "type")
            if event["delta"]["type"] == "signature_delta":
                content[index]["signature"] = value
            else:
                texts[index] += value
        else:
            assert index == len(content) - 1
            block = content[index]
            value = json.loads(texts[index]) if block["type"] == "tool_use" else texts[index]
            block[{"tool_use": "input", "thinking": "thinking"}.get(block["type"], "text")] = value
    return message | delta["delta"] | {"usage": delta["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": None, "content": content}


def test_a_message_answers_calls_a_tool_and_answers_from_its_result(http: httpx.Client) -> None:
    answer = message_of(http)
    assert answer["content"] == [{"type": "text", "text": "Hello, world!"}]
    assert (answer["stop_reason"], answer["stop_sequence"], answer["model"]) == ("end_turn", None, "chain")
    assert answer["usage"]["output_tokens"] == 5
    called = message_of(http, tools=[TOOL])
    text, call = called["content"]
    assert (text["text"], call["name"], call["input"]) == ("I add.", "add", {"a": 417, "b": 385})
    assert called["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "802"}]}
    turns = [QUESTION, {"role": "assistant", "content": called["content"]}, {"role": "user", "content": [result]}]
    assert message_of(http, tools=[TOOL], messages=turns)["content"][0]["text"] == "The sum is 802."
    assert message_of(http, tools=[TOOL], tool_choice={"type": "none"})["content"][0]["text"] == "Hello, world!"


THINKS = {"thinking": {"type": "adaptive"}}


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}, {"stop_sequences": ["wor", "x"]}, {"max_tokens": 2}, THINKS])
def test_a_stream_makes_the_same_message(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert without_ids(put_together(events_of(http, **fields))) == without_ids(message_of(http, **fields))


def test_why_a_message_ended_is_told(http: httpx.Client) -> None:
    stopped = message_of(http, stop_sequences=["x", "wor"])
    assert (stopped["content"][0]["text"], stopped["stop_reason"]) == ("Hello, ", "stop_sequence")
    assert stopped["stop_sequence"] == "wor"
    assert message_of(http, max_tokens=2)["stop_reason"] == "max_tokens"
    goes_on = [QUESTION, {"role": "assistant", "content": "<|chat|>" * 252}]
    cut = message_of(http, max_tokens=100_000, messages=goes_on)  # as agents ask, whatever fits
    assert cut["stop_reason"] == "model_context_window_exceeded"
    assert cut["content"][0]["text"].startswith("Hello")


def test_a_thought_is_a_block_of_its_own(http: httpx.Client) -> None:
    thought = message_of(http, **THINKS)
    thinking, text = thought["content"]
    assert (thinking["thinking"], text["text"]) == ("Hm, well.", "Yes.")
    assert thinking["signature"]
    assert 3 <= thought["usage"]["output_tokens_details"]["thinking_tokens"] < thought["usage"]["output_tokens"]
    hidden = message_of(http, thinking={"type": "adaptive", "display": "omitted"})
    assert hidden["content"] == [thinking | {"thinking": ""}, text]


def test_errors_are_of_the_apis_form(http: httpx.Client, served: Served) -> None:
    def error_of(response: httpx.Response) -> tuple[int, str]:
        return response.status_code, check_type(response.json(), "ErrorResponse")["error"]["type"]

    assert error_of(http.post("/v1/messages", json=ASKED | {"model": "x"})) == (404, "not_found_error")
    assert error_of(http.post("/v1/messages", json={"messages": [QUESTION]})) == (400, "invalid_request_error")
    assert error_of(http.post("/v1/messages", json=ASKED | {"top_p": -1.0})) == (400, "invalid_request_error")
    assert error_of(http.post("/v1/messages", content=b"{}")) == (415, "invalid_request_error")
    assert error_of(http.get("/v1/messages"))[0] == 405
    long = http.post("/v1/messages", json=ASKED | {"messages": [{"role": "user", "content": "<|chat|>" * 300}]})
    assert error_of(long) == (400, "invalid_request_error")
    assert "prompt is too long" in long.json()["error"]["message"]  # then agents make it shorter
    with served.client() as stranger:
        assert error_of(stranger.post("/v1/messages", json=ASKED)) == (401, "authentication_error")
        for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
            assert stranger.post("/v1/messages", json=ASKED, headers=headers).status_code == 200


def test_tokens_are_counted(http: httpx.Client) -> None:
    fields = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    for more in ({}, {"tools": [TOOL]}, {"system": "Be kind."}):
        count = check_type(http.post("/v1/messages/count_tokens", json=fields | more).json(), "MessageTokensCount")
        assert count["input_tokens"] == message_of(http, **more)["usage"]["input_tokens"]


def test_the_official_client_streams_and_calls_tools(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=served.address, api_key=KEY, max_retries=0)
    asked = {"model": "chain", "max_tokens": 64, "messages": [QUESTION], "tools": [TOOL]}
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert (text, message.stop_reason) == ("I add.", "tool_use")
    call = message.content[1]
    assert (call.name, call.input) == ("add", {"a": 417, "b": 385})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "802"}
    turns = [QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**asked | {"messages": turns})
    assert answer.content[0].text == "The sum is 802."
    assert client.messages.count_tokens(model="chain", messages=[QUESTION]).input_tokens > 0
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked | {"model": "x"})


# what needs no server


def chat_of(**fields: Any) -> dict[str, Any]:
    body = Messages.model_validate_json(json.dumps(ASKED | fields))
    return body.as_chat().model_dump(exclude_unset=True, exclude={"model", "max_tokens"}, exclude_none=True)


def test_the_parts_of_a_conversation_become_chat_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b;"},  # differs between requests
        {"type": "text", "text": "Be kind.", **cached},
        {"type": "text", "text": "Be brief."},
    ]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        {"role": "system", "content": "A note."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é"}, **cached},
                {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Go on."},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}] * 2},
                {"type": "tool_result", "tool_use_id": "t2", "content": "gone", "is_error": True},
            ],
        },
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}
        for name, arguments in (("t1", '{"at": "é"}'), ("t2", "{}"))
    ]
    assert chat_of(system=system, messages=turns)["messages"] == [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "Hi\n\nthere\n\nA note."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "a\na"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: gone"},
        {"role": "user", "content": "Go on."},
    ]
    assert chat_of(messages=[QUESTION, {"role": "assistant", "content": "The sum"}])["continue_final_message"] is True


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}),
        ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True}},
            {"tool_choice": {"type": "function", "function": {"name": "add"}}, "parallel_tool_calls": False},
        ),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": NUMBERS}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": NUMBERS}}},
        ),
        (
            {"tools": [TOOL | {"strict": True, "cache_control": {"type": "ephemeral"}, "type": "custom"}]},
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "add",
                            "description": "Add two numbers.",
                            "parameters": NUMBERS,
                            "strict": True,
                        },
                    }
                ]
            },
        ),
    ],
)
def test_fields_mean_those_of_a_chat(fields: dict[str, Any], meant: dict[str, Any]) -> None:
    assert chat_of(**fields) == chat_of() | meant


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages[0].content[0]"),
        ({"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]}, "tools[1]"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"effort": "immense"}}, "reasoning_effort"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"container": "c"}, "container"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    body = Messages.model_validate_json(json.dumps(ASKED | fields))
    with pytest.raises(HttpError) as refused:
        check_fields(body) or body.as_chat()
    assert (refused.value.status, refused.value.param) == (400, named)
    assert named in str(refused.value)


def test_every_field_of_the_api_is_known() -> None:
    # of anthropic 2.14.0: MessageCreateParamsBase and MessageCountTokensParams, beside those that come as headers
    published = "cache_control container diagnostics inference_geo metadata output_config service_tier speed system"
    published += " thinking tool_choice tools user_profile_id workspace_id"
    for kind, sampling in ((Messages, "max_tokens stop_sequences stream"), (CountTokens, "")):
        extra = dict.fromkeys([*published.split(), *sampling.split()])
        fields = ASKED if kind is Messages else {"messages": [QUESTION]}
        assert check_fields(kind.model_validate(extra | fields)) == []


def test_many_parts_are_prepared_in_a_child_process() -> None:
    blocks = [{"type": "text", "text": "a"}] * 100
    assert Messages.model_validate(ASKED | {"messages": [{"role": "user", "content": blocks}]}).parts > 64
