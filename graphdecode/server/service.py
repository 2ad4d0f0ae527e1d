"""The state that all endpoints share: the engine's client, the front, and admission of requests."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from graphdecode.config import EngineConfig, ServerConfig
from graphdecode.engine import SamplingParams
from graphdecode.errors import ArgumentError, shown
from graphdecode.models.peft.fields import ADAPTER_FILE
from graphdecode.server.admission import Admission, AdmissionControl
from graphdecode.server.engine_client import EngineClient
from graphdecode.server.fair_queue import RETRY_AFTER, FairQueue, FairThread
from graphdecode.server.fork_pool import ForkPool
from graphdecode.server.http import RESTARTING, Bodies, HttpError
from graphdecode.server.messages import EngineSetup
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.responses.store import ResponseStore
from graphdecode.server.structured_outputs import GrammarCompiler, StructuredOutput, serialized_tokenizer
from graphdecode.server.telemetry import Metrics, Tracer, otlp_tracer
from graphdecode.text.async_llm import AsyncFront
from graphdecode.text.input_processor import ParentRequest, TokenizedPrompt
from graphdecode.text.pooling import Pooler
from graphdecode.text.router import Router

_POOL_MODULES = ("graphdecode.server.endpoints",)
_KEY_VARIABLE = "GRAPHDECODE_API_KEY"

log = logging.getLogger(__name__)


def lora_modules(config: ServerConfig) -> dict[str, str]:
    """Return the adapters to load at startup: name -> folder; raises ArgumentError for a malformed one."""
    folders: dict[str, str] = {}
    for module in config.lora_modules:
        name, _, folder = module.partition("=")
        if not name or not folder or name in folders:
            raise ArgumentError(f"lora_modules must be NAME=FOLDER with distinct names, got {module!r}")
        folders[name] = str(Path(folder).expanduser().absolute())
    return folders


def api_keys_of(config: ServerConfig) -> list[str]:
    """Return the API keys of /v1, of the settings and the environment; empty: no key is needed."""
    return [*config.api_keys, *filter(None, [os.environ.get(_KEY_VARIABLE)])]


class Service:
    """One model, served."""

    def __init__(
        self,
        path: Path,
        name: str,
        tokenizer: Any,
        sampling_defaults: dict[str, Any],
        settings: EngineConfig,
        config: ServerConfig,
        *,
        version: str = "",
        progress: bool = False,
    ) -> None:
        self.path = path
        self.version = version
        self.model_name = name
        self.tokenizer = tokenizer
        self.config = config
        self.sampling_defaults = SamplingParams(**sampling_defaults)
        self.request_timeout = config.request_timeout_s or None
        self.draining = False  # new requests are refused
        adapters = lora_modules(config)
        if adapters and not settings.max_adapters:
            settings = settings.with_settings(max_adapters=len(adapters))
        serialized = serialized_tokenizer(tokenizer)
        eos_token_id = getattr(tokenizer, "eos_token_id", None)
        setup = EngineSetup(path, settings, progress, serialized, tuple(adapters.items()), eos_token_id)
        self.work = ForkPool(lambda: partial(Preprocessor.warm, self.preprocessor), _POOL_MODULES)
        self.thread = FairThread(config.max_connections)
        self.client = EngineClient(
            setup,
            on_events=lambda events: self.router.deliver(events),
            on_status=lambda status: self.metrics.update(status),
        )
        self._pooler = Pooler.of(path, settings.pooling)
        self.max_batch_size = settings.buckets.max_batch_size
        most = self.max_batch_size + config.max_waiting
        self.admissions = AdmissionControl(most, lambda: self.client.num_open)
        self.grammar_compiler = GrammarCompiler(self.work, self.client)
        self.router = Router(self.client, "the server was shut down")
        self.front = AsyncFront(self.router, lambda: None)  # the engine's process steps by itself
        self.metrics = Metrics(name, self.client, settings)
        endpoint = config.otlp_traces_endpoint
        self.tracer: Tracer | None = None if endpoint is None else otlp_tracer(name, endpoint, version)
        self.queue = FairQueue()
        self.bodies = Bodies(config)
        self.responses = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
        self._unknown_fields: set[str] = set()

    async def start(self) -> None:
        """Start the engine, and wait until it serves; raises `ArgumentError` for a wrong model or setting."""
        await self.client.start()

    @cached_property
    def preprocessor(self) -> Preprocessor:
        """The preprocessor, once the engine was started."""
        assert self.client.ready is not None
        defaults, engine = self.sampling_defaults, self.client.ready
        most, adapters = self.admissions.max_outputs, self.client.adapters.keys()
        names = (self.model_name, self.tokenizer, self.config, defaults, engine, most, self._pooler)
        return Preprocessor(*names, adapters)

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter from `lora_folder`; raises `HttpError`, or as `EngineClient.change_adapter`."""
        allowed = self.config.lora_folder
        if allowed is None:
            raise HttpError(403, "requests cannot load adapters: [server] lora_folder is not set")
        if name == self.model_name:
            raise HttpError(400, f"{name!r} is the name of the model", param="lora_name")
        root = Path(allowed).expanduser().resolve()
        try:
            path = (root / folder).resolve()
            exists = path.is_file() or (path / ADAPTER_FILE).exists()
        except (OSError, ValueError) as error:  # such as a character that no path has, or too many
            raise HttpError(400, f"lora_path {shown(folder)} is no path: {error}", param="lora_path") from error
        if not path.is_relative_to(root):
            raise HttpError(403, "lora_path is outside of lora_folder", param="lora_path")
        if not exists:
            raise HttpError(404, f"there is no adapter at lora_path {shown(folder)}", param="lora_path")
        await self.client.change_adapter(name, str(path))

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; raises `HttpError`, or as `EngineClient.change_adapter`."""
        if self.config.lora_folder is None:
            raise HttpError(403, "requests cannot unload adapters: [server] lora_folder is not set")
        if name not in self.client.adapters:
            raise HttpError(404, f"there is no adapter {name[:200]!r}", param="lora_name", code="model_not_found")
        await self.client.change_adapter(name, None)

    @property
    def api_keys(self) -> list[str]:
        """API keys of /v1; empty: no key is needed."""
        return api_keys_of(self.config)

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served."""
        return self.client.serves and not self.draining

    @property
    def num_open(self) -> int:
        """Outputs in flight, from the server's door to their last token."""
        return self.admissions.num_open

    def admit(self) -> Admission:
        """Admit a request; raises HttpError: 503 while draining or restarting, 429 if too many wait."""
        if self.draining:
            raise HttpError(503, "the server is shutting down", code="shutting_down", headers=RETRY_AFTER)
        if not self.client.serves:
            raise HttpError(503, "the engine is restarting", code=RESTARTING, headers={"Retry-After": "5"})
        return Admission(self.admissions)

    async def parent_requests(
        self, caller: str, prompts: list[TokenizedPrompt], structured: StructuredOutput | None
    ) -> list[ParentRequest]:
        """Return the requests of prompts that share parameters; raises `HttpError` for a bad grammar."""
        grammar = None
        while structured is not None and grammar is None:
            try:
                grammar = await self.grammar_compiler.grammar(structured.params, caller)
            except ArgumentError as error:
                if not structured.is_optional:
                    raise HttpError(400, structured.error_text(error), param=structured.field) from error
                structured = structured.otherwise
        parents, input_processor = [], self.preprocessor.input_processor
        limit = self.client.rules.capacity.token_limit
        for prompt in prompts:
            params = prompt.params.sampling
            most = min(len(prompt.token_ids) + (limit if params.max_tokens is None else params.max_tokens), limit)
            parents.append(
                input_processor.parent_request(prompt, grammar, self.queue.start_tag(caller, most * params.n))
            )
            await asyncio.sleep(0)  # there may be hundreds, and other tasks wait
        return parents

    def note_unknown(self, names: Iterable[str]) -> None:
        """Log the names of unknown fields, each once."""
        new = set(names) - self._unknown_fields
        if new and len(self._unknown_fields) < 100:
            self._unknown_fields |= new
            log.warning("ignored fields: %s", ", ".join(sorted(new)))

    async def end(self) -> None:
        """End the engine without blocking other tasks; no request is in flight."""
        self.thread.close()
        await asyncio.to_thread(self.work.close)
        await self.client.end()
        self.close()

    def close(self, *, force: bool = False) -> None:
        """End the engine; requests in flight fail."""
        self.work.close()
        self.thread.close()
        self.client.close(force=force)
        self.router.close()
        if self.tracer is not None:
            self.tracer.close()
