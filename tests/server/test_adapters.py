"""Adapters over HTTP: named as models, listed, loaded and unloaded while requests are served."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from served import Served, serving, write_adapter

PROMPT = {"prompt": "417+385=", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name, scale in (("nothing", 0.0), ("loud", 1.0), ("later", 1.0)):
        write_adapter(folder / "allowed" / name, scale)
    write_adapter(folder / "outside", 1.0)
    write_adapter(folder / "allowed" / "pissa", 1.0)
    file = folder / "allowed" / "pissa" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": "pissa"}))
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    modules = [f"--lora-modules={name}={folder / 'allowed' / name}" for name in ("nothing", "loud")]
    options = ("--max-batch-size", "4", "--lora-folder", str(folder / "allowed"), *modules)
    with serving(*options) as server:
        yield server


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.client() as made:
        yield made


def text_of(http: httpx.Client, **body: object) -> str:
    response = http.post("/v1/completions", json=PROMPT | body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == body.get("model", "demo")
    return str(response.json()["choices"][0]["text"])


def test_a_request_names_an_adapter_as_its_model(http: httpx.Client) -> None:
    plain = text_of(http)
    assert plain.startswith("802")
    assert text_of(http, model="nothing") == plain
    assert text_of(http, model="loud") != plain
    assert text_of(http, model="demo") == plain


def test_adapters_are_listed_as_models(http: httpx.Client) -> None:
    models = {each["id"]: each for each in http.get("/v1/models").json()["data"]}
    assert list(models)[:3] == ["demo", "nothing", "loud"]
    assert models["loud"]["parent"] == "demo"
    assert http.get("/v1/models/loud").json()["id"] == "loud"
    assert http.get("/v1/models/other").status_code == 404


def test_an_adapter_is_loaded_and_unloaded_while_the_server_runs(served: Served, http: httpx.Client) -> None:
    asked = {"lora_name": "later", "lora_path": "later"}
    assert http.post("/v1/completions", json=PROMPT | {"model": "later"}).status_code == 404
    response = http.post("/v1/load_lora_adapter", json=asked)
    assert response.status_code == 200, response.text
    assert text_of(http, model="later") == text_of(http, model="loud")
    assert http.post("/v1/load_lora_adapter", json=asked).status_code == 400  # the name is taken
    assert served.metric('graphdecode:adapter_requests_total{lora_name="later",model_name="demo"}') == 1
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "later"}).status_code == 200
    assert http.post("/v1/completions", json=PROMPT | {"model": "later"}).status_code == 404
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "later"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        (lambda folder: str(folder / "outside"), 403, "lora_folder"),
        (lambda folder: "../outside", 403, "lora_folder"),
        (lambda folder: "/etc", 403, "lora_folder"),
        (lambda folder: "missing", 404, "lora_path 'missing'"),
        (lambda folder: ".", 404, "lora_path '.'"),
        (lambda folder: "\0", 400, "lora_path"),
        (lambda folder: "a" * 5000, 400, "lora_path"),
        (lambda folder: "\ud800", 400, ""),
        (lambda folder: "pissa", 400, "'pissa'"),
    ],
)
def test_what_may_not_or_cannot_be_loaded_is_refused(
    http: httpx.Client, folder: Path, path: Callable[[Path], str], status: int, message: str
) -> None:
    body = json.dumps({"lora_name": "new", "lora_path": path(folder)})  # in ASCII
    response = http.post("/v1/load_lora_adapter", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert "new" not in [each["id"] for each in http.get("/v1/models").json()["data"]]


def test_without_a_folder_requests_load_nothing() -> None:
    with serving("--max-batch-size", "1") as server, server.client() as http:
        response = http.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "/tmp"})
        assert response.status_code == 403
        assert "lora_folder" in response.json()["error"]["message"]
