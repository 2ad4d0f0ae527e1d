"""Clients of others drive a real server: LangChain, `llm`, and the requests that harnesses are documented to send."""

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from chain_model import save_chain_model
from served import Served, serving

KEY = "secret"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
QUESTION = {"role": "user", "content": "What is 417 + 385?"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = save_chain_model(tmp_path_factory.mktemp("chain"))
    options = f"--served-model-name chain --api-key {KEY} --max-batch-size 8 --max-sequence-length 2048"
    with serving(*options.split(), model=str(model)) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.client(headers={"Authorization": f"Bearer {KEY}"}) as made:
        yield made


def events_of(text: str) -> list[dict[str, Any]]:
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI) -> None:
    asked = {"model": "chain", "messages": [QUESTION], "tools": [TOOL], "temperature": 0}
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I add."
    (call,) = choice.message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 417, "b": 385})
    turns = [QUESTION, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "802"}]
    (choice,) = client.chat.completions.create(**asked | {"messages": turns}).choices
    assert (choice.message.content, choice.finish_reason) == ("The sum is 802.", "stop")
    (choice,) = client.chat.completions.create(**asked, tool_choice="none").choices
    assert choice.message.content == "Hello, world!"


def test_a_streamed_call_is_put_together_by_the_client(client: openai.OpenAI) -> None:
    asked = {"model": "chain", "messages": [QUESTION], "tools": [TOOL], "temperature": 0, "n": 2}
    with client.chat.completions.stream(**asked) as stream:
        whole = stream.get_final_completion()
    for choice in whole.choices:
        assert choice.message.content == "I add."
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert len(call.id) == 9
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 417, "b": 385})


def test_tools_without_a_name_are_refused(client: openai.OpenAI) -> None:
    for tool in ({"type": "function"}, {"type": "function", "function": {"name": {}}}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="chain", messages=[QUESTION], tools=[tool])
        assert caught.value.param == "tools[0]"


def test_a_template_of_a_client_is_refused(client: openai.OpenAI) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(openai.BadRequestError, match="trust_request_chat_template"):
        client.chat.completions.create(model="chain", messages=[QUESTION], extra_body={"chat_template": endless})
    smuggled = {"chat_template_kwargs": {"chat_template": endless}}
    with pytest.raises(openai.BadRequestError, match="chat_template"):
        client.chat.completions.create(model="chain", messages=[QUESTION], extra_body=smuggled)


def test_langchain_invokes_streams_and_calls_tools(served: Served) -> None:
    langchain = pytest.importorskip("langchain_openai")
    options = {"base_url": f"{served.address}/v1", "api_key": KEY, "model": "chain", "temperature": 0, "max_retries": 0}
    chat = langchain.ChatOpenAI(**options)
    answer = chat.invoke("Hi")
    assert answer.content == "Hello, world!"
    assert answer.usage_metadata["output_tokens"] == 5
    pieces = list(chat.stream([("system", "Be kind."), ("user", "Hi")], stream_usage=True))
    assert "".join(piece.content for piece in pieces) == "Hello, world!"
    assert asyncio.run(chat.ainvoke("Hi")).content == "Hello, world!"
    assert [each.content for each in chat.batch(["Hi"] * 3)] == ["Hello, world!"] * 3
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke("Hi").response_metadata["logprobs"]["content"]
    assert [token["token"] for token in scored][:4] == ["Hello", ", ", "world", "!"]
    agent = chat.bind_tools([TOOL])
    called = agent.invoke("What is 417 + 385?")
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("add", {"a": 417, "b": 385})]
    gathered, *others = list(agent.stream("What is 417 + 385?"))
    for piece in others:
        gathered += piece
    assert [(call["name"], call["args"]) for call in gathered.tool_calls] == [("add", {"a": 417, "b": 385})]
    told = [("user", "What is 417 + 385?"), called, {"role": "tool", "tool_call_id": "1", "content": "802"}]
    assert agent.invoke(told).content == "The sum is 802."
    assert langchain.OpenAI(**options).invoke("<|chat|>") == "Hello, world!"


def test_llm_prompts_and_runs_a_tool_from_the_command_line(served: Served, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        "- {model_id: local, model_name: chain, supports_tools: true, api_key_name: local,"
        f" api_base: '{served.address}/v1'}}\n"
    )

    def llm(*arguments: str) -> str:
        environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "PYTHONUTF8": "1"}
        command = [sys.executable, "-m", "llm", "-m", "local", "--key", KEY, *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert llm("Hi") == "Hello, world!"
    assert llm("--no-stream", "-s", "Be kind.", "-o", "temperature", "0", "Hi") == "Hello, world!"
    function = "def add(a: int, b: int) -> int:\n    return a + b\n"
    assert llm("--functions", function, "What is 417 + 385?").endswith("The sum is 802.")


def lm_eval_scores(choices: list[dict[str, Any]], contexts: list[int]) -> list[tuple[float, bool]]:
    """Read log-probabilities as lm-eval 0.4.13 does: their sum, and whether each is the largest, as the same float."""
    scores = []
    for choice, context in zip(sorted(choices, key=lambda each: each["index"]), contexts, strict=True):
        values = choice["logprobs"]["token_logprobs"][context:-1]
        tops = choice["logprobs"]["top_logprobs"][context:-1]
        scores.append((sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))))
    return scores


def test_lm_evals_local_completions_score_and_generate(http: httpx.Client) -> None:
    # of lm-eval 0.4.13: lm_eval/models/openai_completions.py and api_models.py
    def ids(text: str) -> list[int]:
        return http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]

    (chat,), eos = ids("<|chat|>"), ids("<|eos|>")
    hello = http.post("/v1/completions", json={"prompt": [chat], "max_tokens": 4, "return_token_ids": True}).json()
    right = hello["choices"][0]["token_ids"]
    prompts = [[chat, *right], [chat, *reversed(right)], [*eos, chat, right[0]]]
    scoring = {
        "model": "chain", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
        "echo": True,
    }  # fmt: skip
    scores = lm_eval_scores(http.post("/v1/completions", json=scoring).json()["choices"], [1, 1, 2])
    assert [is_greedy for _, is_greedy in scores] == [True, False, True]
    assert all(math.isfinite(score) for score, _ in scores)
    one = http.post("/v1/completions", json=scoring | {"prompt": prompts[:1]}).json()["choices"]  # batch_size 1
    assert lm_eval_scores(one, [1]) == scores[:1]
    text = http.post("/detokenize", json={"tokens": prompts[0]}).json()["prompt"]
    assert ids(text) != prompts[0]  # this tokenizer reads no words, so a text would be scored as other tokens
    generating = {
        "prompt": [[chat], ids("<|result|>")], "model": "chain", "max_tokens": 32, "temperature": 0,
        "stop": ["world", "<|eos|>"], "seed": 1234,
    }  # fmt: skip
    for asked in (generating, generating | {"prompt": ["<|chat|>", "<|result|>"]}):  # tokenized_requests or not
        texts = [choice["text"] for choice in http.post("/v1/completions", json=asked).json()["choices"]]
        assert texts == ["Hello, ", "The sum is 802."]
    chatting = {
        "messages": [{"role": "user", "content": "Hi", "type": "text"}], "model": "chain", "max_tokens": 256,
        "temperature": 0, "stop": ["world"], "seed": 1234,
    }  # fmt: skip
    assert http.post("/v1/chat/completions", json=chatting).json()["choices"][0]["message"]["content"] == "Hello, "


def test_lm_eval_takes_its_tokenizer_from_the_server(http: httpx.Client) -> None:
    # of lm-eval 0.4.13: check_remote_tokenizer_support and RemoteTokenizer in lm_eval/utils.py, which send no key
    with httpx.Client(base_url=http.base_url) as stranger:
        info = stranger.get("/tokenizer_info", headers={"Content-Type": "application/json"}).json()
        assert info["eos_token"] == "<|eos|>"
        assert "message['content']" in info["chat_template"]
        tokens = stranger.post("/tokenize", json={"prompt": "<|chat|>", "add_special_tokens": False}).json()["tokens"]
        assert stranger.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "<|chat|>"}


def test_vllm_bench_serve_gets_what_it_counts(http: httpx.Client) -> None:
    # of vLLM 0.32.0: vllm/benchmarks/lib/endpoint_request_func.py and vllm/benchmarks/serve.py
    stream = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
    completion = {
        "model": "chain", "prompt": "<|result|>", "repetition_penalty": 1.0, "max_tokens": 16, "logprobs": None,
    }  # fmt: skip
    events = events_of(http.post("/v1/completions", json=completion | stream, headers={"x-request-id": "0"}).text)
    assert "".join(choice["text"] for event in events for choice in event["choices"]).startswith("The sum is 802.")
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 16
    assert events[-1]["usage"]["prompt_tokens"] == 1
    content = [{"type": "text", "text": "Hi"}]
    chat = {"model": "chain", "messages": [{"role": "user", "content": content}], "max_completion_tokens": 16}
    events = events_of(http.post("/v1/chat/completions", json=chat | stream).text)
    said = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(said).startswith("Hello, world!")
    assert events[-1]["usage"]["completion_tokens"] == 16
    assert http.get("/v1/models").json()["data"][0]["id"] == "chain"
    assert http.get("/metrics").status_code == 200


def test_guidellm_gets_what_it_counts(http: httpx.Client) -> None:
    # of guidellm 0.8.1: src/guidellm/backends/openai/http.py and request_handlers.py
    assert http.get("/health").status_code == 200
    stream = {"model": "chain", "stream": True}
    stream["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    completion = stream | {"max_tokens": 16, "stop": None, "ignore_eos": True, "prompt": "<|result|>"}
    events = events_of(http.post("/v1/completions", json=completion).text)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[0] >= 1
    assert counts == sorted(counts)
    assert counts[-1] == 16
    text = [{"type": "text", "text": "Hi"}]
    chat = stream | {"max_completion_tokens": 16, "stop": None, "ignore_eos": True}
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]
    events = events_of(http.post("/v1/chat/completions", json=chat | {"messages": turns}).text)
    said = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(said).startswith("Hello, world!")
    assert events[-1]["usage"]["completion_tokens"] == 16
    called = stream | {"tools": [TOOL], "tool_choice": "auto", "messages": turns}  # a turn that calls
    events = events_of(http.post("/v1/chat/completions", json=called).text)
    calls = [call for event in events for c in event["choices"] for call in c["delta"].get("tool_calls", ())]
    assert calls[0]["index"] == 0
    assert calls[0]["function"]["name"] == "add"
    arguments = "".join(call["function"]["arguments"] for call in calls)
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": '{"status": "ok"}'}
    function = {"name": "add", "arguments": arguments}
    assistant = {
        "role": "assistant", "content": None,
        "tool_calls": [{"id": calls[0]["id"], "type": "function", "function": function}],
    }  # fmt: skip
    answered = chat | {"tools": [TOOL], "tool_choice": "none", "messages": [*turns, assistant, result]}
    events = events_of(http.post("/v1/chat/completions", json=answered).text)
    said = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(said).startswith("The sum is 802.")


def test_open_webui_lists_models_chats_goes_on_and_asks_for_a_title(http: httpx.Client) -> None:
    # of Open WebUI 0.12.4: generate_chat_completion in backend/open_webui/routers/openai.py, tasks.py, utils/payload.py
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("chain", "model")
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    chat = {
        "stream": True, "model": "chain", "messages": turns, "stream_options": {"include_usage": True},
        "temperature": 0.0, "top_p": 0.9, "min_p": 0.0, "max_tokens": 64, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "reasoning_effort": "low", "seed": 7, "stop": ["\n\n"], "logit_bias": {"1": -1},
        "response_format": {"type": "text"},
    }  # fmt: skip
    events = events_of(http.post("/v1/chat/completions", json=chat).text)
    assert "".join(c["delta"].get("content") or "" for event in events for c in event["choices"]) == "Hello, world!"
    assert events[-1]["usage"]["completion_tokens"] == 5
    begun = [*turns, {"role": "assistant", "content": "<|chat|>"}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "stream": False, "max_tokens": 4}
    response = http.post("/v1/chat/completions", json={"model": "chain", "messages": begun} | more)
    assert response.status_code == 200
    title = {"model": "chain", "messages": turns[1:], "stream": False, "max_tokens": 1000}
    assert http.post("/v1/chat/completions", json=title).json()["choices"][0]["message"]["content"] == "Hello, world!"
