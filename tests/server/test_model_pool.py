"""Several models behind one door: loaded once when asked for, and unloaded only when nobody needs them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from demo_copies import demo_copy
from served import serving
from typer.testing import CliRunner

from graphdecode.cli.app import app
from graphdecode.cli.checkpoint import models_named
from graphdecode.config import ServerConfig
from graphdecode.errors import ArgumentError
from graphdecode.server.http import HttpError
from graphdecode.server.model_pool import WAITED_HEADER, ModelPool, PooledModel


class Engine:
    """A service that loads when it is told to; `log` has what happened to all of them."""

    def __init__(self, name: str, log: list[str], may_load: asyncio.Event, failures: list[Exception]) -> None:
        self.model_name, self.draining = name, False
        self._log, self._may_load, self._failures = log, may_load, failures

    async def start(self) -> None:
        self._log.append(f"+{self.model_name}")
        await self._may_load.wait()
        if self._failures:
            raise self._failures.pop()

    async def end(self) -> None:
        self._log.append(f"-{self.model_name}")

    def close(self, *, force: bool = False) -> None:
        self._log.append(f"-{self.model_name}")


class Pool:
    """A pool of models "a", "b" and "c", whose answers wait for `may_answer`."""

    def __init__(self, **settings: Any) -> None:
        self.log: list[str] = []
        self.may_load, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_load.set()
        self.may_answer.set()
        self.failures: dict[str, list[Exception]] = {name: [] for name in "abc"}
        models = [PooledModel(name, Path("nowhere"), self._maker(name), is_on_host=False) for name in "abc"]
        config = ServerConfig(**({"keep_alive": -1.0} | settings))
        self.pool = ModelPool(models, config, self._app)

    def _maker(self, name: str) -> Callable[[], Any]:
        return lambda: Engine(name, self.log, self.may_load, self.failures[name])

    def _app(self, service: Any) -> Any:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            body = json.loads((await receive())["body"])
            assert body.get("model") in (None, service.model_name)
            assert self.pool.models[service.model_name].service is service
            await self.may_answer.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": service.model_name.encode()})

        return answer

    async def ask(self, name: str | None) -> tuple[str, bool]:
        """Return the model that answered, and whether the request waited for it."""
        sent: list[Any] = [{"type": "http.request", "body": json.dumps({"model": name} if name else {}).encode()}]
        told: list[Any] = []

        async def receive() -> Any:
            return sent.pop() if sent else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            told.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await self.pool(scope, receive, send)
        return told[1]["body"].decode(), any(name == WAITED_HEADER for name, _ in told[0]["headers"])

    @property
    def states(self) -> str:
        return " ".join(f"{model.name}:{model.state}" for model in self.pool.models.values())


def run(test: Callable[[Pool], Awaitable[None]], **settings: Any) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            pool = Pool(**settings)
            await pool.pool.start()
            try:
                await test(pool)
            finally:
                pool.pool.close()

    asyncio.run(within())


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0.001)


def test_requests_for_one_model_load_it_once_and_wait() -> None:
    async def check(pool: Pool) -> None:
        pool.may_load.clear()
        asked = [asyncio.create_task(pool.ask("b")) for _ in range(5)]
        await turns()
        assert (pool.log, pool.states) == (["+b"], "a:unloaded b:loading c:unloaded")
        assert pool.pool.num_open == 5
        pool.may_load.set()
        assert await asyncio.gather(*asked) == [("b", True)] * 5
        assert await pool.ask("b") == ("b", False)
        assert await pool.ask(None) == ("a", True)  # the first one
        assert pool.pool.num_open == 0
        with pytest.raises(HttpError, match="'d'") as refused:
            await pool.ask("d")
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")

    run(check)


def test_the_least_recently_used_model_leaves_for_another() -> None:
    async def check(pool: Pool) -> None:
        for name in "abab":
            await pool.ask(name)
        await pool.ask("c")
        assert pool.log == ["+a", "+b", "-a", "+c"]
        await pool.ask("b")
        await pool.ask("a")
        assert pool.log == ["+a", "+b", "-a", "+c", "-c", "+a"]

    run(check, max_models=2)


def test_a_model_leaves_only_after_its_requests_are_answered() -> None:
    async def check(pool: Pool) -> None:
        pool.may_answer.clear()
        running = [asyncio.create_task(pool.ask("a")) for _ in range(2)]
        await turns()
        other = asyncio.create_task(pool.ask("b"))
        await turns()
        late = asyncio.create_task(pool.ask("a"))  # waits until it is loaded again
        await turns()
        assert (pool.log, pool.states) == (["+a"], "a:unloading b:loading c:unloaded")
        pool.may_answer.set()
        assert await asyncio.gather(*running) == [("a", True)] * 2
        assert await asyncio.gather(other, late) == [("b", True), ("a", True)]
        assert pool.log == ["+a", "-a", "+b", "-b", "+a"]

    run(check, max_models=1)


def test_many_requests_for_all_models_are_all_answered_and_never_by_two_copies() -> None:
    async def check(pool: Pool) -> None:
        names = list("abcabccbaacb" * 5)
        assert [name for name, _ in await asyncio.gather(*map(pool.ask, names))] == names
        loaded: set[str] = set()
        for sign, name in pool.log:
            assert (name in loaded) == (sign == "-")
            loaded ^= {name}
            assert len(loaded) <= 2

    run(check, max_models=2)


def test_a_model_that_nobody_uses_is_unloaded_after_keep_alive() -> None:
    async def check(pool: Pool) -> None:
        await pool.ask("a")
        pool.may_answer.clear()
        running = asyncio.create_task(pool.ask("b"))
        await asyncio.sleep(0.6)
        assert pool.states == "a:unloaded b:loaded c:unloaded"
        pool.may_answer.set()
        await running
        await asyncio.sleep(0.6)
        assert pool.log == ["+a", "+b", "-a", "-b"]

    run(check, keep_alive=0.1)


def test_a_load_that_takes_too_long_is_a_503_and_goes_on() -> None:
    async def check(pool: Pool) -> None:
        pool.may_load.clear()
        with pytest.raises(HttpError, match="load") as late:
            await pool.ask("a")
        assert (late.value.status, late.value.code) == (503, "loading")
        pool.may_load.set()
        await turns()
        assert await pool.ask("a") == ("a", False)

    run(check, load_timeout_s=0.1)


def test_a_model_that_does_not_load_has_an_error_and_is_tried_again_alone() -> None:
    async def check(pool: Pool) -> None:
        pool.failures["a"] = [ArgumentError("no memory")]
        with pytest.raises(HttpError, match="no memory") as failed:
            await pool.ask("a")
        assert failed.value.status == 500
        assert await pool.ask("a") == ("a", True)
        pool.failures["b"] = [ArgumentError("no memory")]
        assert await pool.ask("b") == ("b", True)  # once "a" has left
        assert pool.log == ["+a", "-a", "+a", "+b", "-b", "-a", "+b"]

    run(check)


def test_nothing_is_loaded_while_the_server_shuts_down() -> None:
    async def check(pool: Pool) -> None:
        await pool.ask("a")
        pool.pool.draining = True
        with pytest.raises(HttpError) as refused:
            await pool.ask("a")
        assert (refused.value.code, [service.draining for service in pool.pool.services]) == ("shutting_down", [True])

    run(check)


def test_names_are_those_of_folders_and_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        demo_copy(tmp_path / "models" / name)
    assert models_named(["demo"]) is None
    assert models_named([str(tmp_path / "models" / "one")]) is None
    several = models_named(["demo", str(tmp_path / "models")])
    assert several is not None
    assert list(several) == ["demo", "one", "two"]
    with pytest.raises(ArgumentError, match="'one'"):
        models_named([str(tmp_path / "models"), str(tmp_path / "models" / "one")])


@pytest.mark.parametrize("options", [["--tokenizer", "demo"], ["--served-model-name", "x"], ["--replicas", "2"]])
def test_what_is_for_one_model_is_refused_with_several(tmp_path: Path, options: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", "--model", "demo", "--model", str(demo_copy(tmp_path / "b")), *options])
    assert result.exit_code != 0
    assert "one model" in str(result.exception)


def test_a_server_of_two_models_answers_with_the_one_that_is_named(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    other = demo_copy(tmp_path / "other", tokenizer_config={"chat_template": template})
    settings = tmp_path / "server.toml"
    settings.write_text('[server]\napi_keys = ["secret"]\n')
    sizes = ("--max-batch-size", "2", "--max-sequence-length", "64", "--max-models", "1", "--config", str(settings))
    with serving("--model", str(other), *sizes) as served:
        assert httpx.post(f"{served.address}/v1/completions", json={"model": "other"}).status_code == 401
        with served.client(headers={"Authorization": "Bearer secret"}) as http:

            def states() -> dict[str, str]:
                return {card["id"]: card["state"] for card in http.get("/v1/models").json()["data"]}

            def answered(name: str) -> tuple[str, str, bool]:
                body = {"model": name, "prompt": "417+385=", "max_tokens": 4, "temperature": 0}
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                choice = answer.json()["choices"][0]["text"].strip()
                return answer.json()["model"], choice, WAITED_HEADER.decode() in answer.headers

            assert (states(), http.get("/health").status_code) == ({"demo": "unloaded", "other": "unloaded"}, 200)
            assert http.post("/v1/completions", json={"model": "third"}).status_code == 404
            assert http.post("/v1/completions", content=b"[1]").status_code == 400
            assert answered("other") == ("other", "802", True)
            assert answered("other") == ("other", "802", False)
            assert states() == {"demo": "unloaded", "other": "loaded"}
            stored = http.post("/v1/responses", json={"model": "other", "input": "417+385=", "max_output_tokens": 16})
            assert stored.status_code == 200, stored.text
            assert answered("demo") == ("demo", "802", True)
            assert states() == {"demo": "loaded", "other": "unloaded"}
            assert http.get("/v1/models/demo").json()["max_model_len"] == 64
            assert http.get(f"/v1/responses/{stored.json()['id']}").json() == stored.json()  # its model has gone
            assert states() == {"demo": "loaded", "other": "unloaded"}
            assert [each["name"] for each in http.get("/api/tags").json()["models"]] == ["demo", "other"]
            assert [each["name"] for each in http.get("/api/ps").json()["models"]] == ["demo"]
            asked = {"model": "demo:latest", "prompt": "417+385=", "options": {"temperature": 0, "num_predict": 4}}
            lines = [json.loads(line) for line in http.post("/api/generate", json=asked).text.splitlines()]
            whole = http.post("/api/generate", json=asked | {"stream": False}).json()
            assert "".join(line["response"] for line in lines) == whole["response"]
            assert whole["response"].strip() == "802"
            assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
            assert whole.keys() == lines[-1].keys()
            assert (whole["done_reason"], whole["eval_count"] > 1) == ("stop", True)
            embedded = http.post("/api/embed", json={"model": "demo", "input": ["a", "b"]}).json()["embeddings"]
            assert [len(vector) for vector in embedded] == [128, 128]
            missing = http.post("/api/chat", json={"model": "third", "messages": []})
            assert (missing.status_code, list(missing.json())) == (404, ["error"])
            assert served.metric("graphdecode:model_loads_total") == 2
            assert served.metric("vllm:request_success_total") == 5  # of the model that is loaded
    assert served.process.returncode == 0
