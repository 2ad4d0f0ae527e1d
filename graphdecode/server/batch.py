"""Answers the requests of a file into another one: what a server would say to them, without HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from graphdecode.server.batch_lines import BatchInput, BatchOutput, BatchRequest
from graphdecode.server.endpoint import GENERATING
from graphdecode.server.http_errors import HttpError
from graphdecode.server.service import Service

ATTEMPTS = 3  # at a request whose answer is lost with the engine
_LOOK_EVERY_SECONDS = 0.05  # whether the engine serves again

log = logging.getLogger(__name__)


class Answers(Protocol):
    """What answers the requests of a batch: one engine, or several."""

    async def start(self) -> None:
        """Load, and come back when requests can be answered."""
        ...

    async def answer(self, request: BatchRequest) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of the response to a request; one that cannot be served has one too."""
        ...

    def close(self, *, at_once: bool = False) -> None:
        """End it; `at_once`: without waiting for what is under way."""
        ...


class EngineAnswers:
    """Answers with one engine.

    Args:
        service: of the model; `start` starts it, where nobody else did.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def start(self) -> None:
        """See `Answers`."""
        await self._service.start()

    def close(self, *, at_once: bool = False) -> None:
        """See `Answers`."""
        self._service.close(at_once=at_once)

    async def answer(self, request: BatchRequest) -> tuple[int, dict[str, Any]]:
        """See `Answers`; a request whose answer is lost with the engine is asked again."""
        for attempt in range(1, ATTEMPTS + 1):
            while not self._service.client.serves:
                await asyncio.sleep(_LOOK_EVERY_SECONDS)
            try:
                return 200, await self._body(request)
            except HttpError as failed:
                if failed.status < 500 or attempt == ATTEMPTS:
                    return failed.status, failed.body
            except Exception:  # of this package, and in one request: the others have their answers all the same
                log.exception("%r: an internal error", request.custom_id)
                break
        return 500, HttpError(500, "an internal error; the log says more").body

    async def _body(self, request: BatchRequest) -> dict[str, Any]:
        if request.body.get("stream"):
            raise HttpError(400, "stream is not supported in a batch: its answers are whole", param="stream")
        reply = await GENERATING[request.url].respond(self._service, json.dumps(request.body).encode(), caller="")
        return await reply.whole()


class BatchRun:
    """A run over the requests that have no answer yet.

    Args:
        answers: to them; it is started and closed by `run`.
        requests: of the input.
        output: takes the answers in the order in which they are complete.
        window: requests under way at a time, which bounds the memory of a run.
        on_answer: is called behind each line.

    Attributes:
        prompt_tokens: of what was answered in this run.
        completion_tokens: likewise.
    """

    def __init__(
        self,
        answers: Answers,
        requests: BatchInput,
        output: BatchOutput,
        *,
        window: int,
        on_answer: Callable[[], object],
    ) -> None:
        self._answers = answers
        self._output = output
        self._window = window
        self._on_answer = on_answer
        self._waiting = (request for request in requests if request.custom_id not in output.answered)
        self.prompt_tokens = 0
        self.completion_tokens = 0

    async def run(self) -> None:
        """Answer all; when it is cancelled, what is under way has no line.

        Raises:
            ArgumentError: the model cannot be loaded, or the input was changed meanwhile.
            OSError: an answer cannot be written.
        """
        completed = False
        try:
            await self._answers.start()
            await self._work()
            completed = True
        finally:
            self._answers.close(at_once=not completed)

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._window):
                    group.create_task(self._answer_some())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _answer_some(self) -> None:
        for request in self._waiting:  # which all the tasks of a window share
            status, body = await self._answers.answer(request)
            usage = body.get("usage", {})
            self.prompt_tokens += usage.get("prompt_tokens", 0)
            self.completion_tokens += usage.get("completion_tokens", 0)
            self._output.add(request.custom_id, uuid.uuid4().hex, status, body)
            self._on_answer()
