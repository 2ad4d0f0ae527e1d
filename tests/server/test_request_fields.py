"""Every field of vLLM's, OpenAI's and llama.cpp's requests is honoured, without effect, or 400 by its name."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from preprocessors import demo_preprocessor, demo_tokenizer
from tokenizers.processors import TemplateProcessing

from graphdecode.server.app import prepared_text, prepared_tokens
from graphdecode.server.endpoints import GENERATING, Endpoint
from graphdecode.server.http import HttpError
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.protocol import Detokenize, LoadAdapter, Tokenize, UnloadAdapter
from graphdecode.server.request_fields import unsupported_fields

# server and version -> path -> its fields, read from its sources
PINNED: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("request_fields.json").read_text())
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TEMPLATE += "{% if tools %}{{ tools }}{% endif %}{{ documents }}{{ reasoning_effort }}"
TEMPLATE += "{{ enable_thinking }}{{ word }}{% if add_generation_prompt %}={% endif %}"
CALLS = "<tool_call>{{ messages[-1].content }}"  # it names how calls are written, so that there may be several
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CHAT = {"messages": [{"role": "user", "content": "1+1"}], "chat_template": TEMPLATE}
PATHS: dict[str, Endpoint] = {
    **GENERATING,  # type: ignore[dict-item]
    "/tokenize": Endpoint(Tokenize, prepared_tokens, None),  # type: ignore[arg-type]
    "/detokenize": Endpoint(Detokenize, prepared_text, None),  # type: ignore[arg-type]
    "/v1/load_lora_adapter": Endpoint(LoadAdapter, lambda _, body: body, None),  # type: ignore[arg-type]
    "/v1/unload_lora_adapter": Endpoint(UnloadAdapter, lambda _, body: body, None),  # type: ignore[arg-type]
}
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "1+1="},
    "/v1/chat/completions": CHAT,
    "/tokenize": {"prompt": "1+1="},
    "/detokenize": {"tokens": [49]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}


class Beside(NamedTuple):
    """A field's value, beside others that it needs."""

    others: dict[str, Any]
    value: Any


MESSAGES = {"prompt": None} | CHAT
# values that change what is prepared from the plain body
GENERATION: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.5,
    "seed": 3,
    "n": 2,
    "max_tokens": 7,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "logit_bias": {"50": 1.0},
    "allowed_token_ids": [50],
    "bad_words": ["a"],
    "stop": "a",
    "stop_token_ids": [50],
    "ignore_eos": True,
    "min_tokens": 2,
    "thinking_token_budget": 5,
    "prompt_logprobs": 2,
    "truncate_prompt_tokens": 2,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "add_special_tokens": False,
    "truncation_side": Beside({"truncate_prompt_tokens": 2}, "right"),
    "cache_salt": "a",
    "priority": 2,
    "model": "other",
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "regex": "a",
    "grammar": 'root ::= "a"',
    "json_schema": {"type": "integer"},
    "guided_whitespace_pattern": Beside({"guided_json": {}}, " "),
}
CHANGES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**GENERATION, "prompt": "2", "logprobs": 2, "echo": Beside({"logprobs": 2}, True)},
    "/v1/chat/completions": {
        **GENERATION,
        "add_special_tokens": True,
        "messages": [{"role": "user", "content": "2"}],
        "tools": TOOLS,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template": "a",
        "chat_template_kwargs": {"word": "a"},
        "max_completion_tokens": 7,
        "logprobs": True,
        "top_logprobs": Beside({"logprobs": True}, 2),
        "tool_choice": Beside({"tools": TOOLS}, "required"),
        "parallel_tool_calls": Beside({"tools": TOOLS, "tool_choice": "required", "chat_template": CALLS}, False),
        "documents": [{"text": "a"}],
        "reasoning_effort": "low",
        "echo": Beside({"messages": [{"role": "assistant", "content": "2"}], "continue_final_message": True}, True),
    },
    "/tokenize": {
        "prompt": "2",
        "add_special_tokens": False,
        "return_token_strs": True,
        "messages": Beside(MESSAGES, [{"role": "user", "content": "2"}]),
        "tools": Beside(MESSAGES, TOOLS),
        "chat_template": Beside(MESSAGES, "a"),
        "chat_template_kwargs": Beside(MESSAGES, {"word": "a"}),
        **{
            name: Beside(MESSAGES, not name.startswith("add"))
            for name in ("add_generation_prompt", "continue_final_message")
        },
    },
    "/detokenize": {"tokens": [50]},
    "/v1/load_lora_adapter": {"lora_name": "b", "lora_path": "c"},
    "/v1/unload_lora_adapter": {"lora_name": "b"},
}
# fields that the response reads
LATER = {
    "include_reasoning",
    "stream",
    "stream_options",
    "request_id",
    "return_token_ids",
    "return_tokens_as_token_ids",
}


@pytest.fixture(scope="module")
def preprocessor() -> Preprocessor:
    tokenizer = demo_tokenizer()
    begins = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.backend_tokenizer.post_processor = begins
    return demo_preprocessor(tokenizer, tokens=1024, trust_request_chat_template=True)


def prepared(preprocessor: Preprocessor, path: str, body: dict[str, Any]) -> Any:
    found = PATHS[path].prepared(preprocessor, json.dumps(body).encode(), in_child=True)
    assert found is not None
    ready, unknown, _ = found
    assert unknown == ()
    if isinstance(ready, bytes):
        return ready
    return vars(ready) if hasattr(ready, "lora_name") else ready[1:]  # without the body that the response reads


@pytest.mark.parametrize(("server", "path"), [(server, path) for server, paths in PINNED.items() for path in paths])
def test_every_field_of_the_servers_is_known(server: str, path: str) -> None:
    kind = PATHS[path].body_type
    honoured, others = kind.model_fields.keys(), unsupported_fields(kind).keys()
    assert set(PINNED[server][path].split()) - honoured - others == honoured & others == set()


@pytest.mark.parametrize("path", PATHS)
def test_fields_that_are_not_honoured_are_refused_by_name_or_change_nothing(path, preprocessor):
    plain = prepared(preprocessor, path, PLAIN[path])
    for name, entry in unsupported_fields(PATHS[path].body_type).items():
        odd = {"no": ["such", "value"]}
        for value in [odd] if entry is None else entry.neutral:
            assert prepared(preprocessor, path, PLAIN[path] | {name: value}) == plain, (name, value)
        if entry is not None:
            with pytest.raises(HttpError, match=f"^{name} ") as refused:
                prepared(preprocessor, path, PLAIN[path] | {name: odd})
            assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize(("name", "value"), [("repeat_penalty", 1.1), ("n_cmpl", True), ("xtc_probability", False)])
def test_a_neutral_number_is_no_other_value_and_no_truth(preprocessor: Preprocessor, name: str, value: Any) -> None:
    with pytest.raises(HttpError, match=f"^{name} {value} "):
        prepared(preprocessor, "/v1/completions", PLAIN["/v1/completions"] | {name: value})
    prepared(preprocessor, "/v1/completions", PLAIN["/v1/completions"] | {"repeat_penalty": 1.0, "n_cmpl": 1})


@pytest.mark.parametrize("path", PATHS)
def test_fields_that_are_honoured_change_what_is_prepared(path, preprocessor):
    changes, honoured = CHANGES[path], PATHS[path].body_type.model_fields.keys()
    of_no_engine = {"model"} if path not in GENERATING else {"best_of"}  # that is n, or refused
    assert changes.keys() | LATER >= honoured - of_no_engine
    for name, change in changes.items():
        others, value = change if isinstance(change, Beside) else ({}, change)
        before = prepared(preprocessor, path, PLAIN[path] | others)
        assert prepared(preprocessor, path, PLAIN[path] | others | {name: value}) != before, name


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"guided_json": {"type": "integer"}}, {"json": {"type": "integer"}}),
        ({"guided_json": '{"type": "integer"}'}, {"json": '{"type": "integer"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'root ::= "a"', "guided_json": None}, {"grammar": 'root ::= "a"'}),
        ({"json_schema": {"type": "integer"}, "grammar": ""}, {"json": {"type": "integer"}}),
        ({"json_schema": {}}, {"json": {"type": "object"}}),  # as llama.cpp's
        ({"response_format": {"type": "json_object", "schema": {"type": "array"}}}, {"json": {"type": "array"}}),
        ({"response_format": {"type": "json_object", "schema": {}}}, {"json_object": True}),
    ],
)
@pytest.mark.parametrize("path", GENERATING)
def test_other_servers_fields_of_structured_outputs_mean_ours(preprocessor, path, fields, meant):
    _, found, *_ = prepared(preprocessor, path, PLAIN[path] | fields)
    _, expected, *_ = prepared(preprocessor, path, PLAIN[path] | {"structured_outputs": meant})
    assert found.params == expected.params
    assert found.field in fields


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"guided_json": {}, "regex": "a"}, "guided_json"),
        ({"response_format": {"type": "json_object"}, "grammar": 'start: "a"'}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_choice": []}, "guided_choice"),
        ({"json_schema": "no schema"}, "json_schema"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a" * 129}, "cache_salt"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_fields_that_cannot_be_honoured_are_named(preprocessor, fields, named):
    with pytest.raises(HttpError) as refused:
        prepared(preprocessor, "/v1/completions", PLAIN["/v1/completions"] | fields)
    assert (refused.value.status, refused.value.param) == (400, named)


@pytest.mark.parametrize("prompt", [[[]], [[49], []]])
def test_a_prompt_without_tokens_is_refused(preprocessor: Preprocessor, prompt: Any) -> None:
    with pytest.raises(HttpError, match="prompt"):
        prepared(preprocessor, "/v1/completions", {"prompt": prompt})
    with pytest.raises(HttpError, match="^temperature must be .*got 1e.38"):
        prepared(preprocessor, "/v1/completions", {"prompt": "a", "temperature": 1e38})


@pytest.mark.parametrize(("side", "kept"), [(None, "45"), ("left", "45"), ("right", "12")])
def test_a_prompt_is_cut_at_the_side_that_is_named(preprocessor: Preprocessor, side: str | None, kept: str) -> None:
    cut = {"prompt": [49, 50, 51, 52, 53], "truncate_prompt_tokens": 2, "truncation_side": side}
    ((prompt,), *_) = prepared(preprocessor, "/v1/completions", cut)
    assert prompt.token_ids == list(kept.encode())
    ((text,), *_) = prepared(preprocessor, "/v1/completions", cut | {"prompt": "12345"})
    assert text.token_ids == {"45": [256, 53], "12": [256, 49]}[kept]  # with the beginning-of-sequence token


def test_documents_and_an_effort_reach_the_template(preprocessor: Preprocessor) -> None:
    def prompt_of(**fields: Any) -> str:
        template = "{{ documents[0].text }} {{ reasoning_effort }} {{ enable_thinking }}"
        ((prompt,), *_) = prepared(preprocessor, "/v1/chat/completions", CHAT | {"chat_template": template} | fields)
        return str(prompt.prompt)

    assert prompt_of(documents=[{"text": "a"}], reasoning_effort="low") == "a low True"
    assert prompt_of(documents=[{"text": "a"}], reasoning_effort="none") == "a none False"
    thinks = {"enable_thinking": False, "reasoning_effort": "high"}
    assert prompt_of(documents=[{"text": "a"}], reasoning_effort="low", chat_template_kwargs=thinks) == "a low False"


@pytest.mark.parametrize(
    ("fields", "echoed"),
    [
        ({"continue_final_message": True}, "2"),
        ({"add_generation_prompt": False}, "2"),
        ({}, "2"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": part} for part in "ab"]}]}, "a\nb"),
        ({"messages": [{"role": "user", "content": "2"}]}, ""),
        ({"messages": [{"role": "user", "content": "2"}], "add_generation_prompt": False}, "2"),
        ({"echo": False}, ""),
    ],
)
def test_the_last_message_is_echoed_where_the_answer_goes_on_with_its_role(preprocessor, fields, echoed):
    asked = CHAT | {"messages": [{"role": "assistant", "content": "2"}], "echo": True} | fields
    assert prepared(preprocessor, "/v1/chat/completions", asked)[4] == echoed


CHATTED = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "named", "types"),
    [
        ({"prompt": 5}, "prompt", ["a string", "an array of strings", "an array of integers"]),
        ({"prompt": ["a", 5]}, "prompt[1]", ["a string"]),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]", ["an integer"]),
        ({"stop": 5}, "stop", ["a string", "an array of strings"]),
        ({"stop": ["a", 5]}, "stop[1]", ["a string"]),
        ({"logit_bias": {"3": "x"}}, "logit_bias.3", ["a number"]),
        ({"stream_options": {"include_usage": 5}}, "stream_options.include_usage", ["true or false"]),
        ({"messages": [CHATTED, 5]}, "messages[1]", ["an object"]),
        ({"messages": [CHATTED, {"role": "user", "content": 5}]}, "messages[1].content", []),
        ({"messages": [{"role": "user"}]}, "messages[0].content", []),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0]", []),
        ({"tools": [TOOLS[0], 5]}, "tools[1]", ["an object"]),
        ({"tools": [TOOLS[0], {}]}, "tools[1]", []),
        ({"tool_choice": "always"}, "tool_choice", ["'required'", "an object"]),
    ],
)
def test_an_error_in_a_list_names_the_element_and_the_types_of_json(preprocessor, fields, named, types):
    path = "/v1/chat/completions" if fields.keys() & {"messages", "tools", "tool_choice"} else "/v1/completions"
    with pytest.raises(HttpError) as refused:
        prepared(preprocessor, path, PLAIN[path] | fields)
    message = str(refused.value)
    assert refused.value.param == named
    assert message.startswith(named)
    assert [each for each in types if each not in message] == []
    assert not re.search(r"list\[|dict\[|literal|\bstr\b", message)


@pytest.mark.parametrize("n", [0, -1, 129, 1025])
def test_every_n_out_of_range_is_refused_with_the_servers_range(preprocessor: Preprocessor, n: int) -> None:
    with pytest.raises(HttpError, match=rf"^n must be .*1\.\.128, got {n}") as refused:
        prepared(preprocessor, "/v1/completions", {"prompt": "a", "n": n})
    assert (refused.value.status, refused.value.param) == (400, "n")


def test_a_prompt_can_be_echoed_with_nothing_generated_and_no_log_probabilities(preprocessor: Preprocessor) -> None:
    ((prompt,), *_) = prepared(preprocessor, "/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True})
    assert prompt.params.sampling.max_tokens == 0
    with pytest.raises(HttpError, match="max_tokens"):
        prepared(preprocessor, "/v1/completions", {"prompt": "a", "max_tokens": 0})
