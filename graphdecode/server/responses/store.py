"""Responses that were stored, for requests that go on from them and for clients that ask for them again."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from graphdecode.server.http import HttpError


class StoredItem(NamedTuple):
    """An item of a request or of a response."""

    item_id: str
    data: bytes  # JSON


class StoredResponse(NamedTuple):
    """A response as it was sent, and the items of its request."""

    body: bytes  # JSON
    input_items: list[StoredItem]  # without those of the responses before it
    output_items: list[StoredItem]
    previous_id: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that count."""
        return len(self.body) + sum(len(item.data) for item in self.items)

    @property
    def items(self) -> list[StoredItem]:
        """The items of the request and of the response, in order."""
        return [*self.input_items, *self.output_items]


class ResponseStore:
    """The responses that were used last, bounded in number and bytes; each caller sees its own.

    Where there is no room, the caller that holds the most bytes loses what it used least recently.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._of_callers: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._bytes: dict[str, int] = {}  # by caller

    def _held_by(self, caller: str) -> OrderedDict[str, StoredResponse]:
        return self._of_callers.get(caller, OrderedDict())

    def put(self, caller: str, response_id: str, response: StoredResponse) -> None:
        """Store a response."""
        self.remove(caller, response_id)
        self._of_callers.setdefault(caller, OrderedDict())[response_id] = response
        self._bytes[caller] = self._bytes.get(caller, 0) + response.nbytes
        while sum(map(len, self._of_callers.values())) > self._max_responses or (
            sum(self._bytes.values()) > self._max_bytes
        ):
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self.remove(largest, next(iter(self._of_callers[largest])))

    def get(self, caller: str, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """Return a caller's response, and mark it as used; raises `HttpError` (404) if there is none."""
        response = self._held_by(caller).get(response_id)
        if response is None:
            message = f"there is no response {response_id[:100]!r}: it was not stored, or others took its place"
            raise HttpError(404, message, param=param, code="response_not_found")
        self._of_callers[caller].move_to_end(response_id)
        return response

    def remove(self, caller: str, response_id: str) -> bool:
        """Forget a response; return whether there was one."""
        response = self._held_by(caller).pop(response_id, None)
        if response is None:
            return False
        self._bytes[caller] -= response.nbytes
        if not self._of_callers[caller]:
            del self._of_callers[caller], self._bytes[caller]
        return True

    def history(self, caller: str, response_id: str) -> list[StoredResponse]:
        """Return a response and those before it, the first one first; raises `HttpError` if one is missing."""
        responses = list[StoredResponse]()
        following: str | None = response_id
        while following is not None:  # the first becomes the one that was used last, and stays longest
            responses.append(self.get(caller, following, param="previous_response_id"))
            following = responses[-1].previous_id
        return responses[::-1]

    def item(self, caller: str, item_id: str) -> bytes:
        """Return an item of a caller's responses by its id, in JSON; raises `HttpError` (404) if there is none."""
        for response in reversed(self._held_by(caller).values()):
            for item in response.items:
                if item.item_id == item_id:
                    return item.data
        raise HttpError(404, f"there is no item {item_id[:100]!r} in stored responses", param="input")
