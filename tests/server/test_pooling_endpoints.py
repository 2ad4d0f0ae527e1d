"""`/v1/embeddings`, `/v1/rerank` and `/v1/score` give what the library gives, to OpenAI's client too."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
from served import Served, serving
from typer.testing import CliRunner

from graphdecode import LLM, PoolingParams
from graphdecode.cli.app import app

KEY = "secret"
TEXTS = ["417+385=", "a tree of some length, and more of it", "x"]
SIZES = {"max_batch_size": 4, "max_sequence_length": 96}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("server") / "server.toml"
    file.write_text(f'[server]\napi_keys = ["{KEY}"]\nmax_waiting = 200\n')
    options = [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    with serving("--config", str(file), *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with served.client(headers={"Authorization": f"Bearer {KEY}"}) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM("demo", device="cpu", **SIZES) as llm:
        yield llm


def vectors(llm: LLM, prompts: Any, **keywords: Any) -> np.ndarray:
    return np.array([each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False, **keywords)])


def posted(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_openais_client_gets_the_librarys_embeddings(client: openai.OpenAI, alone: LLM) -> None:
    ids = [alone.tokenizer(text).input_ids for text in TEXTS]
    expected = vectors(alone, TEXTS)
    for given in (TEXTS, ids):  # as base64, by default
        answer = client.embeddings.create(model="demo", input=given)
        np.testing.assert_allclose([each.embedding for each in answer.data], expected, rtol=0, atol=1e-2)
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for given in (TEXTS[0], ids[0]):
        floats = client.embeddings.create(model="demo", input=given, encoding_format="float", dimensions=7)
        short = vectors(alone, TEXTS[0], pooling_params=PoolingParams(dimensions=7))
        np.testing.assert_allclose([each.embedding for each in floats.data], short, rtol=0, atol=1e-2)


def test_base64_and_floats_are_the_same_numbers(http: httpx.Client) -> None:
    floats = posted(http, "/v1/embeddings", input=TEXTS[1])["data"][0]["embedding"]
    encoded = posted(http, "/v1/embeddings", input=TEXTS[1], encoding_format="base64")["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(encoded), "<f4"), np.float32(floats))
    assert np.linalg.norm(floats) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_as_jina_and_cohere_do(http: httpx.Client, alone: LLM, path: str) -> None:
    scores = [each.outputs.score for each in alone.score(TEXTS[0], TEXTS)]
    answer = posted(http, path, query=TEXTS[0], documents=[*TEXTS[:2], {"text": TEXTS[2]}], top_n=2)
    order = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [each["index"] for each in answer["results"]] == order
    assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[index] for index in order]
    found = [each["relevance_score"] for each in answer["results"]]
    np.testing.assert_allclose(found, [scores[index] for index in order], rtol=0, atol=1e-2)
    tokens = sum(len(alone.tokenizer(text).input_ids) for text in TEXTS)  # the query is one of the documents
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    bare = posted(http, path, query="x", documents=["y"], return_documents=False)
    assert list(bare["results"][0]) == ["index", "relevance_score"]


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_pairs_are_scored_by_each_of_vllms_names(http: httpx.Client, alone: LLM, names: tuple[str, str]) -> None:
    expected = [each.outputs.score for each in alone.score(TEXTS[0], TEXTS)]
    answer = posted(http, "/score", **dict(zip(names, (TEXTS[0], TEXTS), strict=True)))
    np.testing.assert_allclose([each["score"] for each in answer["data"]], expected, rtol=0, atol=1e-2)
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 4096}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "x", "embed_dtype": "float16"}, "embed_dtype"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "max_tokens_per_doc": 3}, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_text_that_is_too_long_is_refused_or_cut(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": ["x", "a" * 200]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert posted(http, "/v1/embeddings", input=["x", "a" * 200], truncate_prompt_tokens=-1)["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/rerank", "/v2/rerank", "/score"])
def test_a_key_is_needed(served: Served, path: str) -> None:
    assert httpx.post(f"{served.address}{path}", json={}).status_code == 401


def test_many_requests_beside_one_that_generates(client: openai.OpenAI, http: httpx.Client) -> None:
    def generated() -> str:
        return (
            client.completions.create(model="demo", prompt="sort zebra=", max_tokens=40, temperature=0).choices[0].text
        )

    before = generated()
    with ThreadPoolExecutor(5) as pool:
        answering = pool.submit(generated)
        bodies = [{"input": [f"{number} {text}" for text in TEXTS]} for number in range(12)]
        answers = list(pool.map(lambda body: posted(http, "/v1/embeddings", **body), bodies))
        assert answering.result() == before
    assert all(len(answer["data"]) == 3 for answer in answers)
    large = posted(http, "/v1/embeddings", input=[f"text {number}" for number in range(150)])  # in a child process
    assert len({json.dumps(each["embedding"]) for each in large["data"]}) == 150


@pytest.mark.slow
def test_batches_of_embeddings(tmp_path: Path, alone: LLM) -> None:
    lines = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for index, text in enumerate(TEXTS)
    ]
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = CliRunner().invoke(app, ["batch", str(requests), str(answers), "--model", "demo"])
    assert result.exit_code == 0, result.output
    found = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, answers.read_text().splitlines())}
    expected = vectors(alone, TEXTS)
    for index in range(3):
        np.testing.assert_allclose(found[str(index)]["data"][0]["embedding"], expected[index], rtol=0, atol=1e-2)
