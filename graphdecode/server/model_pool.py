"""Several models behind one door: each has an engine's process of its own, and is loaded when a request asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphdecode.config import ServerConfig
from graphdecode.errors import GraphdecodeError, shown
from graphdecode.memory.available import host_memory
from graphdecode.server.fair_queue import RETRY_AFTER
from graphdecode.server.http import LARGE_BYTES, Bodies, HttpError, unless_disconnected
from graphdecode.server.responses.store import ResponseStore
from graphdecode.server.service import Service

WAITED_HEADER = b"x-graphdecode-load-seconds"  # of a response whose request waited for its model
_CHECK_SECONDS = 0.25  # between two looks for models that nobody uses
_STATES = Literal["unloaded", "loading", "loaded", "unloading"]

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Ticket:
    """A request for a model."""

    is_active: bool = False  # the model stays until it ends


@dataclass(eq=False)
class PooledModel:
    """One of the models, and its engine while it is loaded."""

    name: str
    path: Path
    make_service: Callable[[], Service]  # reads the tokenizer; may take seconds
    is_on_host: bool  # whether its weights take the machine's memory
    state: _STATES = "unloaded"
    service: Service | None = None
    app: ASGIApp | None = None
    loading: asyncio.Task[None] | None = None
    waiting: list[_Ticket] = field(default_factory=list)
    active: int = 0  # requests that are answered
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # none is
    last_used: float = 0.0
    num_loads: int = 0
    load_seconds: float = 0.0  # of all loads

    @property
    def nbytes(self) -> int:
        """Bytes of its weights' files."""
        files = [self.path] if self.path.is_file() else self.path.glob("*.safetensors")
        return sum(file.stat().st_size for file in files)

    def admit(self) -> _Ticket:
        """Note a request: for a loaded model at once, for another one when it is loaded."""
        ticket = _Ticket(self.state == "loaded")
        if ticket.is_active:
            self._activate(ticket)
        else:
            self.waiting.append(ticket)
        return ticket

    def admit_waiting(self) -> None:
        """Let the requests that wait begin, before the model can leave again."""
        for ticket in self.waiting:
            self._activate(ticket)
        self.waiting.clear()

    def _activate(self, ticket: _Ticket) -> None:
        ticket.is_active = True
        self.active += 1
        self.idle.clear()

    def release(self, ticket: _Ticket) -> None:
        """Note the end of a request."""
        if not ticket.is_active:
            self.waiting.remove(ticket)
            return
        self.active -= 1
        self.last_used = time.monotonic()
        if not self.active:
            self.idle.set()


class ModelPool:
    """Answers requests with the model that they name; a `ServedModel`, and an application that checks no access.

    At most `max_models` are loaded, and on a CPU as many as fit its memory: the least recently used one leaves for
    another, once its requests are answered, or when nobody has used it for `keep_alive` seconds. Models are loaded one
    after another, and each at most once.

    Args:
        models: the first one answers requests that name none.
        make_app: makes the application of a model's service.
    """

    def __init__(
        self, models: Sequence[PooledModel], config: ServerConfig, make_app: Callable[[Service], ASGIApp]
    ) -> None:
        self.models = {model.name: model for model in models}
        self.config, self._make_app = config, make_app
        self._first = models[0]
        self._bodies = Bodies(config)
        self.responses = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
        self._changing = asyncio.Lock()  # held while a model comes or goes
        self._draining = False
        self._expiring: asyncio.Task[None] | None = None

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value
        for service in self.services:
            service.draining = value

    @property
    def services(self) -> list[Service]:
        """Those of the loaded models."""
        return [model.service for model in self.models.values() if model.service is not None]

    @property
    def num_open(self) -> int:
        """Requests in flight, and those that wait for their model."""
        return sum(model.active + len(model.waiting) for model in self.models.values())

    async def start(self) -> None:
        """Return at once: models are loaded when they are asked for."""
        self._expiring = asyncio.create_task(self._expire(), name="keep_alive")

    def close(self, *, force: bool = False) -> None:
        """End all engines; requests in flight fail."""
        tasks = [self._expiring, *(model.loading for model in self.models.values())]
        for task in tasks:
            if task is not None:
                task.cancel()
        for service in self.services:
            service.close(force=force)

    def named(self, name: Any) -> PooledModel:
        """Return a model by its name, the first one for None; raises `HttpError` if there is none."""
        model = self._first if name is None else None
        if isinstance(name, str):
            model = self.models.get(name) or self.models.get(name.removesuffix(":latest"))  # Ollama's clients add it
        if model is None:
            known = " and ".join(map(repr, self.models))
            message = f"the model {shown(name)} does not exist; there is {known}"
            raise HttpError(404, message, param="model", code="model_not_found")
        return model

    def latest(self) -> PooledModel:
        """Return the loaded model that was used last, or the first one of all."""
        loaded = [model for model in self.models.values() if model.state == "loaded"]
        return max(loaded, key=lambda model: model.last_used, default=self._first)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the model that its body names, or without a body by the one that was used last."""
        if self.draining:
            raise HttpError(503, "the server is shutting down", code="shutting_down", headers=RETRY_AFTER)
        if scope["method"] != "POST":
            await self._forward(self.latest(), scope, receive, send)
            return
        async with self._bodies.read(Request(scope, receive)) as data:
            model = self.named(await _model_in(data))
            sent: list[Message] = [{"type": "http.request", "body": data}]

            async def replayed() -> Message:
                return sent.pop() if sent else await receive()

            await self._forward(model, scope, receive, send, replayed)

    async def _forward(
        self, model: PooledModel, scope: Scope, receive: Receive, send: Send, replayed: Receive | None = None
    ) -> None:
        """Answer a request when its model is loaded; `replayed` gives its body, which was read."""
        began, ticket = time.monotonic(), model.admit()
        waits = not ticket.is_active
        try:
            if waits and not await unless_disconnected(receive, self._loaded(model)):
                raise HttpError(499, "the client disconnected")
            assert model.app is not None
            headers = [(WAITED_HEADER, f"{time.monotonic() - began:.3f}".encode())] if waits else []

            async def send_with_headers(message: Message) -> None:
                if headers and message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", ()), *headers]}
                await send(message)

            await model.app(scope, replayed or receive, send_with_headers)
        finally:
            model.release(ticket)

    async def _loaded(self, model: PooledModel) -> bool:
        """Return True when a model is loaded, and has admitted the requests that waited; raises `HttpError`."""
        if model.loading is None:
            model.loading = asyncio.create_task(self._load(model), name=f"load {model.name}")
            model.loading.add_done_callback(_noted)  # also if nobody waits any more
        log.info("a request waits for the model %s, which is %s", model.name, model.state)
        limit = self.config.load_timeout_s or None
        try:
            async with asyncio.timeout(limit):
                await asyncio.shield(model.loading)
        except TimeoutError:
            message = f"the model {model.name!r} was not loaded in {limit:g} s; try again later"
            raise HttpError(503, message, code="loading", headers={"Retry-After": "5"}) from None
        except GraphdecodeError as error:
            raise HttpError(500, f"the model {model.name!r} cannot be loaded: {error}", code="not_loaded") from error
        return True

    async def _load(self, model: PooledModel) -> None:
        try:
            async with self._changing:
                model.state, began = "loading", time.monotonic()
                try:
                    model.service = await self._started(model)
                    model.service.draining = self.draining
                    model.service.responses = self.responses  # they stay when the model leaves
                    model.app = self._make_app(model.service)
                except BaseException:
                    model.state, model.service = "unloaded", None
                    raise
                model.state, model.last_used = "loaded", time.monotonic()
                model.num_loads += 1
                model.load_seconds += model.last_used - began
                log.info("the model %s is loaded, after %.1f s", model.name, model.last_used - began)
                model.admit_waiting()
        finally:
            model.loading = None

    async def _started(self, model: PooledModel) -> Service:
        """Return a started service, after others have made room for it."""
        made = await asyncio.to_thread(model.make_service)
        while (leaving := self._least_used()) is not None and not self._has_room(model):
            await self._unload(leaving, f"for {model.name}")
        while True:
            try:
                await made.start()
            except GraphdecodeError as error:
                await made.end()
                leaving = self._least_used()
                if leaving is None:
                    raise
                log.warning("%s does not load beside other models: %s", model.name, error)
                await self._unload(leaving, f"for {model.name}")
                made = await asyncio.to_thread(model.make_service)
            except BaseException:
                made.close(force=True)
                raise
            else:
                return made

    def _has_room(self, model: PooledModel) -> bool:
        if len(self.services) >= self.config.max_models:
            return False
        return not model.is_on_host or host_memory().available > model.nbytes

    def _least_used(self) -> PooledModel | None:
        """Return the loaded model that is to leave first: one that nobody uses, if there is one."""
        loaded = [model for model in self.models.values() if model.state == "loaded"]
        return min(loaded, key=lambda model: (model.active > 0, model.last_used), default=None)

    async def _unload(self, model: PooledModel, reason: str) -> None:
        """Unload a model when its requests are answered; later ones wait until it is loaded again."""
        assert model.service is not None
        model.state = "unloading"
        if model.active:
            log.info("the model %s will be unloaded %s, after %d requests", model.name, reason, model.active)
            await model.idle.wait()
        service, model.service, model.app = model.service, None, None
        await service.end()
        model.state = "unloaded"
        log.info("the model %s is unloaded %s", model.name, reason)

    async def _expire(self) -> None:
        """Unload models that nobody has used for `keep_alive` seconds; below 0: never."""
        seconds = self.config.keep_alive
        while seconds >= 0:
            await asyncio.sleep(_CHECK_SECONDS)
            for model in self.models.values():
                async with self._changing:
                    if model.state == "loaded" and not model.active and time.monotonic() - model.last_used >= seconds:
                        await self._unload(model, f"after {seconds:g} s without a request")

    def metrics(self) -> str:
        """Return the loads and states of the models, in Prometheus' text format."""
        families = {
            "graphdecode:model_loaded": ("gauge", "Whether a model is loaded.", lambda m: int(m.state == "loaded")),
            "graphdecode:model_waiting": ("gauge", "Requests that wait for a model.", lambda m: len(m.waiting)),
            "graphdecode:model_loads_total": ("counter", "Loads of a model.", lambda m: m.num_loads),
            "graphdecode:model_load_seconds_total": ("counter", "Time of its loads.", lambda m: m.load_seconds),
        }
        lines = []
        for name, (kind, text, value) in families.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f'{name}{{model_name="{model.name}"}} {value(model)}' for model in self.models.values()]
        return "".join(f"{line}\n" for line in lines)


def _noted(task: asyncio.Task[None]) -> None:
    """Log why a load failed."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("%s failed: %s", task.get_name(), error)


async def _model_in(data: bytes) -> Any:
    """Return what a body names as its model; raises `HttpError` if it is no JSON object."""
    body: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(data) if len(data) <= LARGE_BYTES else await asyncio.to_thread(json.loads, data)
    if not isinstance(body, dict):
        raise HttpError(400, "the body must be a JSON object", code="json_invalid")
    return body.get("model")
