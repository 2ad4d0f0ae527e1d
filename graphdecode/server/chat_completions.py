"""`POST /v1/chat/completions`: its messages to a prompt, and its outputs to a response with tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from graphdecode.server.structured_outputs import structured_output_of, structured_output_of_calls
from graphdecode.server.tool_prompts import function_name, messages_with_system_tools, messages_with_tools
from graphdecode.text.chat import RenderedChat, render_chat
from graphdecode.text.chat_formats import (
    CallArguments,
    CallStart,
    Content,
    Reasoning,
    ReplyEvent,
    with_bare_calls,
)
from graphdecode.text.chat_formats.constraint import Calling
from graphdecode.text.chat_formats.thinking import opens_thought
from graphdecode.text.chat_formats.thought_tokens import ThoughtTokens
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
        self._parsers = [prepared.parser(cursor.parent) for cursor in self.cursors]
        self._thoughts = list[ThoughtTokens]()
        if (chat_format := prepared.chat_format) is not None and chat_format.thinks:
            count = partial(ThoughtTokens, chat_format, self._texts.bytes_of, in_reasoning=prepared.in_reasoning)
            self._thoughts = [count() for _ in self.cursors]

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

    def usage(self) -> dict[str, Any]:
        """See `ChoicesReply.usage`."""
        usage = super().usage()
        if self._thoughts:
            pairs = zip(self._thoughts, self.cursors, strict=True)
            thoughts = sum(each.count(cursor.state.output.token_ids) for each, cursor in pairs)
            usage["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        return usage

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
        if self.body_fields.include_reasoning is False:
            message = {name: value for name, value in message.items() if name not in ("reasoning", "reasoning_content")}
        # as OpenAI's: a call that `tool_choice` named ends with "stop"
        is_named = isinstance(self.body_fields.tool_choice, dict)
        called = finish_reason == "stop" and parser.num_calls and not (is_named or parser.is_cut)
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
    functions = dict(_functions(body))
    tools = functions if wants_tools else {}
    if not tools and body.tool_choice not in (None, "none", "auto"):
        raise HttpError(400, "tool_choice needs tools to choose from", param="tool_choice")
    requested = structured_output_of(body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = preprocessor.sampling_params(body, max_tokens=body.most_tokens, logprobs=logprobs)
    chat_format = preprocessor.chat_format(body.chat_template, body.tools if wants_tools else None)
    if chat_format is not None and not wants_tools:
        chat_format = replace(chat_format, calls=None)
    if wants_tools:
        chat_format = with_bare_calls(chat_format)
    rendered = rendered_chat(preprocessor, body, with_tools=wants_tools)
    if chat_format is not None and preprocessor.input_processor.special_tokens(chat_format.markers):
        params = params.unchecked(skip_special_tokens=False)
    thinking = None if chat_format is None else chat_format.thinking
    begins = body.begins_message
    in_reasoning = thinking is not None and opens_thought(thinking, rendered.text, begins_message=begins)
    structured = requested
    content = None if requested is None else requested.json_schema
    has_channels = chat_format is not None and chat_format.channels is not None
    if chat_format is not None and (wants_tools or (has_channels and content is not None)):
        marks = preprocessor.input_processor.marks(chat_format.markers)
        calling = Calling(tools, must=False, content=content, special_tokens=marks)
        auto = preprocessor.config.constrain_tool_calls and (requested is None or content is not None)
        calls = structured_output_of_calls(body, chat_format, calling, constrains_auto=auto)
        if calls is not None and requested is not None and content is None:
            message = f"{requested.field} cannot be combined with strict or required tools"
            raise HttpError(400, message, param=requested.field)
        structured = requested if calls is None else calls._replace(otherwise=requested)
    ending, is_structured = rendered.ending(params), structured is not None
    shared = preprocessor.tokenized_params(ending, 1, body, is_structured=is_structured)
    prompt = preprocessor.tokenized_prompt(rendered.text, rendered.token_ids, shared, body)
    slim = protocol.without_large_parts(body)
    is_constrained = structured is not requested
    return Prepared(slim, [prompt], structured, chat_format, tools, body.echoed, in_reasoning, is_constrained)


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
    chat_format = preprocessor.chat_format(body.chat_template, tools)
    if chat_format is not None and chat_format.calls is not None and chat_format.tools_in_system:
        return render(messages_with_system_tools(messages, tools, chat_format.calls))
    if chat_format is not None and (chat_format.calls is not None or chat_format.channels is not None):
        return render(messages, tools=tools)
    choice = getattr(body, "tool_choice", None)
    try:
        return render(messages_with_tools(messages, tools, choice))
    except ArgumentError:  # some templates take no system message
        return render(messages_with_tools(messages, tools, choice, to_user=True))


def _functions(body: ChatCompletion) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the functions that may be called, with the schemas of their parameters."""
    for index, tool in enumerate(body.tools or []):
        if (name := function_name(tool)) is None:
            raise HttpError(400, f"tools[{index}] must be a function with a name", param=f"tools[{index}]")
        yield name, tool["function"].get("parameters") or {}
