"""OpenAI's Responses API: the official client drives a real server, and each event fits the official types."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import openai
import pytest
from chain_model import THINKING_ANSWERS, THINKING_TEMPLATE, save_chain_model
from openai.types.responses import Response, ResponseCreateParams, ResponseStreamEvent
from served import Served, serving

from graphdecode.server.http import HttpError
from graphdecode.server.request_fields import check_fields
from graphdecode.server.responses.request import Responses, sealed
from graphdecode.server.responses.routes import listed
from graphdecode.server.responses.store import ItemList, ResponseStore, StoredResponse

KEYS = "secret", "other"
EVENT_TYPES = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL: Any = {"type": "function", "name": "add", "description": "Add.", "parameters": NUMBERS, "strict": False}
ASKED: Any = {"model": "chain", "input": "What is 417 + 385?"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = save_chain_model(tmp_path_factory.mktemp("chain"), THINKING_ANSWERS, THINKING_TEMPLATE)
    options = [f"--api-key={key}" for key in KEYS] + ["--max-batch-size=8", "--max-sequence-length=256"]
    with serving("--served-model-name", "chain", *options, model=str(model)) as server:
        yield server


def client_of(served: Served, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.address}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as made:
        yield made


def response_of(data: dict[str, Any]) -> Response:
    """Return a response that fits the official type, with no field that the type does not have."""
    assert data.keys() <= {*Response.model_fields, "store"}
    return Response.model_validate(data)


def events_of(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each checked against its official type."""
    with served.client(headers={"Authorization": f"Bearer {KEYS[0]}"}) as http:
        text = http.post("/v1/responses", json=ASKED | fields | {"stream": True}).text
    events = []
    for framed in text.removesuffix("\n\n").split("\n\n"):
        name, data = framed.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        kind = EVENT_TYPES[event["type"]]
        assert event.keys() <= kind.model_fields.keys()
        kind.model_validate(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_response_answers_and_calls_a_tool_whose_result_goes_on_from_it(client: openai.OpenAI) -> None:
    answer = client.responses.create(**ASKED)
    assert (answer.output_text, answer.status) == ("Hello, world!", "completed")
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5
    called = client.responses.create(**ASKED, tools=[TOOL], metadata={"a": "b"})
    message, call = called.output
    assert called.output_text == "I add."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 417, "b": 385})
    assert (called.metadata, called.tools[0].type) == ({"a": "b"}, "function")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "802"}
    more = client.responses.create(model="chain", input=[result], previous_response_id=called.id, tools=[TOOL])
    assert more.output_text == "The sum is 802."
    whole: Any = [{"role": "user", "content": ASKED["input"]}, message.to_dict(), call.to_dict(), result]
    assert (
        client.responses.create(model="chain", input=whole, tools=[TOOL], store=False).output_text == more.output_text
    )
    references: Any = [{"type": "item_reference", "id": call.id}, result]
    assert client.responses.create(model="chain", input=references, tools=[TOOL]).output_text == more.output_text


def test_events_come_in_order_and_end_with_the_whole_response(served: Served) -> None:
    events = events_of(served, tools=[TOOL])
    of_text = "output_text.delta", "output_text.done", "content_part.done", "output_item.done"
    of_call = "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"
    expected = [
        *("created", "in_progress", "output_item.added", "content_part.added", *of_text),
        *("output_item.added", *of_call, "completed"),
    ]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds[:8])) == expected[:8] or kinds.count("output_text.delta") > 1
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        kind for kind in expected if kind != "output_text.delta"
    ]
    whole = response_of(events[-1]["response"])
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert deltas == whole.output_text == "I add."
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == events[-1]["response"]["output"]
    assert {event["response"]["status"] for event in events[:2]} == {"in_progress"}
    assert len({event["response"]["id"] for event in (*events[:2], events[-1])}) == 1
    cut = events_of(served, max_output_tokens=2)
    assert cut[-1]["type"] == "response.incomplete"
    assert cut[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut[-1]["response"]["output"][0]["status"] == "incomplete"


def test_the_client_puts_a_stream_together(client: openai.OpenAI) -> None:
    with client.responses.stream(**ASKED, tools=[TOOL]) as stream:
        whole = stream.get_final_response()
    assert whole.output_text == "I add."
    (call,) = (item for item in whole.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"a": 417, "b": 385}


def test_a_custom_tool_gets_a_text_and_a_namespace_keeps_its_name(served: Served) -> None:
    custom = {"type": "custom", "name": "add", "format": {"type": "text"}}
    events = events_of(served, tools=[custom])
    done = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert [json.loads(event["input"]) for event in done] == [{"a": 417, "b": 385}]  # it was no text, and stays whole
    item = events[-1]["response"]["output"][1]
    assert (item["type"], item["name"]) == ("custom_tool_call", "add")


def test_stored_responses_are_found_listed_deleted_and_apart_for_each_key(
    served: Served, client: openai.OpenAI
) -> None:
    turns: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    made = client.responses.create(model="chain", input=turns)
    assert client.responses.retrieve(made.id) == made
    pages = client.responses.input_items.list(made.id, limit=2)
    assert len(pages.data) == 2
    listed_items: Any = client.responses.input_items.list(made.id, limit=2, order="asc")
    texts = [item.content[0].text for item in listed_items]
    assert texts == [str(number) for number in range(5)]
    with client_of(served, KEYS[1]) as stranger, pytest.raises(openai.NotFoundError):
        stranger.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    for again in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            again(made.id)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(**ASKED, previous_response_id=made.id)
    assert missing.value.param == "previous_response_id"
    unstored = client.responses.create(**ASKED, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_a_thought_is_an_item_of_its_own_or_its_summary(served: Served) -> None:
    effort = {"effort": "low"}
    for reasoning, name, field in (
        (effort, "reasoning_text", "content"),
        ({**effort, "summary": "auto"}, "reasoning_summary_text", "summary"),
    ):
        events = events_of(served, reasoning=reasoning, include=["reasoning.encrypted_content"])
        assert "".join(event["delta"] for event in events if event["type"] == f"response.{name}.delta") == "Hm, well."
        response = response_of(events[-1]["response"])
        thought, message = events[-1]["response"]["output"]
        assert (thought["type"], thought[field][0]["text"]) == ("reasoning", "Hm, well.")
        assert (response.output_text, message["type"]) == ("Yes.", "message")
        assert response.usage is not None
        assert 3 <= response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        kept = Responses.model_validate(
            {"input": [thought | {"content": [], "summary": []}, {"role": "user", "content": "a"}]}
        )
        assert kept.as_chat(kept.items({})).messages[0]["reasoning_content"] == "Hm, well."


def test_log_probabilities_come_where_they_are_included(client: openai.OpenAI, served: Served) -> None:
    included: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (message,) = client.responses.create(**ASKED, **included).output
    scores = message.content[0].logprobs  # type: ignore[union-attr]
    assert [score.token for score in scores][:4] == ["Hello", ", ", "world", "!"]
    assert {len(score.top_logprobs) for score in scores} == {2}
    events = events_of(served, **included)
    streamed = [score for event in events if event["type"].endswith("text.delta") for score in event["logprobs"]]
    assert [score["token"] for score in streamed][:4] == ["Hello", ", ", "world", "!"]
    events = events_of(served, reasoning={"effort": "low"}, **included)
    streamed = [
        score for event in events if event["type"] == "response.output_text.delta" for score in event["logprobs"]
    ]
    assert [score["token"] for score in streamed][:1] == ["\n\nYes."]  # those of the thought are not the text's


# what needs no server


def body_of(**fields: Any) -> Responses:
    return Responses.model_validate_json(json.dumps(ASKED | fields))


def chat_of(**fields: Any) -> dict[str, Any]:
    body = body_of(**fields)
    chat = body.as_chat(body.items({}))
    return chat.model_dump(exclude_unset=True, exclude={"model"}, exclude_none=True)


def test_items_become_chat_messages() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "input_text", "text": "there"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed("Hm ü.")},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAAA of another server"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}', "namespace": "eyes"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'a "b"'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "seen"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}], "content": None},
    ]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in (
            ("c1", "eyes__look", '{"at": 1}'),
            ("c2", "patch", '{"input": "a \\"b\\""}'),
        )
    ]
    assert chat_of(input=items, instructions="Be kind.")["messages"] == [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "Hi\n\nthere"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm ü.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
        {"role": "assistant", "content": "", "reasoning_content": "So."},
    ]


def function(name: str, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **others}}


SPACE = {"type": "namespace", "name": "n", "description": "d", "tools": [{**TOOL, "name": "in"}]}
FUNCTIONS = [
    function("add", description="Add.", parameters=NUMBERS, strict=False),
    function("n__in", description="Add.", parameters=NUMBERS, strict=False),
]


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"truncation": "auto"}, {"truncate_prompt_tokens": -1}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"tools": [TOOL, SPACE]}, {"tools": FUNCTIONS}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}},
            {"tools": FUNCTIONS[:1], "tool_choice": function("add")},
        ),
        (
            {
                "tools": [TOOL, SPACE],
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{**TOOL}]},
            },
            {"tools": FUNCTIONS[:1], "tool_choice": "required"},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": NUMBERS}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
    ],
)
def test_fields_mean_those_of_a_chat(fields: dict[str, Any], meant: dict[str, Any]) -> None:
    assert chat_of(**fields) == chat_of() | meant


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].arguments"),
        ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    body = body_of(**fields)
    with pytest.raises(HttpError) as refused:
        check_fields(body) or body.as_chat(body.items({}))
    assert (refused.value.status, refused.value.param) == (400, named)
    assert named in str(refused.value)


def test_every_field_of_the_api_is_known() -> None:
    published = {name for kind in get_args(ResponseCreateParams) for name in kind.__annotations__}
    assert len(published) > 30
    assert check_fields(Responses.model_validate(dict.fromkeys(published) | ASKED)) == []


def stored(name: str, size: int = 10, previous_id: str | None = None) -> StoredResponse:
    items = ItemList.of([{"id": f"in-{name}"}]), ItemList.of([{"id": f"out-{name}"}])
    return StoredResponse(b"x" * size, *items, previous_id)


def test_the_store_is_bounded_and_the_largest_holder_loses_first() -> None:
    store = ResponseStore(max_responses=4, max_bytes=1000)
    for number in range(9):
        store.put("a", f"a{number}", stored(str(number)))
    store.put("b", "b0", stored("b"))
    for number in range(9, 12):
        store.put("a", f"a{number}", stored(str(number)))
    assert store.get("b", "b0")  # though it is the oldest
    assert store.item("a", "out-11") == b'{"id":"out-11"}'
    for caller, name in (("a", "a0"), ("a", "b0"), ("b", "a11")):
        with pytest.raises(HttpError) as missing:
            store.get(caller, name)
        assert missing.value.status == 404
    store.put("b", "large", stored("large", size=2000))
    with pytest.raises(HttpError):
        store.get("b", "large")
    assert store.get("a", "a11")


def test_a_chain_is_kept_as_long_as_its_end_is_used() -> None:
    store = ResponseStore(max_responses=3, max_bytes=1000)
    store.put("a", "first", stored("1"))
    store.put("a", "second", stored("2", previous_id="first"))
    for number in range(5):
        assert [each.output_items.loaded() for each in store.history("a", "second")] == [
            [{"id": "out-1"}],
            [{"id": "out-2"}],
        ]
        store.put("a", str(number), stored(str(number)))
    store.remove("a", "first")
    with pytest.raises(HttpError) as missing:
        store.history("a", "second")
    assert missing.value.param == "previous_response_id"


def test_pages_of_input_items_have_limits() -> None:
    items = ItemList.of({"content": [{"id": "3"}], "id": str(number)} for number in range(30))
    assert items.index("3") == 3  # and not the first item, which has it within
    page = json.loads(listed(items, None, None, None))
    assert [item["id"] for item in page["data"]] == [str(number) for number in range(29, 9, -1)]
    assert (page["has_more"], page["last_id"]) == (True, "10")
    for limit, order, after in (("0", None, None), ("101", None, None), (None, "up", None), (None, None, "x")):
        with pytest.raises(HttpError):
            listed(items, limit, order, after)
