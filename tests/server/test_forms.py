"""What is remembered of forms, who waits for whose, and whose turn it is."""

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict
from repeated import holds
from served import Served, serving
from starlette.types import Receive, Scope, Send

from graphdecode import LLM, SamplingParams, StructuredOutputsParams
from graphdecode.errors import ArgumentError
from graphdecode.server.access import Guard, caller_of, check_key
from graphdecode.server.engine_client import GrammarCache
from graphdecode.server.fair_queue import MAX_CALLERS, FairQueue
from graphdecode.server.http import HttpError
from graphdecode.server.jobs import JobError
from graphdecode.server.messages import AddGrammar
from graphdecode.server.structured_outputs import GrammarCompiler


class Reader:
    """Reads forms in the place of children, and of the engine that is taught them."""

    def __init__(self, becomes: Callable[[str], Any] = lambda text: None) -> None:
        self.reads: list[str] = []
        self.ended: list[str] = []
        self.taught = GrammarCache()
        self._becomes = becomes
        self.goes_on = asyncio.Event()

    async def run(self, function: Any, params: StructuredOutputsParams, *, caller: str, **_: Any) -> AddGrammar:
        text = str(params.regex)
        self.reads.append(text)
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            self.ended.append(text)
            raise
        if (error := self._becomes(text)) is not None:
            raise error
        return AddGrammar(f"grammar of {text}", None, 1 << 20)

    def has_grammar(self, grammar: str) -> bool:
        return self.taught.use(grammar)

    def add_grammar(self, form: AddGrammar) -> None:
        assert form.grammar not in self.taught
        self.taught.add(form)


def asked(forms: GrammarCompiler, text: str, caller: str = "a") -> asyncio.Task[str]:
    return asyncio.ensure_future(forms.grammar(StructuredOutputsParams(regex=text), caller))


def test_only_errors_of_the_grammar_itself_are_cached() -> None:
    errors = {
        "wrong": ArgumentError("structured_outputs: wrong"),
        "endless": JobError("takes more than 4 s of a processor"),
        "unlucky": HttpError(503, "the machine is under load", headers={"Retry-After": "1"}),
    }

    async def main() -> list[str]:
        reader = Reader(lambda text: errors.get(text))
        reader.goes_on.set()
        forms = GrammarCompiler(reader, reader)  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(ArgumentError, match="^structured_outputs: wrong$"):
                await asked(forms, "wrong")
            with pytest.raises(ArgumentError, match="^structured_outputs: .*regex .*4 s"):
                await asked(forms, "endless")
            with pytest.raises(HttpError, match="under load"):
                await asked(forms, "unlucky")
            assert await asked(forms, "good") == "grammar of good"
        return reader.reads

    assert asyncio.run(main()) == ["wrong", "endless", "unlucky", "good", "unlucky"]


def test_simultaneous_requests_share_one_compilation_which_ends_with_the_last_waiter() -> None:
    async def main() -> None:
        reader = Reader()
        forms = GrammarCompiler(reader, reader)  # type: ignore[arg-type]
        equal, alone = [asked(forms, "equal") for _ in range(256)], asked(forms, "alone")
        other = asked(forms, "equal", "b")  # who waits for another caller's would wait for his turn, too
        await asyncio.sleep(0.01)
        assert reader.reads == ["equal", "alone", "equal"]
        for task in [*equal[1:], alone]:
            task.cancel()
        await asyncio.sleep(0.01)
        assert reader.ended == ["alone"]
        reader.goes_on.set()
        assert await asyncio.gather(equal[0], other) == ["grammar of equal"] * 2

    asyncio.run(main())


def test_a_grammar_that_the_engine_evicted_is_compiled_again() -> None:
    async def main() -> list[str]:
        reader = Reader()
        reader.goes_on.set()
        forms = GrammarCompiler(reader, reader)  # type: ignore[arg-type]
        for text in ("a", "b", "a"):
            await asked(forms, text)
        reader.taught = GrammarCache()
        await asked(forms, "a")
        return reader.reads

    assert asyncio.run(main()) == ["a", "b", "a"]


def test_the_grammar_cache_is_bounded_and_evicts_the_least_recently_used() -> None:
    taught, kept, rng = GrammarCache(), list[tuple[str, int]](), random.Random(3)
    for number in range(300):
        nbytes = rng.choice([1 << 10, 1 << 20, 5 << 20, 40 << 20])
        name = f"form {number}"
        gone = taught.add(AddGrammar(name, None, nbytes))
        kept.append((name, nbytes))
        expected = []
        while len(kept) > 1 and (len(kept) > 64 or sum(size for _, size in kept) > 32 << 20):
            expected.append(kept.pop(0)[0])
        assert gone == expected
        used = rng.choice(kept)
        assert taught.use(used[0])
        kept.remove(used)
        kept.append(used)
        assert not any(each in taught for each in gone)


def test_callers_without_number_neither_fill_the_queue_nor_slow_it() -> None:
    queue = FairQueue()
    assert queue.start_tag("greedy", 1000) == 0
    assert queue.start_tag("greedy", 1000) == 1000
    for number in range(3 * MAX_CALLERS):
        assert queue.start_tag(f"caller {number}", 10) == 0
    assert queue.start_tag("greedy", 1) == 0  # who has not asked for longest is forgotten
    assert queue.start_tag(f"caller {3 * MAX_CALLERS - 1}", 10) == 10
    queue.began(50)
    assert queue.start_tag("new", 1) == 50
    assert queue.start_tag("new", 1) == 51


def caller(scope: dict[str, Any], keys: list[str]) -> str:
    found = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(caller_of(scope))

    async def nothing(*_: Any) -> Any: ...

    asyncio.run(Guard(app, partial(check_key, keys))(scope, nothing, nothing) if keys else app(scope, nothing, nothing))
    return found[0]


def test_a_caller_is_identified_by_its_valid_key_or_else_its_address() -> None:
    def scope(key: str, host: str | None, path: str = "/v1/completions") -> dict[str, Any]:
        client = None if host is None else (host, 1234)
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"x-forwarded-for", key.encode())]
        return {"type": "http", "method": "POST", "path": path, "headers": headers, "client": client}

    hosts = ("10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", None)
    assert len({caller(scope(key, host), []) for key in ("a", "b") for host in hosts}) == len(hosts) - 1
    assert caller(scope("a", "10.0.0.1"), []) == caller(scope("b", "10.0.0.1"), [])
    by_key = [caller(scope(key, host), ["a", "b"]) for key in ("a", "b") for host in hosts]
    assert len(set(by_key)) == 2
    assert not {"a", "b"} & set(by_key)
    assert caller(scope("a", "10.0.0.1", "/tokenize"), ["a", "b"]) == "10.0.0.1"


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


def test_a_response_format_is_enforced_streamed_and_not(client: openai.OpenAI) -> None:
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


def test_a_truncated_structured_output_ends_with_length(client: openai.OpenAI) -> None:
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
            first, *more = [call.function for chunk in chunks for call in chunk.delta.tool_calls or []]
            first.arguments += "".join(each.arguments for each in more)
            calls = [first]
            reason = chunks[-1].finish_reason
        else:
            answer = chat(client, parallel_tool_calls=False, **options)
            assert answer.message.content is None
            calls, reason = [call.function for call in answer.message.tool_calls], answer.finish_reason
        (call,) = calls
        assert call.name in (("warm", "cold") if choice == "required" else ("cold",))
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        assert reason == ("tool_calls" if choice == "required" else "stop")


UNENFORCED = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
ARRAY, JSON_OBJECT = {"type": "array"}, {"type": "json_object"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format", "type"),
    ({"response_format": {"type": ["text"]}}, "response_format", "type"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": JSON_OBJECT | {"json_schema": {"schema": ARRAY}}}, "response_format", "'json_schema'"),
    ({"response_format": {"type": "text", "schema": ARRAY}}, "response_format", "'schema'"),
    ({"response_format": UNENFORCED}, "response_format", '["not"]'),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "'yaml'"),
    ({"structured_outputs": {"regex": "a"}, "response_format": JSON_OBJECT}, "response_format", "structured_outputs"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice"),
    ({"tools": [tool("warm")], "tool_choice": {"type": "function", "function": {"name": "hot"}}}, "tool_choice", ""),
    ({"tools": [tool("warm", parameters={"type": "object", "if": {}})], "tool_choice": "required"}, "tools", '["if"]'),
    ({"tools": [tool("warm")], "tool_choice": "required", "regex": "a"}, "regex", "tools"),
]


def test_an_unenforceable_output_is_400_with_its_field_and_affects_no_other_request(served: Served) -> None:
    answers: list[Any] = []
    with served.client() as client:

        def plain() -> None:
            body = {"messages": ASKED, "chat_template": TEMPLATE, "temperature": 0, "max_tokens": 100}
            response = client.post("/v1/chat/completions", json=body | {"ignore_eos": True})
            answers.append(response.json()["choices"][0]["message"]["content"])

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


def test_a_slow_schema_blocks_no_other_request(served: Served) -> None:
    large = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1500)}}
    slow = {"prompt": "x", "max_tokens": 2}
    with served.client() as client:

        def ask(body: dict[str, Any]) -> float:
            began = time.perf_counter()
            assert client.post("/v1/completions", json=body).status_code == 200
            return time.perf_counter() - began

        def blocks_none(attempt: int) -> bool:
            schema = large | {"required": [f"p{attempt}"]}  # another one is not cached
            took: list[float] = []
            long = threading.Thread(target=lambda: took.append(ask(slow | {"structured_outputs": {"json": schema}})))
            long.start()
            others = []
            while long.is_alive():
                others.append(ask({"prompt": "12+30=", "max_tokens": 4}))
            long.join()
            return max(others) < took[0] / 2

        assert holds(blocks_none)
        # too many ways to go on, which shows behind the first token
        lost = client.post("/v1/completions", json=slow | {"structured_outputs": {"json": large}})
        assert lost.status_code == 400
        assert re.search("its grammar cannot be followed further: .*items", lost.json()["error"]["message"])
        assert len(lost.text) < 500
    served.until_idle()
