"""What all endpoints share: the model's front, and how much the server takes on."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from graphdecode.config import EngineConfig, ServerConfig
from graphdecode.engine import SamplingParams
from graphdecode.errors import ArgumentError
from graphdecode.server.body import Bodies
from graphdecode.server.desk import Desk, Serves
from graphdecode.server.engine_client import EngineClient
from graphdecode.server.fair_queue import FairQueue
from graphdecode.server.forked_work import ForkedWork
from graphdecode.server.forms import Forms
from graphdecode.server.http_errors import RESTARTING, HttpError
from graphdecode.server.metrics import Metrics
from graphdecode.server.structured import Form
from graphdecode.server.tracing import Tracer, otlp_tracer
from graphdecode.server.wire import EngineSetup
from graphdecode.text.async_front import AsyncFront
from graphdecode.text.grammar import is_available
from graphdecode.text.intake import Intake, Order, Resolved
from graphdecode.text.router import Router

_WORK_MODULES = ("graphdecode.server.endpoint",)  # what is done in children is of them, or of what they import
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
        self._promised = 0  # answers that have room, and are not handed in yet
        self._max_open = config.buckets.max_batch_size + limits.max_waiting
        setup = EngineSetup(path, config, progress, tokenizer.backend_tokenizer.to_str() if is_available() else None)
        self.work = ForkedWork(lambda: partial(Desk.warm, self.desk), _WORK_MODULES)
        self.client = EngineClient(setup, on_events=self._deliver, on_vitals=self._take_vitals)
        self.forms = Forms(self.work, self.client)
        self.router = Router(self.client, "the server was ended")
        self.intake = Intake(self.client, tokenizer)
        self.front = AsyncFront(self.router, _steps_by_itself)
        self.metrics = Metrics(name, self.client)
        endpoint = limits.otlp_traces_endpoint
        self.tracer: Tracer | None = None if endpoint is None else otlp_tracer(name, endpoint, version)
        self.queue = FairQueue()
        self.bodies = Bodies(limits)
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

    @cached_property
    def desk(self) -> Desk:
        """What makes bodies ready for the engine, which has been started."""
        serves = Serves(self.client.rules, self.client.seed)
        return Desk(
            self.model_name,
            self.tokenizer,
            self.limits,
            self.sampling_defaults,
            serves,
            self._max_open,
        )

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

    def check_room(self, answers: int) -> None:
        """Refuse a request for which there is no room.

        Args:
            answers: that it asks for.

        Raises:
            HttpError: 503 where nothing new is taken on, 429 where too many wait.
        """
        if self.draining:
            raise HttpError(503, "the server is shutting down", code="shutting_down", headers=_RETRY_AFTER)
        if not self.client.serves:
            raise HttpError(503, "the engine is being started again", code=RESTARTING, headers={"Retry-After": "5"})
        taken = self.num_open + self._promised
        if taken + answers > self._max_open:
            raise HttpError(429, f"{taken} requests run or wait already", code="queue_full", headers=_RETRY_AFTER)

    def promise(self, answers: int) -> Callable[[], None]:
        """Keep room for answers until what comes back is called, which is when they are handed in, or given up.

        Raises:
            HttpError: there is none; see `check_room`.
        """
        self.check_room(answers)
        self._promised += answers
        promise = ExitStack()
        promise.callback(self._keep, answers)
        return promise.close

    def _keep(self, answers: int) -> None:
        self._promised -= answers

    async def orders(self, caller: str, prompts: list[Resolved], grammar: str | None) -> list[Order]:
        """Return the orders of some prompts.

        Args:
            caller: whose they are.
            prompts: with one and the same parameters.
            grammar: of their answers; None: they may have any form.

        Raises:
            HttpError: there is no room for them.
        """
        orders, kept = [], self.promise(answers_of(prompts))
        try:
            for prompt in prompts:
                orders.append(self._order(caller, prompt, grammar))
                await asyncio.sleep(0)  # there may be hundreds, and others wait
        finally:
            kept()  # the response promises it again, once it is sent
        return orders

    def _order(self, caller: str, prompt: Resolved, grammar: str | None) -> Order:
        limit, params = self.client.rules.capacity.token_limit, prompt.asked.params
        most = min(len(prompt.token_ids) + (limit if params.max_tokens is None else params.max_tokens), limit)
        return self.intake.opened(prompt, grammar, self.queue.turn(caller, most * params.n))

    async def grammar(self, form: Form | None, caller: str) -> str | None:
        """Return the grammar of a form, once it is known that it can be kept; None is any form.

        Raises:
            HttpError: it cannot; the message names what is in the way.
        """
        if form is None:
            return None
        try:
            return await self.forms.grammar(form.params, caller)
        except ArgumentError as error:
            raise HttpError(400, form.said(error), param=form.field) from error

    def note_unknown(self, names: Iterable[str]) -> None:
        """Log the names of fields that are ignored, each of them once."""
        new = set(names) - self._unknown_fields
        if new and len(self._unknown_fields) < 100:
            self._unknown_fields |= new
            log.warning("ignored fields: %s", ", ".join(sorted(new)))

    def close(self, *, at_once: bool = False) -> None:
        """End the engine; answers under way end with an error.

        Args:
            at_once: do not wait for its step to end.
        """
        self.work.close()
        self.client.close(at_once=at_once)
        self.router.close()
        if self.tracer is not None:
            self.tracer.close()


def answers_of(prompts: Iterable[Resolved]) -> int:
    """Return how many answers some prompts ask for."""
    return sum(prompt.asked.params.n for prompt in prompts)


def _steps_by_itself() -> None:
    """The engine's process steps as soon as a request reaches it."""
