"""Ollama's requests are translated to ours; the answers have its form (`test_model_pool` asks a server)."""

import json
from typing import Any

import pytest
from preprocessors import demo_preprocessor, demo_tokenizer

from graphdecode.server.endpoints import OLLAMA
from graphdecode.server.http import HttpError
from graphdecode.server.preprocessing import Preprocessor

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m.get('reasoning_content', '') }}{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% if enable_thinking is defined %}thinks {{ enable_thinking }}{% endif %}"
)
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def preprocessor() -> Preprocessor:
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return demo_preprocessor(tokenizer)


def prepared(preprocessor: Preprocessor, path: str, **body: Any) -> Any:
    ready, _, model = OLLAMA[path].prepared(preprocessor, json.dumps({"model": "demo"} | body).encode(), in_child=True)
    assert model == "demo"
    return ready


def prompt_of(preprocessor: Preprocessor, path: str, **body: Any) -> str:
    return str(prepared(preprocessor, path, **body).prompts[0].prompt)


def test_a_chat_is_rendered_with_its_calls_and_results(preprocessor: Preprocessor) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rom"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
    ]
    text = prompt_of(preprocessor, "/api/chat", messages=messages)
    assert text.startswith("<system>Be brief.<user>Hi<assistant>hm")
    assert text.index('"weather", "arguments": {"city": "Rom"}') < text.index("sunny")
    assert prompt_of(preprocessor, "/api/chat", messages=[USER], think=False).endswith("thinks False")


def test_options_and_formats_are_ours(preprocessor: Preprocessor) -> None:
    options = {"temperature": 0.5, "num_predict": 7, "top_k": 3, "repeat_penalty": 1.2, "stop": ["x"], "num_ctx": 4096}
    ready = prepared(preprocessor, "/api/chat", model="demo:latest", messages=[USER], options=options, format="json")
    params = ready.prompts[0].params.sampling
    assert (params.temperature, params.max_tokens, params.top_k, params.repetition_penalty) == (0.5, 7, 3, 1.2)
    assert (params.stop_strings, ready.body.stream, ready.structured is None) == (("x",), True, False)
    ready = prepared(preprocessor, "/api/generate", prompt="Hi", stream=False, options={"num_predict": -1})
    assert (ready.prompts[0].params.sampling.max_tokens, ready.body.stream) == (None, False)


def test_a_prompt_is_a_chat_unless_it_is_raw(preprocessor: Preprocessor) -> None:
    assert prompt_of(preprocessor, "/api/generate", prompt="Hi", system="S") == "<system>S<user>Hi"
    assert prompt_of(preprocessor, "/api/generate", prompt="Hi", raw=True) == "Hi"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/api/chat", {"messages": []}, "messages"),
        ("/api/chat", {"messages": [USER | {"images": ["aa"]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ("/api/chat", {"messages": [USER], "format": "xml"}, "format"),
        ("/api/chat", {"messages": [USER], "options": {"num_predict": "many"}}, "max_tokens"),
        ("/api/generate", {"prompt": "a", "raw": True, "options": {"top_k": "x"}}, "top_k"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_what_cannot_be_served_is_named(
    preprocessor: Preprocessor, path: str, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(HttpError) as refused:
        prepared(preprocessor, path, **body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.ollama_body == {"error": str(refused.value)}
