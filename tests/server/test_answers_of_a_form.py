"""`response_format`, `structured_outputs` and calls of tools that are a must, by OpenAI's own client and by HTTP."""

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import numpy as np
import openai
import pytest
from pydantic import BaseModel, ConfigDict
from served import Served, serving

from graphdecode import LLM, SamplingParams, StructuredOutputsParams
from graphdecode.server.protocol import ChatCompletion
from graphdecode.server.structured_outputs import structured_output_of_calls
from graphdecode.server.tool_calls import FORMATS, ToolCallReader
from graphdecode.text.grammar import Grammars

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}={% endif %}"
)
ASKED: Any = [{"role": "user", "content": "12+30"}]
WILD: dict[str, Any] = {"model": "demo", "messages": ASKED, "max_tokens": 450, "temperature": 1.2}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/unit"}, "degrees": {"type": "integer", "minimum": 0, "maximum": 40}},
    "required": ["unit", "degrees"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("server") / "server.toml"
    file.write_text("[server]\ntrust_request_chat_template = true\n")
    with serving("--config", str(file), "--max-batch-size", "8", "--max-sequence-length", "512") as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def chat(client: openai.OpenAI, seed: int = 1, **more: Any) -> Any:
    extra = {"chat_template": TEMPLATE, **more.pop("extra_body", {})}
    return client.chat.completions.create(**(WILD | {"seed": seed} | more), extra_body=extra).choices[0]


class Reading(BaseModel):
    model_config = ConfigDict(extra="forbid")

    unit: Literal["C", "F"]
    sunny: bool
    at: Literal["noon", "night"]


def test_openais_client_parses_an_answer_into_its_own_model(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.parse(
            **WILD, seed=seed, response_format=Reading, extra_body={"chat_template": TEMPLATE}
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Reading)


def test_a_response_format_is_kept_streamed_and_not(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "reading", "schema": SCHEMA, "strict": True}}
    choice = chat(client, response_format=wanted)
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert choice.finish_reason == "stop"
    stream = client.chat.completions.create(
        **WILD, seed=1, response_format=wanted, stream=True, extra_body={"chat_template": TEMPLATE}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == choice.message.content
    found = chat(client, response_format={"type": "json_object"}, max_tokens=300, seed=4)
    assert found.message.content.startswith("{")
    if found.finish_reason == "stop":
        assert isinstance(json.loads(found.message.content), dict)
    assert chat(client, response_format={"type": "text"}, temperature=0).message.content.strip() == "42"


def test_vllms_structured_outputs_are_those_of_the_library(client: openai.OpenAI) -> None:
    forms: list[dict[str, Any]] = [
        {"choice": ["left", "right"]},
        {"regex": r"\d{3}-[a-f]{2}"},
        {"grammar": 'root ::= "<" [a-c]+ ">"'},
        {"json": SCHEMA, "disable_any_whitespace": True},
    ]
    sampled = {"temperature": 1.5, "seed": 3, "max_tokens": 60}
    with LLM("demo", device="cpu", max_batch_size=8, max_sequence_length=512) as llm:
        params = [SamplingParams(**sampled, structured_outputs=StructuredOutputsParams(**form)) for form in forms]
        alone = [output.outputs[0].text for output in llm.generate(["12+30="] * 4, params, use_tqdm=False)]
    found = [
        client.completions.create(model="demo", prompt="12+30=", **sampled, extra_body={"structured_outputs": form})
        for form in forms
    ]
    assert [answer.choices[0].text for answer in found] == alone
    assert alone[0] in forms[0]["choice"]
    assert re.fullmatch(forms[1]["regex"], alone[1])


def test_an_answer_that_is_cut_says_so(client: openai.OpenAI) -> None:
    assert chat(client, extra_body={"structured_outputs": {"regex": "a{9}"}}, max_tokens=4).finish_reason == "length"


@pytest.mark.parametrize("streams", [False, True])
def test_tools_that_must_be_called_are_called_with_arguments_that_are_valid(client, streams):
    for seed, choice in enumerate(["required", {"type": "function", "function": {"name": "cold"}}]):
        options: dict[str, Any] = {"tools": [tool("warm"), tool("cold")], "tool_choice": choice, "seed": seed}
        if streams:
            stream = client.chat.completions.create(
                **(WILD | options), parallel_tool_calls=False, stream=True, extra_body={"chat_template": TEMPLATE}
            )
            chunks = [chunk.choices[0] for chunk in stream]
            calls = [call.function for chunk in chunks for call in chunk.delta.tool_calls or []]
            reason = chunks[-1].finish_reason
        else:
            answer = chat(client, parallel_tool_calls=False, **options)
            assert answer.message.content is None
            calls, reason = [call.function for call in answer.message.tool_calls], answer.finish_reason
        (call,) = calls
        assert call.name in (("warm", "cold") if choice == "required" else ("cold",))
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        assert reason == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_every_family_writes_calls_as_it_has_learnt_to_and_they_are_read_back(form: Any, choice: str) -> None:
    """By the grammar alone: what it lets pass is what is read, and no arguments pass that the schema forbids."""
    special = 258  # the demo's padding, in the place of a model's opening token
    body = ChatCompletion(messages=ASKED, tools=[tool("warm", strict=True)], tool_choice=choice)  # type: ignore[arg-type]
    held = structured_output_of_calls(body, form, special if form.is_special else None)
    if choice == "auto" and not form.opening:
        assert held is None
        return
    assert held is not None
    with LLM("demo", max_batch_size=1, max_sequence_length=32, backend="eager") as llm:
        grammars: Grammars = llm.input_processor.grammars
        grammar = grammars.grammar(held.params)

    def passes(text: str) -> bool:
        """Whether each token of a text is one that the mask allows."""
        constraint, mask = grammars.constraint(grammar), np.zeros(9, dtype=np.int32)
        before, _, after = text.partition(form.opening) if form.is_special else (text, "", "")
        tokens = [*before.encode(), *([special] if form.is_special else []), *after.encode()]
        for token in tokens:
            constraint.fill(mask, [])
            if not mask[token // 32] >> (token % 32) & 1:
                return False
            constraint.accept(token)
        return True

    def call(degrees: int) -> str:
        inner = json.dumps({"name": "warm", form.arguments: {"unit": "C", "degrees": degrees}})
        if form.closing:
            return f"{form.opening}\n{inner}\n{form.closing}"
        return f"{form.opening}[{inner}]" if form.opening else inner

    amid = "so: " if choice == "auto" else ""
    assert passes(amid + call(40))
    assert not passes(amid + call(41))
    assert passes("no call") == (choice == "auto")
    _, calls = ToolCallReader(form, frozenset({"warm"})).feed(call(40), final=True)
    assert [json.loads(found.arguments) for found in calls] == [{"unit": "C", "degrees": 40}]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format", "type must be text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must have a schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format",
        'response_format: json_schema cannot be kept: keywords that are not supported: ["not"]',
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "unknown 'yaml'"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format", "one of"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    (
        {"tools": [tool("warm")], "tool_choice": {"type": "function", "function": {"name": "hot"}}},
        "tool_choice",
        "must name one of the tools",
    ),
    (
        {"tools": [tool("warm", parameters={"type": "object", "if": {}})], "tool_choice": "required"},
        "tools",
        'keywords that are not supported: ["if"]',
    ),
    (
        {"tools": [tool("warm")], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
        "ask for one",
    ),
]


def test_what_cannot_be_kept_is_400_with_the_field_and_touches_nobody_else(served: Served) -> None:
    answers: list[Any] = []
    with served.client() as client:

        def plain() -> None:
            body = {
                "messages": ASKED,
                "chat_template": TEMPLATE,
                "temperature": 0,
                "max_tokens": 100,
                "ignore_eos": True,
            }
            answers.append(
                client.post("/v1/chat/completions", json=body | {"ignore_eos": True}).json()["choices"][0]["message"][
                    "content"
                ]
            )

        plain()
        beside = [threading.Thread(target=plain) for _ in range(3)]
        for thread in beside:
            thread.start()
        for body, field, message in BAD:
            asked = {"messages": ASKED, "chat_template": TEMPLATE, **body}
            response = client.post("/v1/chat/completions", json=asked)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, field), (body, error)
            assert message in error["message"], error
        for thread in beside:
            thread.join()
    assert len(set(answers)) == 1
    assert len(answers) == 4


def test_a_schema_that_takes_long_to_read_holds_nobody_up(served: Served) -> None:
    large = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1500)}}
    slow = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": large | {"required": ["p0"]}}}
    with served.client() as client:
        took: list[float] = []

        def ask(body: dict[str, Any]) -> float:
            began = time.perf_counter()
            assert client.post("/v1/completions", json=body).status_code == 200
            return time.perf_counter() - began

        long = threading.Thread(target=lambda: took.append(ask(slow)))
        long.start()
        others = []
        while long.is_alive():
            others.append(ask({"prompt": "12+30=", "max_tokens": 4}))
        long.join()
        # too many ways to go on, which shows behind the first token
        lost = client.post("/v1/completions", json=slow | {"structured_outputs": {"json": large}})
        assert lost.status_code == 400
        assert re.search("its grammar cannot be followed further: .*items", lost.json()["error"]["message"])
        assert len(lost.text) < 500
    assert max(others) < took[0] / 2
    served.until_idle()
