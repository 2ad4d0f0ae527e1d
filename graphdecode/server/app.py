"""The HTTP application: its endpoints."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
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

from graphdecode.config import ServerConfig
from graphdecode.errors import AnswerError, shown
from graphdecode.server.access import DEV_PATHS, Addressed, Guard, allowed_host_names, caller_of, check_host, check_key
from graphdecode.server.chat_completions import rendered_chat
from graphdecode.server.endpoints import (
    GENERATING,
    OLLAMA,
    POOLING,
    TRANSLATED,
    Endpoint,
    GeneratingEndpoint,
    as_prepared,
)
from graphdecode.server.http import BUSY, HANDLERS, HttpError, unless_disconnected
from graphdecode.server.ollama import tag
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.protocol import Detokenize, LoadAdapter, Tokenize, UnloadAdapter
from graphdecode.server.responses.routes import response_routes
from graphdecode.server.service import Service

_PAGE = Path(__file__).parent / "page"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


_ADAPTERS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def prepared_tokens(preprocessor: Preprocessor, body: Tokenize) -> bytes:
    """Tokenize a text or a conversation; see `Endpoint.prepare`."""
    if body.prompt is not None:
        ids = preprocessor.input_processor.encode(body.prompt, special=body.add_special_tokens is not False)
    elif body.messages is not None:
        ids = rendered_chat(preprocessor, body).token_ids
    else:
        raise HttpError(400, "prompt or messages is required", param="prompt")
    content: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": preprocessor.engine.rules.capacity.token_limit,
        "tokens": ids,
        "token_strs": preprocessor.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
    }
    return bytes(JSONResponse(content).body)


def prepared_text(preprocessor: Preprocessor, body: Detokenize) -> bytes:
    """Detokenize; see `Endpoint.prepare`."""
    vocab_size = preprocessor.engine.rules.vocab_size
    wrong = [token for token in body.tokens if not 0 <= token < vocab_size]
    if wrong:
        raise HttpError(400, f"tokens must be in 0..{vocab_size - 1}, got {shown(wrong[:5])}", param="tokens")
    return bytes(JSONResponse({"prompt": preprocessor.tokenizer.decode(body.tokens)}).body)


def _unchanged(_: Preprocessor, body: Any) -> Any:
    return body


async def _load_adapter(service: Service, body: LoadAdapter) -> Response:
    await service.load_adapter(body.lora_name, body.lora_path)
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def _unload_adapter(service: Service, body: UnloadAdapter) -> Response:
    await service.unload_adapter(body.lora_name)
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Return what clients need to render and tokenize by themselves."""
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
    """Return counts since the start, medians over recent steps and requests, and sampling defaults; times in seconds.

    A bandwidth floor above the step time is left out: it was measured while other work took the bandwidth.
    """
    metrics, defaults, ready = service.metrics, service.sampling_defaults, service.client.ready
    status = metrics.engine_status
    step = median(metrics.last_steps) if metrics.last_steps else None
    floor = None if ready is None or step is None else ready.floor_seconds
    return {
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
        **{name: getattr(status, name) for name in ("running", "waiting", "used_pages", "total_pages", "preemptions")},
        "bucket_steps": status.stats.bucket_steps,
        "batch_sizes": status.stats.batch_sizes,
    }


def _dev_routes(service: Service) -> list[Route]:
    """Return the endpoints of vLLM's development mode, which control the engine."""
    call = service.client.call

    async def sleep(request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise HttpError(400, f"level must be 1 or 2, got {shown(level)}", param="level")
        await call("sleep", int(level))
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def wake_up(request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        await call("wake_up", tags)
        return JSONResponse({"status": "sleeping" if await call("is_sleeping") else "awake", "tags": tags})

    async def is_sleeping(_: Request) -> Response:
        return JSONResponse({"is_sleeping": await call("is_sleeping")})

    async def reset_prefix_cache(_: Request) -> Response:
        try:
            await call("reset_prefix_cache")
        except AnswerError as error:
            if error.code != BUSY:
                raise
            return JSONResponse({"success": False})
        return JSONResponse({"success": True})

    posted = {"/sleep": sleep, "/wake_up": wake_up, "/reset_prefix_cache": reset_prefix_cache}
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posted.items()]
    return [*routes, Route("/is_sleeping", is_sleeping)]


def middleware_of(config: ServerConfig, api_keys: Sequence[str]) -> list[Middleware]:
    """Return what checks each request before it is routed."""
    middleware = [Middleware(Addressed, root_path=config.root_path)]
    if (names := allowed_host_names(config)) is not None:
        middleware.append(Middleware(Guard, check=partial(check_host, names)))
    if origins := config.cors_origins:
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    if api_keys:
        middleware.append(Middleware(Guard, check=partial(check_key, api_keys)))
    return middleware


def page_routes() -> list[Route | Mount]:
    """Return the page and its files."""
    return [
        Route("/", _get(lambda _: FileResponse(_PAGE / "index.html", headers=_PAGE_HEADERS))),
        Mount("/page", StaticFiles(directory=_PAGE)),
    ]


def make_app(service: Service, *, is_alone: bool = True, is_guarded: bool = True) -> Starlette:
    """Return the application over a service that was started; only one that `is_alone` has `dev_endpoints`.

    `is_guarded`: it checks hosts and keys; else an application in front of it does.
    """
    card = {
        "id": service.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "graphdecode",
        "root": str(service.path),
        "max_model_len": service.client.rules.capacity.token_limit,
    }

    def card_of(name: str) -> dict[str, object]:
        is_adapter = service.preprocessor.adapter_of(name) is not None
        root = service.client.adapters.get(name, name)
        return card | ({"id": name, "root": root, "parent": service.model_name} if is_adapter else {})

    def all_models(_: Request) -> dict[str, object]:
        return {"object": "list", "data": [card_of(name) for name in (service.model_name, *service.client.adapters)]}

    def one_model(request: Request) -> dict[str, object]:
        name = request.path_params["model"]
        service.preprocessor.check_model(name)
        return card_of(name)

    def health(_: Request) -> Response:
        return Response(status_code=200 if service.is_healthy else 503)

    metrics_type = "text/plain; version=0.0.4; charset=utf-8"
    posted: list[tuple[str, Endpoint | GeneratingEndpoint]] = [
        *GENERATING.items(),
        *POOLING.items(),
        *OLLAMA.items(),
        *TRANSLATED.items(),
        ("/tokenize", Endpoint(Tokenize, prepared_tokens, as_prepared)),
        ("/detokenize", Endpoint(Detokenize, prepared_text, as_prepared)),
        (_ADAPTERS[0], Endpoint(LoadAdapter, _unchanged, _load_adapter)),
        (_ADAPTERS[1], Endpoint(UnloadAdapter, _unchanged, _unload_adapter)),
    ]
    routes = [
        Route("/v1/models", _get(all_models)),
        Route("/v1/models/{model:path}", _get(one_model)),
        *[Route(url, _post(service, endpoint), methods=["POST"]) for url, endpoint in posted],
        *response_routes(service.responses),
        Route("/api/tags", _get(lambda _: {"models": [tag(service.model_name, service.path)]})),
        Route("/api/ps", _get(lambda _: {"models": [tag(service.model_name, service.path)]})),
        Route("/api/version", _get(lambda _: {"version": service.version})),
        Route("/tokenizer_info", _get(lambda _: tokenizer_info(service))),
        Route("/health", _get(health)),
        Route("/ping", _get(health)),
        Route("/version", _get(lambda _: {"version": service.version})),
        Route("/metrics", _get(lambda _: Response(service.metrics.text(), media_type=metrics_type))),
        Route("/load", _get(lambda _: {"server_load": service.num_open})),
        Route("/live", _get(lambda _: live(service))),
        *page_routes(),
    ]
    config = service.config
    if config.dev_endpoints and is_alone:
        routes += _dev_routes(service)
    middleware = middleware_of(config, service.api_keys) if is_guarded else []
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)
    app.state.disabled = _disabled(config, is_alone=is_alone)
    return app


def _disabled(config: ServerConfig, *, is_alone: bool) -> dict[str, str]:
    """Return the endpoints that settings turn off, and how to turn them on."""
    disabled: dict[str, str] = {}
    if not is_alone:
        disabled |= dict.fromkeys(DEV_PATHS, "it is for a server of one engine")
    elif not config.dev_endpoints:
        disabled |= dict.fromkeys(DEV_PATHS, "[server] dev_endpoints = true in a configuration file turns it on")
    if config.lora_folder is None:
        disabled |= dict.fromkeys(_ADAPTERS, "[server] lora_folder turns it on")
    return disabled


def _get(endpoint: Callable[[Request], Response | dict[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler in the event loop, whose response is JSON unless it is a `Response`."""

    async def answered(request: Request) -> Response:
        result = endpoint(request)
        return result if isinstance(result, Response) else JSONResponse(result)

    return answered


def _post(service: Service, endpoint: Endpoint | GeneratingEndpoint) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that passes bodies to an endpoint."""

    async def answered(request: Request) -> Response:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":  # a browser sends others from any origin
            raise HttpError(415, f"the content type must be application/json, got {media_type[:100]!r} (curl: --json)")
        async with service.bodies.read(request) as data:
            response = await unless_disconnected(
                request.receive, endpoint.respond(service, data, caller_of(request.scope))
            )
        if response is None:
            raise HttpError(499, "the client disconnected")
        return response

    return answered
