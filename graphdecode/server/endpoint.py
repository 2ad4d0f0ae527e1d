"""Endpoints that take a body, over HTTP or from a batch file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from graphdecode.errors import GraphdecodeError
from graphdecode.server.completions import chat, complete, prepared_chat, prepared_completion
from graphdecode.server.fork_pool import JobError, JobLimits
from graphdecode.server.http import LARGE_BYTES, HttpError, as_http_error
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.protocol import (
    Body,
    ChatCompletion,
    Completion,
    GeneratingPath,
    Generation,
    problem_of,
    unknown_fields,
)
from graphdecode.server.reply import Reply
from graphdecode.server.service import Service

B = TypeVar("B", bound=Body)
P = TypeVar("P")
R = TypeVar("R", covariant=True)

_MOST_PARTS_HERE = 64  # of a body that is prepared where others wait: some milliseconds
_LIMITS = JobLimits(cpu_seconds=20, wall_seconds=60.0, memory_bytes=1 << 30)


@dataclass(frozen=True)
class Endpoint(Generic[B, P, R]):
    """Reads a body, and lets the service answer it."""

    kind: type[B]  # of the body
    prepare: Callable[
        [Preprocessor, B], P
    ]  # makes of a body what can be answered in no time; it may run in another process
    # makes the response for a service, what was prepared and its caller
    answer: Callable[[Service, P, str], Awaitable[R]]

    async def respond(self, service: Service, data: bytes, caller: str) -> R:
        """Return the response to a body, or raise `HttpError`."""
        if issubclass(self.kind, Generation):
            service.check_room(1)
        prepared = None
        if len(data) <= LARGE_BYTES:
            prepared = self.prepared(service.preprocessor, data, in_child=False)
        if prepared is None:
            try:
                prepared = await service.work.run(_prepared, self, data, limits=_LIMITS, caller=caller, size=len(data))
            except JobError as error:
                raise HttpError(400, f"reading the body {error}") from error
        result, unknown = prepared
        service.note_unknown(unknown)
        with self._as_http_errors():
            return await self.answer(service, result, caller)

    def prepared(self, preprocessor: Preprocessor, data: bytes, *, in_child: bool) -> tuple[P, tuple[str, ...]] | None:
        """Parse and prepare a body; return it with the names of its unknown fields, or raise `HttpError`.

        Args:
            in_child: this is a child process; otherwise None is returned for a slow body, or one with a template.
        """
        try:
            body = self.kind.model_validate_json(data)
        except ValidationError as error:
            message, place, code = problem_of(error)
            raise HttpError(400, message, param=str(place[0]) if place else None, code=code) from None
        preprocessor.check_model(body.model)
        if not in_child and (body.parts > _MOST_PARTS_HERE or getattr(body, "chat_template", None) is not None):
            return None
        with self._as_http_errors():
            return self.prepare(preprocessor, body), unknown_fields(body)

    @contextmanager
    def _as_http_errors(self) -> Iterator[None]:
        try:
            yield
        except HttpError:
            raise
        except GraphdecodeError as error:
            raise as_http_error(error, frozenset(self.kind.model_fields)) from error


def _prepared(preprocessor: Preprocessor, endpoint: Endpoint[Any, Any, Any], data: bytes) -> Any:
    return endpoint.prepared(preprocessor, data, in_child=True)


GENERATING: dict[GeneratingPath, Endpoint[Any, Any, Reply]] = {
    "/v1/completions": Endpoint(Completion, prepared_completion, complete),
    "/v1/chat/completions": Endpoint(ChatCompletion, prepared_chat, chat),
}
