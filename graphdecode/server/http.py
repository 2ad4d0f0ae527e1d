"""HTTP plumbing: request bodies, errors in the formats of the APIs, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope

from graphdecode.config import ServerConfig
from graphdecode.engine.request import ContextLengthError
from graphdecode.errors import AnswerError, ArgumentError, GraphdecodeError, shown

# error codes of requests, in addition to those of `Event`
RESTARTING, REFUSED, SLEEPING, BUSY = "restarting", "refused", "sleeping", "busy"
CONTEXT_LENGTH = "context_length_exceeded"
_STATUS = {RESTARTING: 503, SLEEPING: 503, BUSY: 409, REFUSED: 400, "form_too_complex": 400}
_OLLAMA = "/api/"  # likewise of Ollama's
_MESSAGES = "/v1/messages"  # paths of Anthropic's API, whose errors differ, begin with it
_OPENAI_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NAMED = re.compile(r"(([a-z_][a-z_0-9]*)(?:\[\d+\]|\.[a-z_]+)*)(?: (?:must|names|is|has|holds)\b|:)")
LARGE_BYTES = 32 << 10  # larger bodies are parsed in a child process, so that other requests need not wait
MAX_LARGE_BODIES = 8  # bodies of the largest size that may be in memory at a time
T = TypeVar("T")
SSE_DONE = b"data: [DONE]\n\n"


class HttpError(GraphdecodeError):
    """An error response."""

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
        """Pickle the keywords too."""
        return partial(HttpError, param=self.param, code=self.code, headers=self.headers), (self.status, str(self))

    @property
    def body(self) -> dict[str, Any]:
        """The body in OpenAI's format."""
        kind = _OPENAI_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The body in Anthropic's format."""
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        begins = "prompt is too long: " if self.code == CONTEXT_LENGTH else ""  # which agents look for
        return {"type": "error", "error": {"type": kind, "message": f"{begins}{self}"}}

    @property
    def ollama_body(self) -> dict[str, Any]:
        """The body in Ollama's format."""
        return {"error": str(self)}


def as_http_error(error: GraphdecodeError, fields: frozenset[str]) -> HttpError:
    """Return an error as an `HttpError`.

    `param` is what its message begins with, such as `messages[0].content`, if that is, or is in, one of `fields`.
    """
    if isinstance(error, ArgumentError):
        match = _NAMED.match(str(error))
        param = match[1] if match and match[2] in fields else None
        code = CONTEXT_LENGTH if isinstance(error, ContextLengthError) else None
        return HttpError(400, str(error), param=param, code=code)
    if isinstance(error, AnswerError) and error.code in _STATUS:
        headers = {"Retry-After": "5"} if error.code == RESTARTING else None
        return HttpError(_STATUS[error.code], str(error), code=error.code, headers=headers)
    return HttpError(500, str(error))


def path_below_root(scope: Scope) -> str:
    """Return the path by which a request is routed, as Starlette does."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path == root or path.startswith(f"{root}/") else path


def error_response(error: HttpError, scope: Scope) -> JSONResponse:
    """Return the response of an error, in the format of the API that a request is for."""
    path = path_below_root(scope)
    body = error.ollama_body if path.startswith(_OLLAMA) else error.body
    return JSONResponse(error.anthropic_body if path.startswith(_MESSAGES) else body, error.status, error.headers)


def error_events(error: HttpError, scope: Scope) -> bytes:
    """Return the events with which a stream ends that fails."""
    if path_below_root(scope).startswith(_MESSAGES):
        return typed_events([error.anthropic_body])
    return sse_event(error.body) + SSE_DONE


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = error.detail
        if error.status_code == 404:
            paths = (getattr(route, "path", "") for route in request.app.routes)
            disabled = getattr(request.app.state, "disabled", {})
            enabled = [path for path in dict.fromkeys(paths) if path.startswith("/v1") and path not in disabled]
            asked = path_below_root(request.scope)
            meant = f"/v1{asked.rpartition('/v1')[2]}"  # a client's base address lacks it, or has it twice
            plain = ", ".join(path for path in enabled if "{" not in path)
            hint = f"did you mean {meant}?" if meant in enabled else f"below /v1 there are {plain}"
            hint = disabled.get(asked, hint)
            message = f"there is no {shown(request.url.path, plain=True)}; {hint}"
        headers = dict(error.headers or {})
        if "Allow" in headers:
            message = f"{shown(request.url.path, plain=True)} takes {headers['Allow']}, got {request.method}"
        error = HttpError(error.status_code, message, headers=headers)
    elif not isinstance(error, GraphdecodeError):
        error = HttpError(500, "internal error; see the server's log")
    error = error if isinstance(error, HttpError) else as_http_error(error, frozenset())
    return error_response(error, request.scope)


# exception handlers of an application
HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = dict.fromkeys(
    (HttpError, GraphdecodeError, HTTPException, Exception), _handle
)


class Bodies:
    """Reads request bodies, and bounds the memory of those in processing."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._buffered = 0  # bytes of large bodies

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the body of a request, whose memory counts in the context; raises `HttpError` if it exceeds a bound."""
        config, data, counted = self._config, bytearray(), 0
        most = MAX_LARGE_BODIES * config.max_body_bytes
        try:
            try:
                async with asyncio.timeout(config.idle_timeout_s or None):
                    async for piece in request.stream():
                        data += piece
                        if len(data) > config.max_body_bytes:
                            raise HttpError(413, f"the body is larger than {config.max_body_bytes} bytes")
                        if len(data) > LARGE_BYTES:
                            self._buffered += len(data) - counted
                            counted = len(data)
                        if self._buffered > most and counted:
                            headers = {"Connection": "close", "Retry-After": "1"}
                            message = f"large request bodies exceed {most} bytes of memory; try again later"
                            raise HttpError(429, message, code="bodies", headers=headers)
            except TimeoutError:
                raise HttpError(408, "timed out while reading the body", headers={"Connection": "close"}) from None
            except ClientDisconnect:
                raise HttpError(499, "the client disconnected") from None
            yield bytes(data)
        finally:
            self._buffered -= counted


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; cancel it and return None if the client disconnects (its body has been read)."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# a `Logprob` becomes a dict of its fields
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=vars).encode


def as_json(data: Any) -> bytes:
    """Return JSON as bytes."""
    return _dumps(data).encode("utf-8", "replace")


def sse_event(data: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + as_json(data) + b"\n\n"


def typed_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Return server-sent events that are named by their `type`."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), as_json(event)) for event in events)
