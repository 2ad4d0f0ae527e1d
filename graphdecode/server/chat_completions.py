"""`POST /v1/chat/completions`: its messages to a prompt, and its outputs to a response with tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from graphdecode.errors import ArgumentError
from graphdecode.server import protocol
from graphdecode.server.admission import Admission
from graphdecode.server.choices import ChoicesReply
from graphdecode.server.http import HttpError
from graphdecode.server.logprobs import chat_logprobs
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.protocol import ChatCompletion, Tokenize
from graphdecode.server.reply import Cursor, Delta, Prepared
from graphdecode.server.service import Service
from graphdecode.server.structured_outputs import StructuredOutput, structured_output_of, structured_output_of_calls
from graphdecode.server.tool_prompts import function_name, messages_with_tools
from graphdecode.text.chat import RenderedChat, render_chat
from graphdecode.text.chat_formats import (
    BARE_JSON,
    CallArguments,
    CallStart,
    ChatFormat,
    Content,
    Reasoning,
    ReplyEvent,
    format_of,
)
from graphdecode.text.input_processor import ParentRequest


class ChatReply(ChoicesReply):
    """The response to a request for a chat completion."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    body_fields: ChatCompletion

    def __init__(
        self, service: Service, prepared: Prepared, parents: list[ParentRequest], admission: Admission
    ) -> None:
        super().__init__(service, prepared, parents, admission)
        self._echoed = prepared.echoed
        self._parsers = [prepared.parser() for _ in self.cursors]

    def choice(self, cursor: Cursor, delta: Delta, *, whole: bool = False) -> dict[str, Any] | None:
        """See `ChoicesReply.choice`."""
        body, logprobs = self.body_fields, None
        message, reason = self._message(cursor, delta.text, delta.finish_reason)
        if self._echoed and delta.is_first:
            message["content"] = self._echoed + message.get("content", "")
        if delta.logprobs is not None:
            most, as_ids = body.top_logprobs or 0, bool(body.return_tokens_as_token_ids)
            logprobs = chat_logprobs(self._texts, delta.token_ids, delta.logprobs, most, as_ids=as_ids)
        if whole:
            for call in message.get("tool_calls", ()):
                del call["index"]
            content = message.get("content", None if "tool_calls" in message else "")
            message = {"role": "assistant", "refusal": None, **message, "content": content}
        elif not (message or logprobs or reason or delta.is_first or body.return_token_ids):
            return None
        elif delta.is_first:
            message = {"role": "assistant", "content": "", **message}
        kind = "message" if whole else "delta"
        choice = {"index": cursor.index, kind: message, "logprobs": logprobs, "finish_reason": reason}
        if whole or reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if whole or body.return_token_ids:
            choice["token_ids"] = delta.token_ids if body.return_token_ids else None
        return choice

    def about_prompt(self, *, whole: bool) -> dict[str, Any]:
        """See `ChoicesReply.about_prompt`."""
        body, prompt = self.body_fields, self.parents[0].output
        tokens = {"prompt_token_ids": prompt.prompt_token_ids if body.return_token_ids else None}
        if not whole:
            return tokens if body.return_token_ids else {}
        return {"prompt_logprobs": None if body.prompt_logprobs is None else prompt.prompt_logprobs} | tokens

    def _message(self, cursor: Cursor, text: str, finish_reason: str | None) -> tuple[dict[str, Any], str | None]:
        parser = self._parsers[cursor.index]
        if parser is None:
            return ({"content": text} if text else {}), finish_reason
        message = _as_message(parser.feed(text, final=finish_reason is not None))
        # as OpenAI's: a call that `tool_choice` named ends with "stop"
        is_named = isinstance(self.body_fields.tool_choice, dict)
        called = finish_reason == "stop" and parser.num_calls and not is_named
        return message, "tool_calls" if called else finish_reason


def _as_message(events: Sequence[ReplyEvent]) -> dict[str, Any]:
    """Return events as a message, or as the delta of one."""
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    calls = dict[int, dict[str, Any]]()
    for event in events:
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            calls[event.index] = {"index": event.index, "id": event.call_id, "type": "function", "function": function}
        elif isinstance(event, CallArguments):
            call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += event.text
    message: dict[str, Any] = {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
    if content:
        message["content"] = content
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def prepared_chat(preprocessor: Preprocessor, body: ChatCompletion) -> Prepared:
    """Validate, render and tokenize a request; see `Endpoint.prepare`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    wants_tools = bool(body.tools) and body.tool_choice != "none"
    tools = dict(_functions(body))
    chat_format = _chat_format(preprocessor, body, body.tools) if wants_tools else None
    structured = _structured(preprocessor, body, chat_format)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = preprocessor.sampling_params(body, max_tokens=body.most_tokens, logprobs=logprobs)
    if chat_format is not None and chat_format.is_special:
        params = params.unchecked(skip_special_tokens=False)
    rendered = rendered_chat(preprocessor, body, with_tools=wants_tools)
    ending, is_structured = rendered.ending(params), structured is not None
    shared = preprocessor.tokenized_params(ending, 1, body, is_structured=is_structured)
    prompt = preprocessor.tokenized_prompt(rendered.text, rendered.token_ids, shared, body)
    return Prepared(protocol.without_large_parts(body), [prompt], structured, chat_format, tools, body.echoed)


def _structured(
    preprocessor: Preprocessor, body: ChatCompletion, chat_format: ChatFormat | None
) -> StructuredOutput | None:
    requested = structured_output_of(body)
    if chat_format is None:
        if body.tool_choice not in (None, "none", "auto"):
            raise HttpError(400, "tool_choice needs tools to choose from", param="tool_choice")
        return requested
    opening_id = preprocessor.tokenizer.convert_tokens_to_ids(chat_format.opening) if chat_format.is_special else None
    calls = structured_output_of_calls(body, chat_format, opening_id)
    if calls is not None and requested is not None:
        raise HttpError(
            400, f"{requested.field} cannot be combined with strict or required tools", param=requested.field
        )
    return requested or calls


def rendered_chat(
    preprocessor: Preprocessor, body: ChatCompletion | Tokenize, *, with_tools: bool = True
) -> RenderedChat:
    """Render and tokenize a conversation; raises `HttpError` for a forbidden template, or `ArgumentError`."""
    if body.chat_template is not None and not preprocessor.config.trust_request_chat_template:
        message = "chat_template is refused: it is a program, and [server] trust_request_chat_template is false"
        raise HttpError(400, message, param="chat_template")
    if body.messages and body.chat_template is None and not preprocessor.tokenizer.chat_template:
        raise ArgumentError(
            "this model has no chat template: use /v1/completions, which takes prompts as they are, or start with "
            "--chat-template FILE"
        )
    render = partial(
        render_chat,
        preprocessor.tokenizer,
        chat_template=body.chat_template,
        add_generation_prompt=body.begins_message,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.template_variables,
        add_special_tokens=bool(body.add_special_tokens),
    )
    messages, tools = body.messages or [], (body.tools or None) if with_tools else None
    if _chat_format(preprocessor, body, tools) is not BARE_JSON:
        return render(messages, tools=tools)
    choice = getattr(body, "tool_choice", None)
    try:
        return render(messages_with_tools(messages, tools, choice))
    except ArgumentError:  # some templates take no system message
        return render(messages_with_tools(messages, tools, choice, to_user=True))


def _chat_format(
    preprocessor: Preprocessor, body: ChatCompletion | Tokenize, tools: Sequence[dict[str, Any]] | None
) -> ChatFormat:
    """Return how the model writes calls: bare JSON if its template has no format."""
    try:
        template = preprocessor.tokenizer.get_chat_template(body.chat_template, tools)
    except ValueError:  # it has none, or several and no default
        template = None
    return format_of(template) or BARE_JSON


def _functions(body: ChatCompletion) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the functions that may be called, with the schemas of their parameters."""
    for index, tool in enumerate(body.tools or []):
        if (name := function_name(tool)) is None:
            raise HttpError(400, f"tools[{index}] must be a function with a name", param=f"tools[{index}]")
        yield name, tool["function"].get("parameters") or {}
