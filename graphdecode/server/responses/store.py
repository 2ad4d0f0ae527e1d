"""Responses that were stored, for requests that go on from them and for clients that ask for them again."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from graphdecode.server.http import HttpError, as_json


@dataclass(frozen=True)
class ItemList:
    """Items in JSON, one behind the other: a few objects however many they are, so that a process sends them fast."""

    data: bytes
    ends: array[int]  # where each item ends

    @staticmethod
    def of(items: Iterable[Mapping[str, Any]]) -> ItemList:
        """Return items that each have an id; raises ValueError for what is no JSON."""
        written = [as_json(item) for item in items]
        return ItemList(b"".join(written), array("Q", accumulate(map(len, written))))

    def at(self, index: int) -> bytes:
        """Return an item."""
        return self.data[self.ends[index - 1] if index else 0 : self.ends[index]]

    def index(self, item_id: str) -> int | None:
        """Return where an item is; None: nowhere."""
        sought, position = b'"id":' + as_json(item_id), 0
        while (position := self.data.find(sought, position)) >= 0:
            index = bisect_right(self.ends, position)
            if json.loads(self.at(index)).get("id") == item_id:  # and not something in it
                return index
            position = self.ends[index]
        return None

    def loaded(self) -> list[dict[str, Any]]:
        """Return the items as objects."""
        return [json.loads(self.at(index)) for index in range(len(self.ends))]


class StoredResponse(NamedTuple):
    """A response as it was sent, and the items of its request."""

    body: bytes  # JSON
    input_items: ItemList  # without those of the responses before it
    output_items: ItemList
    previous_id: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that count."""
        return len(self.body) + sum(len(each.data) + 8 * len(each.ends) for each in self.items)

    @property
    def items(self) -> tuple[ItemList, ItemList]:
        """The items of the request, and of the response."""
        return self.input_items, self.output_items


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
            for items in response.items:
                if (index := items.index(item_id)) is not None:
                    return items.at(index)
        raise HttpError(404, f"there is no item {item_id[:100]!r} in stored responses", param="input")
