"""Stored responses: `GET`, `DELETE` and `/cancel` of `/v1/responses/ID`, and its `/input_items`."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from graphdecode.errors import shown
from graphdecode.server.access import caller_of
from graphdecode.server.http import HttpError, as_json
from graphdecode.server.responses.store import ItemList, ResponseStore, StoredResponse

_PATH = "/v1/responses/{response}"


def response_routes(store: ResponseStore) -> list[Route]:
    """Return the endpoints of a store."""

    def asked(request: Request) -> tuple[str, str]:
        return caller_of(request.scope), request.path_params["response"]

    def found(request: Request) -> StoredResponse:
        return store.get(*asked(request))

    async def retrieve(request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise HttpError(400, "stream is for new responses: a stored one is whole", param="stream")
        return Response(found(request).body, media_type="application/json")

    async def delete(request: Request) -> Response:
        found(request)
        store.remove(*asked(request))
        return JSONResponse({"id": request.path_params["response"], "object": "response", "deleted": True})

    async def cancel(request: Request) -> Response:
        found(request)
        raise HttpError(400, "only a background response can be cancelled, and there are none: close its connection")

    async def input_items(request: Request) -> Response:
        query = request.query_params
        page = listed(found(request).input_items, query.get("limit"), query.get("order"), query.get("after"))
        return Response(page, media_type="application/json")

    return [
        Route(_PATH, retrieve, methods=["GET"]),
        Route(_PATH, delete, methods=["DELETE"]),
        Route(f"{_PATH}/cancel", cancel, methods=["POST"]),
        Route(f"{_PATH}/input_items", input_items, methods=["GET"]),
    ]


def listed(items: ItemList, limit: str | None, order: str | None, after: str | None) -> bytes:
    """Return a page of the input items of a response, in JSON; raises `HttpError`."""
    if limit is not None and not (limit.isdecimal() and 1 <= int(limit) <= 100):
        raise HttpError(400, f"limit must be an integer in 1..100, got {shown(limit)}", param="limit")
    if order not in (None, "asc", "desc"):
        raise HttpError(400, f"order must be asc or desc, got {shown(order)}", param="order")
    count = len(items.ends)
    places = range(count) if order == "asc" else range(count - 1, -1, -1)
    if after is not None:
        if (index := items.index(after)) is None:
            raise HttpError(400, f"after must be the id of an item, got {shown(after)}", param="after")
        places = places[places.index(index) + 1 :]
    page = [items.at(place) for place in places[: int(limit or 20)]]
    first, last = (json.loads(page[0])["id"], json.loads(page[-1])["id"]) if page else (None, None)
    about = {"object": "list", "first_id": first, "last_id": last, "has_more": len(page) < len(places)}
    return b'%s,"data":[%s]}' % (as_json(about)[:-1], b",".join(page))
