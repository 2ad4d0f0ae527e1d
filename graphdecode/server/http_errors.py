"""What goes wrong, in the words of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from graphdecode.errors import AnswerError, ArgumentError, GraphdecodeError

_ENGINE_AWAY = re.compile("is being started again|process ended")
_NAMED = re.compile(r"([a-z_]+)(?: (?:must|names|is|has|holds)\b|:)")


class HttpError(GraphdecodeError):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for a person.
        param: the field that is to blame.
        code: for a program.
        headers: that go with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """Return what OpenAI's clients read."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def as_http_error(error: GraphdecodeError, fields: frozenset[str]) -> HttpError:
    """Return an error of this package as one of HTTP.

    Args:
        error: of an argument, or of an answer that was given up.
        fields: names that a request can have; the one that the message begins with is to blame.
    """
    if isinstance(error, ArgumentError):
        found = _NAMED.match(str(error))
        param = found[1] if found and found[1] in fields else None
        too_long = "tokens; with one token to generate" in str(error)
        return HttpError(400, str(error), param=param, code="context_length_exceeded" if too_long else None)
    if isinstance(error, AnswerError) and _ENGINE_AWAY.search(str(error)):
        return HttpError(503, str(error), code="restarting", headers={"Retry-After": "5"})
    return HttpError(500, str(error))


async def _say(_: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return JSONResponse(error.body, error.status, error.headers)


async def _say_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, GraphdecodeError)
    return await _say(request, as_http_error(error, frozenset()))


async def _say_starlettes(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _say(request, HttpError(error.status_code, error.detail, headers=dict(error.headers or {})))


async def _say_bug(request: Request, error: Exception) -> Response:
    return await _say(request, HttpError(500, "an internal error; the server's log says more"))


SAYING: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    HttpError: _say,
    GraphdecodeError: _say_ours,
    HTTPException: _say_starlettes,
    Exception: _say_bug,
}  # how an application answers what its endpoints raise
