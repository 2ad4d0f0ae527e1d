"""What all endpoints share: the model's front, and how much the server takes on."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphdecode.config import EngineConfig, ServerConfig
from graphdecode.engine import RequestError, SamplingParams, StructuredOutputsParams
from graphdecode.errors import ArgumentError
from graphdecode.server.engine_client import EngineClient
from graphdecode.server.fair_queue import FairQueue
from graphdecode.server.http_errors import HttpError, as_http_error
from graphdecode.server.metrics import Metrics
from graphdecode.server.protocol import ChatCompletion, Completion
from graphdecode.server.structured import Form
from graphdecode.server.tracing import Tracer, otlp_tracer
from graphdecode.server.wire import Setup
from graphdecode.text.async_front import AsyncFront
from graphdecode.text.grammar import is_available
from graphdecode.text.intake import Intake, Order
from graphdecode.text.prompts import as_prompt
from graphdecode.text.router import Router

LONG_TEXT = 10_000  # characters: tokenised in a thread, for it takes longer than others should wait
_FIELDS = frozenset(Completion.model_fields) | frozenset(ChatCompletion.model_fields)
_KEY_VARIABLE = "GRAPHDECODE_API_KEY"
_RETRY_AFTER = {"Retry-After": "1"}

log = logging.getLogger(__name__)


class Service:
    """One model, served.

    Args:
        path: of the model.
        name: what clients call it.
        tokenizer: of transformers.
        sampling_defaults: of the checkpoint.
        config: of the engine.
        limits: of the server.
        version: of this package.
        progress: show bars while the engine loads.

    Attributes:
        draining: nothing new is taken on.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        tokenizer: Any,
        sampling_defaults: dict[str, Any],
        config: EngineConfig,
        limits: ServerConfig,
        *,
        version: str = "",
        progress: bool = False,
    ) -> None:
        self.path = path
        self.version = version
        self.model_name = name
        self.tokenizer = tokenizer
        self.limits = limits
        self.sampling_defaults = SamplingParams(**sampling_defaults)
        self.request_timeout = limits.request_timeout_s or None
        self.draining = False
        self._max_open = config.buckets.max_batch_size + limits.max_waiting
        setup = Setup(path, config, progress, tokenizer.backend_tokenizer.to_str() if is_available() else None)
        self.client = EngineClient(setup, on_events=self._deliver, on_vitals=self._take_vitals)
        self.router = Router(self.client, "the server was ended")
        self.intake = Intake(self.client, tokenizer, structured_outputs_backend=config.structured_outputs_backend)
        self.front = AsyncFront(self.router, _steps_by_itself)
        self.metrics = Metrics(name, self.client)
        endpoint = limits.otlp_traces_endpoint
        self.tracer: Tracer | None = None if endpoint is None else otlp_tracer(name, endpoint, version)
        self.queue = FairQueue()
        self._unknown_fields: set[str] = set()

    async def start(self) -> None:
        """Start the engine, and wait until it serves.

        Raises:
            ArgumentError: the model or a setting cannot be used.
        """
        await self.client.start()

    def _deliver(self, events: Any) -> None:
        self.router.deliver(events)

    def _take_vitals(self, vitals: Any) -> None:
        self.metrics.take_vitals(vitals)

    @property
    def api_keys(self) -> list[str]:
        """Of those who may use /v1; none: everybody may."""
        return [*self.limits.api_keys, *filter(None, [os.environ.get(_KEY_VARIABLE)])]

    @property
    def is_healthy(self) -> bool:
        """Whether a request would be served."""
        return self.client.serves and not self.draining

    @property
    def num_open(self) -> int:
        """Answers under way."""
        return self.client.num_open

    def admit(self, answers: int) -> None:
        """Refuse a request for which there is no room.

        Args:
            answers: that it asks for.

        Raises:
            HttpError: 503 where nothing new is taken on, 429 where too many wait.
        """
        if self.draining:
            raise HttpError(503, "the server is shutting down", code="shutting_down", headers=_RETRY_AFTER)
        if not self.client.serves:
            raise HttpError(503, "the engine is being started again", code="restarting", headers={"Retry-After": "5"})
        if self.num_open + answers > self._max_open:
            raise HttpError(
                429, f"{self.num_open} requests run or wait already", code="queue_full", headers=_RETRY_AFTER
            )

    async def orders(
        self,
        caller: str,
        prompts: list[str | list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        special: bool = True,
    ) -> list[Order]:
        """Return the orders of some prompts.

        Args:
            caller: whose they are.
            prompts: texts or token ids.
            params: of all of them.
            priority: the lowest is served first.
            special: add the special tokens that the tokenizer begins a text with.

        Raises:
            HttpError: one can never be served, or there are too many of them.
            ArgumentError: one is no prompt.
        """
        limits = self.limits
        if not prompts or len(prompts) > limits.max_prompts:
            raise HttpError(400, f"prompt must be 1..{limits.max_prompts} prompts, got {len(prompts)}", param="prompt")
        self._check_answers(params)
        self.admit(len(prompts) * params.n)
        return [
            self._order(caller, prompt, await self.encode(prompt, special=special), params, priority)
            for prompt in map(as_prompt, prompts)
        ]

    def order(
        self, caller: str, text: str, token_ids: list[int], params: SamplingParams, *, priority: int = 0
    ) -> Order:
        """Return the order of one prompt that was tokenised already.

        Raises:
            HttpError: it can never be served, or not now.
        """
        self._check_answers(params)
        self.admit(params.n)
        return self._order(caller, text, token_ids, params, priority)

    def _check_answers(self, params: SamplingParams) -> None:
        if params.n > self.limits.max_answers:
            raise HttpError(400, f"n must be at most {self.limits.max_answers}, got {params.n}", param="n")

    def _order(
        self, caller: str, prompt: str | list[int], ids: list[int], params: SamplingParams, priority: int
    ) -> Order:
        order = self.intake.order(prompt, ids, params, priority=priority)
        if order.output.error is not None:
            raise as_http_error(RequestError(order.output.error), _FIELDS)
        limit = self.client.rules.capacity.token_limit
        most = min(len(ids) + (limit if params.max_tokens is None else params.max_tokens), limit)
        turn = self.queue.turn(caller, most * params.n)
        return Order(order.output, [(replace(request, turn=turn), answer) for request, answer in order.requests])

    async def checked(self, form: Form | None) -> StructuredOutputsParams | None:
        """Return the form of an answer, once it is known that it can be kept.

        Raises:
            HttpError: it cannot; the message names what is in the way.
        """
        if form is None:
            return None
        try:
            await asyncio.to_thread(self.intake.grammars.grammar, form.params)  # a large one takes seconds
        except ArgumentError as error:
            raise HttpError(400, form.said(error), param=form.field) from error
        return form.params

    async def encode(self, prompt: str | list[int], *, special: bool = True) -> list[int]:
        """Return a prompt's token ids."""
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(self.intake.encode, prompt, special=special)
        return self.intake.encode(prompt, special=special)

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model; None is this one.

        Raises:
            HttpError: it is for another one.
        """
        if name is not None and name != self.model_name:
            raise HttpError(
                404,
                f"the model {name[:200]!r} does not exist; there is {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def note_unknown(self, fields: dict[str, Any] | None) -> None:
        """Log the names of fields that are ignored, each of them once."""
        new = set(fields or ()) - self._unknown_fields
        if new and len(self._unknown_fields) < 100:
            self._unknown_fields |= new
            log.warning("ignored fields: %s", ", ".join(sorted(name[:40] for name in new)))

    def close(self, *, at_once: bool = False) -> None:
        """End the engine; answers under way end with an error.

        Args:
            at_once: do not wait for its step to end.
        """
        self.client.close(at_once=at_once)
        self.router.close()
        if self.tracer is not None:
            self.tracer.close()


def _steps_by_itself() -> None:
    """The engine's process steps as soon as a request reaches it."""
