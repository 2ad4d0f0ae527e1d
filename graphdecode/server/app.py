"""The endpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from graphdecode.errors import shown
from graphdecode.server.body import unless_gone
from graphdecode.server.chat_completions import rendered_chat
from graphdecode.server.desk import Desk
from graphdecode.server.endpoint import GENERATING, Endpoint
from graphdecode.server.guards import HostGuard, KeyGuard, caller_of, own_names
from graphdecode.server.http_errors import SAYING, HttpError
from graphdecode.server.protocol import Detokenize, Tokenize
from graphdecode.server.service import Service


def prepared_tokens(desk: Desk, body: Tokenize) -> bytes:
    """Return the answer with the tokens of a text or of a conversation.

    Raises:
        HttpError: there is none.
    """
    if body.prompt is not None:
        ids = desk.intake.encode(body.prompt, special=body.add_special_tokens is not False)
    elif body.messages is not None:
        ids = rendered_chat(desk, body).token_ids
    else:
        raise HttpError(400, "prompt must be a text, or messages a conversation", param="prompt")
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": desk.serves.rules.capacity.token_limit,
        "tokens": ids,
        "token_strs": desk.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
    }
    return bytes(JSONResponse(answer).body)


def prepared_text(desk: Desk, body: Detokenize) -> bytes:
    """Return the answer with the text of some tokens.

    Raises:
        HttpError: one is none of the model's.
    """
    vocab_size = desk.serves.rules.vocab_size
    wrong = [token for token in body.tokens if not 0 <= token < vocab_size]
    if wrong:
        raise HttpError(400, f"tokens must be in 0..{vocab_size - 1}, got {shown(wrong[:5])}", param="tokens")
    return bytes(JSONResponse({"prompt": desk.tokenizer.decode(body.tokens)}).body)


async def as_it_is(service: Service, prepared: bytes, caller: str) -> Response:
    """Return the response that was prepared."""
    return Response(prepared, media_type="application/json")


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Return what clients that render and tokenise themselves want to know."""
    tokenizer = service.tokenizer
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "model_max_length": service.client.rules.capacity.token_limit,
        "chat_template": tokenizer.chat_template,
        **special,
    }


def live(service: Service) -> dict[str, Any]:
    """Return counts since the start, medians over what came last, and how answers are sampled; times are in seconds.

    There is a floor only below the step: one above was measured while other work took the bandwidth.
    """
    metrics, defaults = service.metrics, service.sampling_defaults
    vitals, ready = metrics.vitals, service.client.ready
    step = median(metrics.last_steps) if metrics.last_steps else None
    floor = None if ready is None or step is None else ready.floor_seconds
    told = {
        "time": time.monotonic(),
        "model": service.model_name,
        "has_chat_template": bool(service.tokenizer.chat_template),
        "buckets": [] if ready is None else ready.buckets,
        "sampling": {name: getattr(defaults, name) for name in ("temperature", "top_p", "top_k")},
        "floor_seconds": None if floor is None or step is None or floor > step else floor,
        "step_seconds": step,
        "first_token_seconds": median(metrics.last_first_tokens) if metrics.last_first_tokens else None,
        "generated_tokens": metrics.generated_tokens,
        "restarts": service.client.restarts,
    }
    names = ("running", "waiting", "used_pages", "total_pages", "preemptions", "bucket_steps", "batch_sizes")
    return told | {name: getattr(vitals, name) if vitals else ({} if name in names[-2:] else 0) for name in names}


_PAGE = Path(__file__).parent / "page"
_PAGE_MAY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"

log = logging.getLogger(__name__)


def make_app(service: Service) -> Starlette:
    """Return the application over a service that was started."""
    endpoints = Endpoints(service)
    routes = [
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{model:path}", endpoints.model),
        *[Route(url, endpoints.of(endpoint), methods=["POST"]) for url, endpoint in GENERATING.items()],
        Route("/tokenize", endpoints.of(Endpoint(Tokenize, prepared_tokens, as_it_is)), methods=["POST"]),
        Route("/detokenize", endpoints.of(Endpoint(Detokenize, prepared_text, as_it_is)), methods=["POST"]),
        Route("/tokenizer_info", endpoints.tokenizer_info),
        Route("/health", endpoints.health),
        Route("/ping", endpoints.health),
        Route("/version", endpoints.version),
        Route("/metrics", endpoints.metrics),
        Route("/live", endpoints.live),
        Route("/", endpoints.page),
        Mount("/page", StaticFiles(directory=_PAGE)),
    ]
    limits = service.limits
    middleware = []
    if (names := own_names(limits)) is not None:
        middleware.append(Middleware(HostGuard, hosts=names))
    if limits.cors_origins:
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=limits.cors_origins, allow_methods=["*"], allow_headers=["*"])
        )
    if service.api_keys:
        middleware.append(Middleware(KeyGuard, keys=service.api_keys))
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=SAYING,
    )


class Endpoints:
    """Reads what a request says, and lets the service answer it.

    Args:
        service: that was started.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())

    def of(self, endpoint: Endpoint[Any, Any, Response]) -> Callable[[Request], Awaitable[Response]]:
        """Return what takes requests to an endpoint."""

        async def taken(request: Request) -> Response:
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media_type != "application/json":  # a page of another origin may send the others unasked
                raise HttpError(415, f"the content type must be application/json, got {media_type[:100]!r}")
            async with self._service.bodies.read(request) as data:
                return await unless_gone(
                    request.receive, endpoint.respond(self._service, data, caller_of(request.scope))
                )

        return taken

    def _card(self) -> dict[str, object]:
        service = self._service
        return {
            "id": service.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "graphdecode",
            "root": service.path.name,
            "max_model_len": service.client.rules.capacity.token_limit,
        }

    async def models(self, _: Request) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        self._service.desk.check_model(request.path_params["model"])
        return JSONResponse(self._card())

    async def tokenizer_info(self, _: Request) -> Response:
        """`GET /tokenizer_info`."""
        return JSONResponse(tokenizer_info(self._service))

    async def health(self, _: Request) -> Response:
        """`GET /health`: empty, and 200 while requests are served."""
        return Response(status_code=200 if self._service.is_healthy else 503)

    async def version(self, _: Request) -> Response:
        """`GET /version`."""
        return JSONResponse({"version": self._service.version})

    async def live(self, _: Request) -> Response:
        """`GET /live`, for the page."""
        return JSONResponse(live(self._service))

    async def page(self, _: Request) -> Response:
        """`GET /`: the page, which needs nothing from elsewhere."""
        headers = {
            "Content-Security-Policy": _PAGE_MAY,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return FileResponse(_PAGE / "index.html", headers=headers)

    async def metrics(self, _: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
