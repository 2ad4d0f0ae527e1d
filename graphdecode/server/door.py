"""The application in front of several models: their list and states, metrics of all, and the rest by a model's own."""

from __future__ import annotations

import time
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from graphdecode.server.app import middleware_of, page_routes
from graphdecode.server.http import HANDLERS
from graphdecode.server.model_pool import ModelPool, PooledModel
from graphdecode.server.ollama import tag
from graphdecode.server.replicas.front import merged
from graphdecode.server.responses.routes import response_routes


def make_door(pool: ModelPool, api_keys: list[str], version: str) -> Starlette:
    """Return the application over a pool of models."""
    created = int(time.time())

    def card_of(model: PooledModel) -> dict[str, Any]:
        limit = None if model.service is None else model.service.client.rules.capacity.token_limit
        card = {"id": model.name, "object": "model", "created": created, "owned_by": "graphdecode"}
        return card | {"root": str(model.path), "max_model_len": limit, "state": model.state}

    async def all_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card_of(model) for model in pool.models.values()]})

    async def one_model(request: Request) -> Response:
        return JSONResponse(card_of(pool.named(request.path_params["model"])))

    async def health(_: Request) -> Response:
        services = pool.services
        ends = pool.draining or (bool(services) and not any(service.is_healthy for service in services))
        return Response(status_code=503 if ends else 200)

    async def metrics(_: Request) -> Response:
        texts = {service.model_name: service.metrics.text().decode() for service in pool.services}
        return Response(merged(texts, None) + pool.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def get_version(_: Request) -> Response:
        return JSONResponse({"version": version})

    async def load(_: Request) -> Response:
        return JSONResponse({"server_load": pool.num_open})

    async def tags(_: Request) -> Response:
        return JSONResponse({"models": [tag(model.name, model.path) for model in pool.models.values()]})

    async def running(_: Request) -> Response:
        loaded = [model for model in pool.models.values() if model.state == "loaded"]
        return JSONResponse({"models": [tag(model.name, model.path) for model in loaded]})

    routes = [
        Route("/v1/models", all_models),
        Route("/v1/models/{model:path}", one_model),
        Route("/health", health),
        Route("/ping", health),
        Route("/version", get_version),
        Route("/api/tags", tags),
        Route("/api/ps", running),
        Route("/api/version", get_version),
        Route("/metrics", metrics),
        Route("/load", load),
        *response_routes(pool.responses),
        *page_routes(),
        Mount("", pool),
    ]
    return Starlette(routes=routes, middleware=middleware_of(pool.config, api_keys), exception_handlers=HANDLERS)
