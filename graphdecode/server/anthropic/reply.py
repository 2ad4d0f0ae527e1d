"""`POST /v1/messages` and `/v1/messages/count_tokens`: their preparation, and outputs as messages and events."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from graphdecode.server.admission import Admission
from graphdecode.server.anthropic.request import CountTokens, Messages
from graphdecode.server.blocks import BlocksReply, ReplyBlock
from graphdecode.server.chat_completions import prepared_chat, rendered_chat
from graphdecode.server.http import HttpError, as_json, typed_events
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.reply import Prepared
from graphdecode.server.service import Service
from graphdecode.text.input_processor import ParentRequest

_DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}


class MessageReply(BlocksReply):
    """The response to a request for a message."""

    prefix = "msg_"

    def __init__(
        self, service: Service, prepared: Prepared, parents: list[ParentRequest], admission: Admission
    ) -> None:
        super().__init__(service, prepared, parents, admission)
        self._omits_thinking = bool(prepared.about)

    async def whole_body(self) -> bytes:
        """See `Reply.whole_body`."""
        content = [self._content(block) for block in self.blocks]
        return as_json(self._message(content) | self._ending() | {"usage": self._usage()})

    async def first_events(self) -> bytes:
        """See `Reply.first_events`."""
        begun = {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return typed_events([{"type": "message_start", "message": self._message([]) | begun}, {"type": "ping"}])

    def begun(self, block: ReplyBlock) -> list[dict[str, Any]]:
        """See `BlocksReply.begun`."""
        contents: dict[str, dict[str, Any]] = {
            "text": {"type": "text", "text": ""},
            "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
            "call": {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}},
        }
        return [{"type": "content_block_start", "index": block.index, "content_block": contents[block.kind]}]

    def grown(self, block: ReplyBlock, text: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """See `BlocksReply.grown`."""
        if block.kind == "reasoning" and self._omits_thinking:
            return []
        kind, name = _DELTAS.get(block.kind, ("input_json_delta", "partial_json"))
        return [{"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}]

    def ended(self, block: ReplyBlock) -> list[dict[str, Any]]:
        """See `BlocksReply.ended`."""
        stop = {"type": "content_block_stop", "index": block.index}
        if block.kind != "reasoning":
            return [stop]
        signed = {"type": "signature_delta", "signature": _signature(block.text)}
        return [{"type": "content_block_delta", "index": block.index, "delta": signed}, stop]

    async def last_events(self) -> bytes:
        """See `Reply.last_events`."""
        delta = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        return typed_events([delta, {"type": "message_stop"}])

    def failure_events(self, error: HttpError) -> bytes:
        """See `Reply.failure_events`."""
        return typed_events([error.anthropic_body])

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        model = self.body_fields.model or self.service.model_name
        return {"id": self.response_id, "type": "message", "role": "assistant", "model": model, "content": content}

    def _content(self, block: ReplyBlock) -> dict[str, Any]:
        match block.kind:
            case "text":
                return {"type": "text", "text": block.text}
            case "reasoning":
                thinking = "" if self._omits_thinking else block.text
                return {"type": "thinking", "thinking": thinking, "signature": _signature(block.text)}
            case "call":
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}

    def _ending(self) -> dict[str, Any]:
        """Return why the output ended."""
        output, most = self.cursor.state.output, self.body_fields.most_tokens
        reason, stop = "end_turn", None
        if output.finish_reason == "length":
            reason = "max_tokens" if len(output.token_ids) == most else "model_context_window_exceeded"
        elif any(block.kind == "call" for block in self.blocks) and not self.blocks[-1].is_cut:
            reason = "tool_use"
        elif isinstance(output.stop_reason, str):
            reason, stop = "stop_sequence", output.stop_reason
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        prompt = self.cursor.parent.output
        cached = prompt.metrics.num_cached_tokens
        return {
            "input_tokens": len(prompt.prompt_token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(self.cursor.state.output.token_ids),
            "output_tokens_details": {"thinking_tokens": self.num_reasoning_tokens},
        }


def _signature(thinking: str) -> str:
    """Return what clients keep beside a thought; it is not checked when it comes back."""
    digest = hashlib.blake2b(thinking.encode("utf-8", "replace"), digest_size=24).digest()
    return base64.b64encode(digest).decode()


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; empty for a call that was cut."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def prepared_message(preprocessor: Preprocessor, body: Messages) -> Prepared:
    """Validate, render and tokenize a request; see `Endpoint.prepare`."""
    return prepared_chat(preprocessor, body.as_chat())._replace(about=body.omits_thinking)


def prepared_count(preprocessor: Preprocessor, body: CountTokens) -> bytes:
    """Count the tokens of a prompt; see `Endpoint.prepare`."""
    chat = body.as_chat()
    rendered = rendered_chat(preprocessor, chat, with_tools=bool(chat.tools) and chat.tool_choice != "none")
    return as_json({"input_tokens": len(rendered.token_ids)})
