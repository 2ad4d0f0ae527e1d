"""`POST /v1/responses`: its preparation, and outputs as items and events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from graphdecode.server.admission import Admission
from graphdecode.server.blocks import BlocksReply, ReplyBlock
from graphdecode.server.chat_completions import prepared_chat
from graphdecode.server.choices import in_pieces
from graphdecode.server.http import HttpError, as_json
from graphdecode.server.logprobs import chat_logprobs
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.reply import Delta, Prepared
from graphdecode.server.responses.request import CallableTool, Item, Responses, sealed
from graphdecode.server.responses.store import ItemList, StoredResponse
from graphdecode.server.service import Service
from graphdecode.text.input_processor import ParentRequest

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class NeededItems(NamedTuple):
    """What a request refers to, and a preparation has not been given."""

    previous_id: str | None
    item_ids: list[str]


class KnownItems(NamedTuple):
    """Stored items that a request refers to, in JSON; picklable."""

    history: list[StoredResponse]  # the first one first
    referred: Mapping[str, bytes]  # by id

    @property
    def nbytes(self) -> int:
        """Bytes that are read again with them."""
        return sum(response.nbytes for response in self.history) + sum(map(len, self.referred.values()))


class AboutResponse(NamedTuple):
    """What a reply needs to know of its request."""

    echo: bytes  # JSON: fields that repeat the request
    input_items: ItemList
    tools: Mapping[str, CallableTool]  # by the names of their functions
    previous_id: str | None
    is_stored: bool
    wants_summary: bool
    wants_encrypted: bool
    caller: str = ""


class ResponseReply(BlocksReply):
    """The response to a request for a response."""

    prefix = "resp_"

    def __init__(
        self, service: Service, prepared: Prepared, parents: list[ParentRequest], admission: Admission
    ) -> None:
        super().__init__(service, prepared, parents, admission)
        self._about: AboutResponse = prepared.about
        self._number = 0  # of the next event
        self._item_ids: list[str] = []  # of the blocks

    async def whole_body(self) -> bytes:
        """See `Reply.whole_body`."""
        body = await self._response()
        if self._about.is_stored:
            output = ItemList.of(self._output())
            stored = StoredResponse(body, self._about.input_items, output, self._about.previous_id)
            self.service.responses.put(self._about.caller, self.response_id, stored)
        return body

    def name_as(self, request_id: str) -> None:
        """Keep the response's own id, by which it is asked for again."""

    async def first_events(self) -> bytes:
        """See `Reply.first_events`."""
        response = await self._response("in_progress")
        return self._with_response("response.created", response) + self._with_response("response.in_progress", response)

    async def last_events(self) -> bytes:
        """See `Reply.last_events`."""
        response, is_whole = await self.whole_body(), self._reason_incomplete() is None
        return self._with_response("response.completed" if is_whole else "response.incomplete", response)

    def failure_events(self, error: HttpError) -> bytes:
        """See `Reply.failure_events`."""
        failed = {"error": {"code": "server_error", "message": str(error)}, "incomplete_details": None}
        response = self._head("failed") | failed | {"output": self._output(), "usage": None}
        return self._with_response("response.failed", self._with_echo(as_json(response)))

    def scored(self, delta: Delta) -> list[dict[str, Any]]:
        """See `BlocksReply.scored`."""
        if delta.logprobs is None:
            return []
        most = getattr(self.body_fields, "top_logprobs", None) or 0
        scores: list[dict[str, Any]] = chat_logprobs(self._texts, delta.token_ids, delta.logprobs, most, as_ids=False)[
            "content"
        ]
        return scores

    def begun(self, block: ReplyBlock) -> list[dict[str, Any]]:
        """See `BlocksReply.begun`."""
        prefix = "ctc" if self._is_custom(block) else _PREFIXES[block.kind]
        self._item_ids.append(f"{prefix}_{uuid.uuid4().hex}")
        item = self._item(block, status="in_progress")
        if block.kind != "call":
            item |= {"content": []} if block.kind == "text" else {"content": [], "summary": []}
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        return [added] if block.kind == "call" else [added, self._part_event(block, "added")]

    def grown(self, block: ReplyBlock, text: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """See `BlocksReply.grown`."""
        match block.kind:
            case "text":
                return [self._of_part("response.output_text.delta", block, delta=text, logprobs=logprobs)]
            case "reasoning":
                return [self._of_part(f"response.{self._thought_name}.delta", block, delta=text)]
            case "call":
                name = "response.function_call_arguments.delta"
                return [] if self._is_custom(block) else [self._of_item(name, block, delta=text)]

    def ended(self, block: ReplyBlock) -> list[dict[str, Any]]:
        """See `BlocksReply.ended`."""
        done = []
        match block.kind:
            case "text":
                done.append(self._of_part("response.output_text.done", block, text=block.text, logprobs=block.logprobs))
                done.append(self._part_event(block, "done"))
            case "reasoning":
                done.append(self._of_part(f"response.{self._thought_name}.done", block, text=block.text))
                done.append(self._part_event(block, "done"))
            case "call":
                if self._is_custom(block):
                    text, name = _custom_input(block.text), "response.custom_tool_call_input"
                    done.append(self._of_item(f"{name}.delta", block, delta=text))
                    done.append(self._of_item(f"{name}.done", block, input=text))
                else:
                    name = "response.function_call_arguments.done"
                    done.append(self._of_item(name, block, arguments=block.text))
        item = self._item(block)
        return [*done, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _with_response(self, kind: str, response: bytes) -> bytes:
        head = as_json(self._event(kind))
        return b'event: %s\ndata: %s,"response":%s}\n\n' % (kind.encode(), head[:-1], response)

    def _of_item(self, kind: str, block: ReplyBlock, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._item_ids[block.index], output_index=block.index, **fields)

    def _of_part(self, kind: str, block: ReplyBlock, **fields: Any) -> dict[str, Any]:
        place = "summary_index" if block.kind == "reasoning" and self._about.wants_summary else "content_index"
        return self._of_item(kind, block, **{place: 0}, **fields)

    @property
    def _thought_name(self) -> str:
        return "reasoning_summary_text" if self._about.wants_summary else "reasoning_text"

    def _part_event(self, block: ReplyBlock, what: str) -> dict[str, Any]:
        is_summary = block.kind == "reasoning" and self._about.wants_summary
        name = "reasoning_summary_part" if is_summary else "content_part"
        return self._of_part(f"response.{name}.{what}", block, part=self._part(block))

    def _part(self, block: ReplyBlock) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}
        return {"type": "summary_text" if self._about.wants_summary else "reasoning_text", "text": block.text}

    def _item(self, block: ReplyBlock, status: str | None = None) -> Item:
        status = status or ("incomplete" if block.is_cut else "completed")
        item: Item = {"id": self._item_ids[block.index], "status": status}
        match block.kind:
            case "text":
                return item | {"type": "message", "role": "assistant", "content": [self._part(block)]}
            case "reasoning":
                parts = {"summary": [], "content": [self._part(block)]}
                if self._about.wants_summary:
                    parts = {"summary": parts["content"], "content": []}
                kept = {"encrypted_content": sealed(block.text)} if self._about.wants_encrypted else {}
                return item | {"type": "reasoning", **parts, **kept}
            case "call":
                tool = self._about.tools.get(block.name, CallableTool(block.name))
                called = {"call_id": block.call_id, "name": tool.name}
                called |= {"namespace": tool.namespace} if tool.namespace else {}
                if not tool.is_custom:
                    return item | {"type": "function_call", **called, "arguments": block.text}
                del item["status"]  # this kind has none
                return item | {"type": "custom_tool_call", **called, "input": _custom_input(block.text)}

    def _is_custom(self, block: ReplyBlock) -> bool:
        tool = self._about.tools.get(block.name)
        return block.kind == "call" and tool is not None and tool.is_custom

    def _output(self) -> list[Item]:
        return [self._item(block) for block in self.blocks]

    def _head(self, status: str) -> dict[str, Any]:
        model = self.body_fields.model or self.service.model_name
        head = {"id": self.response_id, "object": "response", "created_at": self.created, "status": status}
        fields = self.parents[0].children[0][0].sampling_params
        return head | {"model": model, "temperature": fields.temperature, "top_p": fields.top_p}

    def _reason_incomplete(self) -> str | None:
        return "max_output_tokens" if self.cursor.state.output.finish_reason == "length" else None

    async def _response(self, status: str | None = None) -> bytes:
        """Return the response as it is now, in JSON; `status`: while it goes on."""
        reason = self._reason_incomplete()
        details = None if reason is None else {"reason": reason}
        response = self._head(status or ("completed" if reason is None else "incomplete"))
        response |= {"error": None, "incomplete_details": details, "output": self._output()}
        if status is None:
            response |= {"completed_at": int(time.time())} if reason is None else {}
            return self._with_echo(await in_pieces(response | {"usage": self._usage()}))
        return self._with_echo(await in_pieces(response | {"usage": None}))

    def _with_echo(self, response: bytes) -> bytes:
        store = b'"store":true,' if self._about.is_stored else b'"store":false,'
        return response[:-1] + b"," + store + self._about.echo[1:]

    def _usage(self) -> dict[str, Any]:
        prompt, output = self.cursor.parent.output, self.cursor.state.output
        read, written = len(prompt.prompt_token_ids), len(output.token_ids)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": prompt.metrics.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": read + written,
        }


def _custom_input(arguments: str) -> str:
    """Return the text that is the input of a custom tool; the arguments as they are if they were cut."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def prepared_response(
    preprocessor: Preprocessor, body: Responses, known: KnownItems | None = None
) -> Prepared | NeededItems:
    """Validate, render and tokenize a request; `NeededItems` if it refers to items that are not `known` yet."""
    if known is None:
        if body.previous_response_id is not None or body.references:
            return NeededItems(body.previous_response_id, body.references)
        known = KnownItems([], {})
    items = body.items({item_id: json.loads(data) for item_id, data in known.referred.items()})
    before = [item for response in known.history for items in response.items for item in items.loaded()]
    prepared = prepared_chat(preprocessor, body.as_chat([*before, *items]))
    try:
        echo, stored = as_json(body.echo()), ItemList.of(items)
    except ValueError as error:  # NaN
        raise HttpError(400, f"the body cannot be repeated as JSON: {error}") from error
    about = AboutResponse(
        echo,
        stored,
        body.callable_tools(),
        body.previous_response_id,
        body.store is not False,
        body.wants_summary,
        body.wants_encrypted,
    )
    return prepared._replace(about=about)
