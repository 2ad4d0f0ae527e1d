"""What stands behind a path that takes a body, whether HTTP or a file brings it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from graphdecode.errors import GraphdecodeError
from graphdecode.server.chat_completions import chat
from graphdecode.server.completions import complete
from graphdecode.server.http_errors import HttpError, as_http_error
from graphdecode.server.protocol import Body, ChatCompletion, Completion, GeneratingPath, problem_of
from graphdecode.server.reply import Reply
from graphdecode.server.service import Service

B = TypeVar("B", bound=Body)
R = TypeVar("R", covariant=True)


@dataclass(frozen=True)
class Endpoint(Generic[B, R]):
    """Reads a body, and lets the service answer it.

    Attributes:
        kind: of the body.
        answer: makes the response for a service, a body and its caller.
    """

    kind: type[B]
    answer: Callable[[Service, B, str], Awaitable[R]]

    async def respond(self, service: Service, data: bytes, caller: str) -> R:
        """Return the response to a body.

        Args:
            service: that was started.
            data: the body as it came.
            caller: whose it is.

        Raises:
            HttpError: it cannot be served.
        """
        body = self._parsed(data)
        service.check_model(body.model)
        service.note_unknown(body.model_extra)
        try:
            return await self.answer(service, body, caller)
        except HttpError:
            raise
        except GraphdecodeError as error:
            raise as_http_error(error, frozenset(self.kind.model_fields)) from error

    def _parsed(self, data: bytes) -> B:
        try:
            return self.kind.model_validate_json(data)
        except ValidationError as error:
            message, place, code = problem_of(error)
            raise HttpError(400, message, param=str(place[0]) if place else None, code=code) from None


GENERATING: dict[GeneratingPath, Endpoint[Any, Reply]] = {
    "/v1/completions": Endpoint(Completion, complete),
    "/v1/chat/completions": Endpoint(ChatCompletion, chat),
}
