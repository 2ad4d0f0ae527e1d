"""What operators ask a server: to sleep and to wake up, its load, names of requests, and a path below a proxy."""

from collections.abc import Iterator

import httpx2 as httpx
import pytest
from served import Served, serving

from graphdecode.models import resolve_model_path

ASKED = {"prompt": "12+30=" * 6, "max_tokens": 4, "temperature": 0}
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("server") / "server.toml"
    file.write_text('[server]\ndev_endpoints = true\napi_keys = ["secret"]\n')
    options = ("--root-path", "/llm", "--max-batch-size", "4", "--max-sequence-length", "512")
    with serving("--config", str(file), *options) as server:
        yield server


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.client(headers=KEY) as made:
        yield made


def test_an_engine_sleeps_and_wakes_up_over_http(served: Served, http: httpx.Client) -> None:
    before = http.post("/v1/completions", json=ASKED).json()["choices"]
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert http.post("/sleep?level=3").status_code == 400
    assert http.post("/sleep?level=1").json() == {"status": "sleeping", "level": 1}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    refused = http.post("/v1/completions", json=ASKED)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
    assert http.post("/wake_up?tags=weights").json() == {"status": "sleeping", "tags": ["weights"]}
    assert http.post("/wake_up?tags=nothing").status_code == 400
    assert http.post("/wake_up").json() == {"status": "awake", "tags": None}
    assert http.post("/v1/completions", json=ASKED).json()["choices"] == before


def test_cached_prefixes_are_dropped_but_not_while_requests_use_them(served: Served, http: httpx.Client) -> None:
    def cached() -> int:
        usage = http.post("/v1/completions", json=ASKED).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0
    asked = {"prompt": "a", "max_tokens": None, "ignore_eos": True, "stream": True, "n": 100}
    with http.stream("POST", "/v1/completions", json=asked) as running:
        lines = running.iter_lines()  # if it went, its response would be closed
        next(lines)
        assert http.get("/load").json()["server_load"] > 50
        assert http.post("/reset_prefix_cache").json() == {"success": False}
        assert http.post("/sleep").status_code == 409
    served.until_idle()


def test_a_key_guards_them_below_the_proxys_path_too(served: Served) -> None:
    with served.client() as anybody:
        for path in ("/sleep", "/wake_up", "/reset_prefix_cache", "/llm/sleep", "/llm/v1/completions"):
            assert anybody.post(path, json={}).status_code == 401, path
        assert anybody.get("/is_sleeping").status_code == 401
        assert anybody.get("/llm/health").status_code == anybody.get("/health").status_code == 200
        assert anybody.get("/llm/v1/models", headers=KEY).json()["data"][0]["root"] == str(resolve_model_path("demo"))
        assert anybody.get("/llmv1/models", headers=KEY).status_code == 404


def test_a_requests_name_comes_back_and_names_the_answer(http: httpx.Client) -> None:
    named = http.post("/v1/completions", json=ASKED | {"request_id": "other"}, headers={"X-Request-Id": "mine"})
    assert (named.headers["x-request-id"], named.json()["id"]) == ("mine", "cmpl-mine")
    assert http.post("/v1/completions", json=ASKED | {"request_id": "other"}).json()["id"] == "cmpl-other"
    first, second = (http.get("/v1/nothing").headers["x-request-id"] for _ in range(2))
    assert first != second
    assert len(first) == 32
