"""The HTTP application: endpoints, and access by host name and API key."""

from __future__ import annotations

import hashlib
import hmac
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from ipaddress import IPv6Address, ip_address
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
from starlette.types import ASGIApp, Receive, Scope, Send

from graphdecode.config import ServerConfig
from graphdecode.errors import shown
from graphdecode.server.completions import rendered_chat
from graphdecode.server.desk import Desk
from graphdecode.server.endpoint import GENERATING, Endpoint
from graphdecode.server.http import SAYING, HttpError, while_there
from graphdecode.server.protocol import Detokenize, Tokenize
from graphdecode.server.service import Service

_KEY = "graphdecode.key"  # in a scope: the digest of the key that let it in
_NETWORK_BYTES = 8  # of an address of IPv6; what is behind them one client may choose
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _Guard(ABC):
    """Lets requests through to the application behind it, or refuses them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    @abstractmethod
    def refusal(self, scope: Scope) -> HttpError | None:
        """Return why a request of HTTP is refused; None: it is let through."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it through."""
        wrong = self.refusal(scope) if scope["type"] == "http" else None
        if wrong is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(wrong.body, wrong.status, wrong.headers)(scope, receive, send)


class HostGuard(_Guard):
    """Refuses requests that call the server by a name which is not its own, `localhost`, or an address.

    A page of elsewhere can let its own name point to this machine (DNS rebinding), and then read what the server says:
    to the browser both are one origin. Its name stands in `Host`, and an address there is nobody's name.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        super().__init__(app)
        self._hosts = frozenset(host.lower().rstrip(".") for host in (*hosts, "localhost"))

    def refusal(self, scope: Scope) -> HttpError | None:
        """See `_Guard`."""
        for host in [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]:
            # without its port, and an address of IPv6 without its brackets
            name = host[1:].partition("]")[0] if host[:1] == "[" else host.partition(":")[0].lower().rstrip(".")
            if name not in self._hosts and not _is_address(name):
                told = f"this server is not called {name[:200]!r}; [server] allowed_hosts names more"
                return HttpError(403, told, code="host")
        return None


class KeyGuard(_Guard):
    """Lets into /v1 only who brings a key; comparing takes as long for a wrong key as for a right one."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        super().__init__(app)
        self._keys = [key.encode() for key in keys]

    def refusal(self, scope: Scope) -> HttpError | None:
        """See `_Guard`; the key that let a request in names its caller."""
        if not scope["path"].startswith("/v1") or scope["method"] == "OPTIONS":
            return None
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            headers = {"WWW-Authenticate": "Bearer"}
            return HttpError(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers)
        scope[_KEY] = hashlib.blake2b(key.strip(), digest_size=16).hexdigest()
        return None


def caller_of(scope: MutableMapping[str, Any]) -> str:
    """Return the caller of a request, who cannot choose it: the digest of the API key, else the client's address."""
    if _KEY in scope:
        return str(scope[_KEY])
    host = (scope.get("client") or ("",))[0]
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return address.packed[:_NETWORK_BYTES].hex()
    return host


def own_names(limits: ServerConfig) -> tuple[str, ...] | None:
    """Return the names, besides localhost, that a server may be called by; None: any."""
    names = tuple(limits.allowed_hosts)
    is_local = limits.host == "localhost" or (_is_address(limits.host) and ip_address(limits.host).is_loopback)
    return None if "*" in names or not (names or is_local) else names


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def prepared_tokens(desk: Desk, body: Tokenize) -> bytes:
    """Return the answer with the tokens of a text or of a conversation.

    Raises:
        HttpError: there is none.
    """
    if body.prompt is not None:
        ids = desk.input_processor.encode(body.prompt, special=body.add_special_tokens is not False)
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


async def _as_it_is(service: Service, prepared: bytes, caller: str) -> Response:
    return Response(prepared, media_type="application/json")


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Return facts for clients that render and tokenize themselves."""
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


def make_app(service: Service) -> Starlette:
    """Return the application over a service that was started."""
    card = {
        "id": service.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "graphdecode",
        "root": service.path.name,
        "max_model_len": service.client.rules.capacity.token_limit,
    }

    def one_model(request: Request) -> dict[str, object]:
        service.desk.check_model(request.path_params["model"])
        return card

    def health(_: Request) -> Response:  # empty, and 200 while requests are served
        return Response(status_code=200 if service.is_healthy else 503)

    def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def page(_: Request) -> Response:  # which needs nothing from elsewhere
        return FileResponse(_PAGE / "index.html", headers=_PAGE_HEADERS)

    posted: list[tuple[str, Endpoint[Any, Any, Response]]] = [
        *GENERATING.items(),
        ("/tokenize", Endpoint(Tokenize, prepared_tokens, _as_it_is)),
        ("/detokenize", Endpoint(Detokenize, prepared_text, _as_it_is)),
    ]
    routes = [
        Route("/v1/models", _get(lambda _: {"object": "list", "data": [card]})),
        Route("/v1/models/{model:path}", _get(one_model)),
        *[Route(url, _post(service, endpoint), methods=["POST"]) for url, endpoint in posted],
        Route("/tokenizer_info", _get(lambda _: tokenizer_info(service))),
        Route("/health", _get(health)),
        Route("/ping", _get(health)),
        Route("/version", _get(lambda _: {"version": service.version})),
        Route("/metrics", _get(metrics)),
        Route("/live", _get(lambda _: live(service))),
        Route("/", _get(page)),
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
    return Starlette(routes=routes, middleware=middleware, exception_handlers=SAYING)


def _get(answer: Callable[[Request], Response | dict[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers a request in the event loop, with JSON unless it is a response already."""

    async def answered(request: Request) -> Response:
        found = answer(request)
        return found if isinstance(found, Response) else JSONResponse(found)

    return answered


def _post(service: Service, endpoint: Endpoint[Any, Any, Response]) -> Callable[[Request], Awaitable[Response]]:
    """Return what takes requests with a body to an endpoint."""

    async def answered(request: Request) -> Response:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":  # a page of another origin may send the others unasked
            raise HttpError(415, f"the content type must be application/json, got {media_type[:100]!r}")
        async with service.bodies.read(request) as data:
            response = await while_there(request.receive, endpoint.respond(service, data, caller_of(request.scope)))
        if response is None:
            raise HttpError(499, "the client went away")
        return response

    return answered
