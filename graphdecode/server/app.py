"""The endpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from graphdecode.server.body import unless_gone
from graphdecode.server.endpoint import GENERATING, Endpoint
from graphdecode.server.guards import HostGuard, KeyGuard, caller_of, own_names
from graphdecode.server.http_errors import SAYING, HttpError
from graphdecode.server.live import live
from graphdecode.server.protocol import Detokenize, Tokenize
from graphdecode.server.service import Service
from graphdecode.server.tokens import as_it_is, prepared_text, prepared_tokens, tokenizer_info

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
