"""What goes wrong, in the words of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from graphdecode.engine.request import ContextLengthError
from graphdecode.errors import AnswerError, ArgumentError, GraphdecodeError

RESTARTING, REFUSED = "restarting", "refused"  # codes of answers that were given up, beside those of `Event`
_STATUS = {RESTARTING: 503, REFUSED: 400, "form_too_complex": 400}  # the latter are the asker's affair
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes it again."""
        again = partial(HttpError, param=self.param, code=self.code, headers=self.headers)
        return again, (self.status, str(self))

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
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return HttpError(400, str(error), param=param, code=code)
    if isinstance(error, AnswerError) and error.code in _STATUS:
        headers = {"Retry-After": "5"} if error.code == RESTARTING else None
        return HttpError(_STATUS[error.code], str(error), code=error.code, headers=headers)
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
