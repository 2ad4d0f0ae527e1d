"""OpenAI's own client drives a real server, and gets what `LLM` gives alone."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from served import Served, serving

from graphdecode import LLM, SamplingParams
from graphdecode.engine import Event, RequestMetrics, TokenLogprobs
from graphdecode.models import resolve_model_path
from graphdecode.server.choices import in_pieces
from graphdecode.server.messages import in_parts
from graphdecode.text.outputs import CompletionOutput, RequestOutput, RequestState
from graphdecode.text.token_texts import TokenTexts
from graphdecode.text.tokenizer import load_tokenizer

KEY = "secret"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("server") / "server.toml"
    settings = f'[server]\napi_keys = ["{KEY}"]\ntrust_request_chat_template = true\n'
    file.write_text(settings + '[speculation]\nmethod = "ngram"\n')  # the library beside it decodes plainly
    with serving("--config", str(file), "--max-batch-size", "8", "--max-sequence-length", "256") as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM("demo", device="cpu", max_batch_size=8, max_sequence_length=256) as llm:
        yield llm


def test_the_model_is_listed_by_its_name(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo").id == "demo"


def test_a_completion_is_what_the_library_gives(client: openai.OpenAI, alone: LLM) -> None:
    answer = client.completions.create(model="demo", prompt="417+385=", max_tokens=8, temperature=0)
    assert answer.choices[0].text.strip() == "802"
    assert answer.choices[0].finish_reason == "stop"
    (output,) = alone.generate("417+385=", SamplingParams(temperature=0.0, max_tokens=8))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(output.outputs[0].token_ids)
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)


def test_choices_are_in_the_order_of_texts_and_token_ids(client: openai.OpenAI, alone: LLM) -> None:
    prompts = ["rev oceanic=", "12+30=", "sort zebra="]
    expected = ["cinaeco", "42", "aberz"]
    answer = client.completions.create(model="demo", prompt=prompts, max_tokens=16, temperature=0)
    assert [choice.text.strip() for choice in answer.choices] == expected
    ids = [alone.tokenizer.encode(prompt) for prompt in prompts]
    answer = client.completions.create(model="demo", prompt=ids, max_tokens=16, temperature=0)
    assert [choice.text.strip() for choice in answer.choices] == expected
    answer = client.completions.create(model="demo", prompt=ids[1], max_tokens=16, temperature=0)
    assert [choice.text.strip() for choice in answer.choices] == ["42"]


def test_sampled_answers_are_those_of_the_library(client: openai.OpenAI, alone: LLM) -> None:
    shared = {"n": 3, "temperature": 1.3, "top_p": 0.9, "seed": 11, "max_tokens": 20, "stop": "z"}
    params = SamplingParams(**shared, top_k=40, ignore_eos=True, logit_bias={100: 1.0})
    (expected,) = alone.generate("rev oceanic=", params)
    extra = {"top_k": 40, "ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(
        model="demo", prompt="rev oceanic=", **shared, logit_bias={"100": 1.0}, extra_body=extra
    )
    assert [choice.text for choice in answer.choices] == [output.text for output in expected.outputs]
    assert [choice.token_ids for choice in answer.choices] == [output.token_ids for output in expected.outputs]


def test_a_stream_has_the_same_text_and_ends_with_usage(client: openai.OpenAI) -> None:
    pieces = list(
        client.completions.create(
            model="demo", prompt="rev oceanic=", max_tokens=16, temperature=0, n=2, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    texts = ["", ""]
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert [text.strip() for text in texts] == ["cinaeco"] * 2
    assert pieces[-1].choices == []
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.total_tokens == pieces[-1].usage.prompt_tokens + pieces[-1].usage.completion_tokens
    assert all(piece.usage is None for piece in pieces[:-1])
    assert (
        sorted(choice.finish_reason for piece in pieces for choice in piece.choices if choice.finish_reason)
        == ["stop"] * 2
    )


def test_a_harness_scores_a_prompt_by_its_echo(client: openai.OpenAI, alone: LLM) -> None:
    ids = alone.tokenizer.encode("417+385=802")
    for max_tokens in (0, 1):
        answer = client.completions.create(
            model="demo", prompt=ids, max_tokens=max_tokens, temperature=0, echo=True, logprobs=1
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert len(logprobs.token_logprobs) == len(ids) + max_tokens
        assert logprobs.token_logprobs[0] is None
        assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
        answered = slice(len(ids) - 3, len(ids))  # the sum, of which the model is sure
        pairs = zip(logprobs.token_logprobs[answered], logprobs.top_logprobs[answered], strict=True)
        assert all(value == max(top.values()) for value, top in pairs)
        assert answer.choices[0].text.startswith("417+385=802")


def test_chats_go_through_the_template(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "417+385"}]}]
    extra = {"chat_template": TEMPLATE}
    answer = client.chat.completions.create(
        model="demo", messages=messages, temperature=0, max_completion_tokens=8, logprobs=True, top_logprobs=2,
        extra_body=extra,
    )  # fmt: skip
    choice = answer.choices[0]
    assert (choice.message.role, (choice.message.content or "").strip()) == ("assistant", "802")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * len(choice.logprobs.content)
    assert choice.logprobs.content[0].bytes == list(choice.logprobs.content[0].token.encode())
    pieces = list(
        client.chat.completions.create(
            model="demo", messages=messages, temperature=0, max_tokens=8, stream=True, extra_body=extra
        )
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces).strip() == "802"
    assert pieces[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 100000}, "n"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"prompt": [1, 10**9]}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "1" * 300}, None),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"extra_body": {"top_k": -7}}, "top_k"),
        ({"extra_body": {"stop_token_ids": ["a"]}}, "stop_token_ids[0]"),
    ],
)
def test_wrong_types_and_ranges_are_400_and_name_the_field(client, asked, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "demo", "prompt": "12+30=", "max_tokens": 4} | asked)  # type: ignore[call-overload]
    assert caught.value.param == param
    assert caught.value.message


def test_prefixes_in_the_cache_are_found_by_requests_of_their_salt_alone(client: openai.OpenAI) -> None:
    def cached(salt: str | None) -> int | None:
        answer = client.completions.create(
            model="demo", prompt="salted " * 12, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(salt) for salt in ("a", "b", None, "a", "b", None)] == [0, 0, 0, 80, 80, 80]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_answer_begins_with_the_message_that_it_goes_on_with(served: Served, stream: bool) -> None:
    asked = {
        "messages": [{"role": "user", "content": "12+30="}, {"role": "assistant", "content": "4"}],
        "chat_template": "{{ messages[0].content }}{{ messages[1].content }}",
        "continue_final_message": True,
        "echo": True,
        "temperature": 0,
        "stream": stream,
        "request_id": "mine",
    }
    with served.client(headers={"Authorization": f"Bearer {KEY}"}) as http:
        told = http.post("/v1/chat/completions", json=asked)
    assert told.status_code == 200, told.text
    if not stream:
        assert (told.json()["id"], told.json()["choices"][0]["message"]["content"]) == ("chatcmpl-mine", "42")
        return
    lines = [line.removeprefix("data: ") for line in told.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert "".join(deltas) == "42"


def test_a_chat_without_a_template_is_refused_with_advice(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="/v1/completions.*--chat-template"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "12+30="}])


def test_an_unknown_model_is_404_and_a_wrong_key_401(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")
    stranger = openai.OpenAI(base_url=f"{served.address}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with served.client() as anybody:
        assert anybody.get("/health").status_code == 200
        assert anybody.get("/v1/models").status_code == 401
        assert anybody.post("/sleep", headers={"Authorization": f"Bearer {KEY}"}).status_code == 404  # if not asked for


def test_unknown_fields_are_ignored_and_named_once(served: Served, client: openai.OpenAI) -> None:
    for _ in range(2):
        answer = client.completions.create(
            model="demo", prompt="12+30=", max_tokens=8, temperature=0, user="me", extra_body={"frobnicate": 1}
        )
        assert answer.choices[0].text.strip() == "42"
    served.until_said("frobnicate")
    assert sum("frobnicate" in line for line in served.lines) == 1


def test_texts_become_tokens_and_tokens_texts(served: Served, alone: LLM) -> None:
    with served.client() as http:
        ids = http.post("/tokenize", json={"prompt": "rev oceanic=", "return_token_strs": True}).json()
        assert ids["tokens"] == alone.tokenizer.encode("rev oceanic=")
        assert len(ids["token_strs"]) == ids["count"]
        assert http.post("/detokenize", json={"tokens": ids["tokens"]}).json() == {"prompt": "rev oceanic="}
        assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
        chat = {"messages": [{"role": "user", "content": "12+30"}], "chat_template": TEMPLATE}
        assert http.post("/tokenize", json=chat).json()["tokens"] == alone.tokenizer.encode("12+30=")
        assert http.get("/tokenizer_info").json()["vocab_size"] == len(alone.tokenizer)
        assert http.get("/version").json()["version"]


def test_the_async_client_gets_the_answers_of_the_library_under_load(served: Served, alone: LLM) -> None:
    prompts = [f"{a}+{b}=" for a in range(100, 110) for b in (7, 250)] + ["rev ocean=", "sort zebra="] * 6
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=3 + i % 9, ignore_eos=True, logprobs=1)
        for i in range(len(prompts))
    ]
    expected = [output.outputs[0].text for output in alone.generate(prompts, params)]

    async def ask(client: openai.AsyncOpenAI, i: int) -> str | None:
        asked = {
            "model": "demo", "prompt": prompts[i], "temperature": 0.9, "seed": i, "max_tokens": 3 + i % 9,
            "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        if i % 3 == 0:
            return str((await client.completions.create(**asked)).choices[0].text)
        text, pieces = "", await client.completions.create(**asked, stream=True)
        async for piece in pieces:
            text += "".join(choice.text for choice in piece.choices)
            if i % 3 == 2 and i % 2:  # leaves half way
                await pieces.close()
                return None
        return text

    async def main() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{served.address}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(len(prompts))))

    answers = asyncio.run(main())
    assert [(i, text) for i, text in enumerate(answers) if text is not None and text != expected[i]] == []
    served.until_idle()


def test_metrics_have_vllms_names(served: Served, client: openai.OpenAI) -> None:
    names = ("graphdecode:bucket_replays_total", f"{ACCEPTED}_total")  # both mean a token
    before, ran = served.metric("vllm:generation_tokens_total"), sum(map(served.metric, names))
    answer = client.completions.create(model="demo", prompt="12+30=", max_tokens=8, temperature=0)
    assert answer.usage is not None
    assert served.metric("vllm:generation_tokens_total") - before == answer.usage.completion_tokens
    assert served.metric("vllm:time_to_first_token_seconds_count") >= 1
    served.until_idle()
    assert sum(map(served.metric, names)) - ran >= answer.usage.completion_tokens
    assert served.metric("graphdecode:step_seconds_count") >= 1


def test_each_token_but_the_first_is_a_latency_and_parameters_and_steps_are_counted(served, client):
    names = ("vllm:inter_token_latency_seconds_count", "vllm:iteration_tokens_total_sum")
    names += ("vllm:request_params_n_sum", "vllm:request_params_max_tokens_sum")
    before = [served.metric(name) for name in names]
    for number in range(6):
        client.completions.create(
            model="demo", prompt=f"{number}xyz", max_tokens=9, n=2, extra_body={"ignore_eos": True}
        )
    served.until_idle()
    gaps, tokens, outputs, most = (served.metric(name) - was for name, was in zip(names, before, strict=True))
    assert (gaps, outputs, most) == (6 * 2 * 8, 6 * 2, 6 * 9)
    assert tokens >= 6 * (2 * 9 + 3)  # and the prompt's tokens but the last
    text = httpx.get(f"{served.address}/metrics").text
    assert re.search(r"^vllm:cache_config_info\{.*block_size=\"16\".*\} 1.0$", text, re.MULTILINE)
    for reason in ("capacity", "deferred"):
        assert f'vllm:num_requests_waiting_by_reason{{model_name="demo",reason="{reason}"}} 0.0' in text


def test_drafts_are_counted_under_vllms_names(served: Served, client: openai.OpenAI, alone: LLM) -> None:
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", ACCEPTED)
    before = [served.metric(f"{name}_total") for name in names]
    prompt, params = "abc" * 5, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=48, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == alone.generate(prompt, params)[0].outputs[0].text
    served.until_idle()
    after = [served.metric(f"{name}_total") for name in names]
    drafts, tokens, accepted = (now - then for now, then in zip(after, before, strict=True))
    assert 0 < accepted <= tokens
    assert 0 < drafts <= tokens
    assert drafts + accepted <= 48  # a run gives what is accepted, and one token more
    line = rf'^{ACCEPTED}_per_pos_total\{{model_name="demo",position="(\d+)"\}} (\S+)$'
    by_place = re.findall(line, httpx.get(f"{served.address}/metrics").text, re.MULTILINE)
    assert [int(place) for place, _ in by_place] == list(range(len(by_place)))
    counts = [float(count) for _, count in by_place]
    assert sum(counts) == after[-1]
    assert counts == sorted(counts, reverse=True)  # who accepts a draft has accepted those before it


def test_a_server_says_its_limits_when_it_starts(served: Served) -> None:
    served.until_said("tokens a sequence")
    (limits,) = (line for line in served.lines if "tokens a sequence" in line)
    assert {"256", "255", "8", "512"} <= set(re.findall(r"\d+", limits))


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_is_echoed(client: openai.OpenAI, stream: bool) -> None:
    made = client.completions.create(model="demo", prompt="12+30=", max_tokens=0, echo=True, stream=stream)
    chunks = list(made) if stream else [made]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "12+30="
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.choices[0].logprobs is None for chunk in chunks)


def test_the_dashboard_asks_for_what_there_is(served: Served) -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "tools" / "grafana-dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|graphdecode):\w+", target["expr"])
    }
    text = httpx.get(f"{served.address}/metrics").text
    assert [name for name in sorted(asked) if not re.search(rf"^{name}[ {{]", text, re.MULTILINE)] == []


def test_a_body_that_is_no_json_is_refused(served: Served) -> None:
    with served.client(headers={"Authorization": f"Bearer {KEY}"}) as http:
        for body in (b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, json.dumps({"prompt": None}).encode()):
            refused = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            assert refused.status_code == 400, body[:20]
            assert refused.json()["error"]["type"] == "invalid_request_error"
        for path in ("/nowhere", "/v1/nowhere"):
            error = http.get(path).json()["error"]
            assert error["type"] == "not_found_error"
            assert error["message"].startswith(f"there is no {path}; below /v1 there are /v1/models, ")
            assert "/v1/chat/completions" in error["message"]
            assert "lora_adapter" not in error["message"]  # without lora_folder
            assert "{" not in error["message"]
        for path in ("/chat/completions", "/v1/v1/chat/completions", "/openai/v1/chat/completions"):
            error = http.post(path, json={}).json()["error"]
            assert error["message"].endswith("did you mean /v1/chat/completions?")
        asleep = http.post("/sleep").json()["error"]
        assert (asleep["type"], "dev_endpoints" in asleep["message"]) == ("not_found_error", True)
        refused = http.get("/v1/completions")
        assert refused.status_code == 405
        assert refused.json()["error"]["message"] == "/v1/completions takes POST, got GET"


PROMPT = [number % 200 for number in range(1000)]


def event() -> Event:
    top = tuple((token, -float(token)) for token in range(20))
    scores = [TokenLogprobs(-1.0 - place, 5, top) for place in range(len(PROMPT) - 1)]
    return Event(0, [5], None, "length", None, RequestMetrics(0.0), None, scores)


def answered(events: list[Event]) -> RequestOutput:
    output = RequestOutput(0, None, PROMPT, [CompletionOutput(0)], RequestMetrics(0.0))
    tokenizer = load_tokenizer(resolve_model_path("demo")).backend_tokenizer
    answer = RequestState(output.outputs[0], output, SamplingParams(prompt_logprobs=20), TokenTexts(tokenizer))
    for each in events:
        answer.take(each)
    return output


def test_parts_of_an_event_add_up_to_it() -> None:
    parts = in_parts(event(), 1000)
    assert len(parts) > 20
    assert all(len(part.prompt_logprobs or ()) * 21 <= 1000 for part in parts)
    assert [part.is_part for part in parts] == [True] * (len(parts) - 1) + [False]
    together, whole = answered(parts), answered([event()])
    assert together.prompt_logprobs == whole.prompt_logprobs
    assert together.prompt_logprobs is not None
    assert len(together.prompt_logprobs) == len(PROMPT)
    assert together.outputs[0].token_ids == whole.outputs[0].token_ids == [5]
    assert together.outputs[0].finish_reason == "length"


def test_an_answer_in_parts_has_begun_with_its_last_part_alone() -> None:
    output = answered(in_parts(event(), 1000)[:-1])
    assert not output.outputs[0].token_ids
    assert not output.finished


def test_others_have_their_turn_between_two_pieces_of_the_json() -> None:
    scores, turns = answered([event()]).prompt_logprobs, 0

    async def told() -> bytes:
        nonlocal turns
        asked = {"index": 0, "prompt_logprobs": scores, "choices": [{"text": "é", "tokens": [["a"], {}, None] * 20}]}
        telling = asyncio.ensure_future(in_pieces(asked))
        while not telling.done():
            turns += 1
            await asyncio.sleep(0)
        return await telling

    choice = json.loads(asyncio.run(told()))
    assert turns >= len(PROMPT) // 50
    assert scores is not None
    assert choice["prompt_logprobs"] == [
        None if each is None else {str(token): vars(entry) for token, entry in each.items()} for each in scores
    ]
    assert choice["index"] == 0
    assert choice["choices"] == [{"text": "é", "tokens": [["a"], {}, None] * 20}]
