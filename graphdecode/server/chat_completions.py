"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from graphdecode.errors import ArgumentError
from graphdecode.server.cursor import Cursor, Delta
from graphdecode.server.desk import Desk
from graphdecode.server.http_errors import HttpError
from graphdecode.server.protocol import ChatCompletion, Tokenize, without_large_parts
from graphdecode.server.reply import Reply
from graphdecode.server.sampling import sampling_params
from graphdecode.server.service import Service, answers_of
from graphdecode.server.structured import Form, form_of, form_of_calls
from graphdecode.server.told_tools import BARE_JSON, told_messages
from graphdecode.server.tool_calls import ToolCallReader, ToolFormat, format_of
from graphdecode.text.chat import RenderedChat, render_chat
from graphdecode.text.intake import Order, Resolved
from graphdecode.text.outputs import Logprob


class ChatReply(Reply):
    """Answers one request for a turn of a conversation.

    Args:
        service: what generates.
        prepared: of the request.
        order: the conversation's.
    """

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body_fields: ChatCompletion

    def __init__(self, service: Service, prepared: PreparedChat, order: Order) -> None:
        super().__init__(service, prepared.body, [order])
        tools, names = prepared.tools, prepared.names
        self._readers = [None if tools is None else ToolCallReader(tools, names) for _ in self.cursors]
        self._call_counts = [0] * len(self.cursors)

    def choices_of(self, cursor: Cursor, delta: Delta) -> list[dict[str, Any]]:
        """Return what is new: content, calls of tools, and how it ended."""
        message, reason = self._message(cursor, delta.text, delta.finish_reason)
        logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs, delta.token_ids)
        if not (message or logprobs or reason or delta.is_first or self.body_fields.return_token_ids):
            return []
        if delta.is_first:
            message = {"role": "assistant", "content": "", **message}
        choice = {"index": cursor.index, "delta": message, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.body_fields.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return [choice]

    def whole_choice(self, cursor: Cursor) -> dict[str, Any]:
        """Return the finished answer."""
        output = cursor.answer.output
        message, reason = self._message(cursor, output.text, output.finish_reason)
        for call in message.get("tool_calls", ()):
            del call["index"]
        content = message.get("content", None if "tool_calls" in message else "")
        logprobs = None if output.logprobs is None else chat_logprobs(output.logprobs, output.token_ids)
        choice = {
            "index": cursor.index,
            "message": {"role": "assistant", "refusal": None, **message, "content": content},
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }
        prompt = cursor.order.output
        if self.body_fields.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt.prompt_logprobs
        if self.body_fields.return_token_ids:
            choice |= {"token_ids": output.token_ids, "prompt_token_ids": prompt.prompt_token_ids}
        return choice

    def _message(self, cursor: Cursor, text: str, finish_reason: str | None) -> tuple[dict[str, Any], str | None]:
        """Return content and calls in some text, and the reason to finish with them."""
        reader = self._readers[cursor.index]
        if reader is None:
            return ({"content": text} if text else {}), finish_reason
        content, calls = reader.feed(text, final=finish_reason is not None)
        message: dict[str, Any] = {"content": content} if content else {}
        if calls:
            first = self._call_counts[cursor.index]
            message["tool_calls"] = [call.as_choice(index) for index, call in enumerate(calls, first)]
            self._call_counts[cursor.index] += len(calls)
        # OpenAI ends the call of a function that was named with "stop"
        is_named = isinstance(self.body_fields.tool_choice, dict)
        called = finish_reason == "stop" and self._call_counts[cursor.index] and not is_named
        return message, "tool_calls" if called else finish_reason


def chat_logprobs(logprobs: list[dict[int, Logprob]], token_ids: list[int]) -> dict[str, Any]:
    """Return log-probabilities as chat completions have them."""
    content = []
    for entries, token in zip(logprobs, token_ids, strict=True):
        top = [_token(entry) for entry in entries.values()]
        content.append(_token(entries[token]) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {"token": text, "logprob": entry.logprob, "bytes": list(text.encode())}


class PreparedChat(NamedTuple):
    """What a request for a turn of a conversation comes to.

    Attributes:
        body: without its large parts.
        prompt: in tokens.
        form: of the answers; None: they may have any.
        tools: how the model writes calls; None: they are not looked for.
        names: of the functions that may be called.
    """

    body: ChatCompletion
    prompt: Resolved
    form: Form | None
    tools: ToolFormat | None
    names: frozenset[str]


def prepared_chat(desk: Desk, body: ChatCompletion) -> PreparedChat:
    """Return what a request comes to.

    Raises:
        HttpError: it cannot be served.
        ArgumentError: a value outside its range, or messages that the template refuses.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    wants_tools = bool(body.tools) and body.tool_choice != "none"
    names = frozenset(tool_names(body))
    tools = _tool_format(desk, body, body.tools) if wants_tools else None
    form = _form(desk, body, tools)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, desk.sampling_defaults, max_tokens=limit, logprobs=logprobs)
    if tools is not None and tools.is_special:
        params = replace(params, skip_special_tokens=False)
    rendered = rendered_chat(desk, body, with_tools=wants_tools)
    asked = desk.asked(rendered.ending(params), 1, priority=body.priority or 0, has_form=form is not None)
    prompt = desk.intake.resolved(rendered.text, rendered.token_ids, asked)
    return PreparedChat(without_large_parts(body), prompt, form, tools, names)


async def chat(service: Service, prepared: PreparedChat, caller: str) -> ChatReply:
    """Return the response to a request.

    Raises:
        HttpError: it cannot be served.
    """
    service.check_room(answers_of([prepared.prompt]))
    grammar = await service.grammar(prepared.form, caller)
    (order,) = await service.orders(caller, [prepared.prompt], grammar)
    return ChatReply(service, prepared, order)


def _form(desk: Desk, body: ChatCompletion, tools: ToolFormat | None) -> Form | None:
    """Return the form that the answer is asked to have.

    Raises:
        HttpError: there are two.
    """
    asked = form_of(body)
    if tools is None:
        if body.tool_choice not in (None, "none", "auto"):
            raise HttpError(400, "tool_choice needs tools to choose from", param="tool_choice")
        return asked
    opening_id = desk.tokenizer.convert_tokens_to_ids(tools.opening) if tools.is_special else None
    calls = form_of_calls(body, tools, opening_id)
    if calls is not None and asked is not None:
        raise HttpError(400, f"{asked.field} and calls of tools that have a form: ask for one", param=asked.field)
    return asked or calls


def rendered_chat(desk: Desk, body: ChatCompletion | Tokenize, *, with_tools: bool = True) -> RenderedChat:
    """Return the prompt that a conversation makes.

    Raises:
        HttpError: the request brings a template of its own, and may not.
        ArgumentError: the messages are malformed, there is no template, or it refuses them.
    """
    if body.chat_template is not None and not desk.limits.trust_request_chat_template:
        raise HttpError(
            400,
            "chat_template is refused: it is a program, and [server] trust_request_chat_template is false",
            param="chat_template",
        )
    continues = bool(body.continue_final_message)
    begins = (not continues) if body.add_generation_prompt is None else body.add_generation_prompt
    messages, tools = body.messages or [], (body.tools or None) if with_tools else None

    def rendered(messages: Sequence[Any], tools: Sequence[dict[str, Any]] | None) -> RenderedChat:
        return render_chat(
            desk.tokenizer,
            messages,
            chat_template=body.chat_template,
            add_generation_prompt=begins,
            continue_final_message=continues,
            tools=tools,
            chat_template_kwargs=body.chat_template_kwargs,
        )

    if _tool_format(desk, body, tools) is not BARE_JSON:
        return rendered(messages, tools)
    choice = getattr(body, "tool_choice", None)
    try:
        return rendered(told_messages(messages, tools, choice), None)
    except ArgumentError:  # some templates take no message of a system
        return rendered(told_messages(messages, tools, choice, to_user=True), None)


def _tool_format(desk: Desk, body: ChatCompletion | Tokenize, tools: Sequence[dict[str, Any]] | None) -> ToolFormat:
    """Return how the model writes calls; bare JSON where its template does not teach it."""
    try:
        template = desk.tokenizer.get_chat_template(body.chat_template, tools)
    except ValueError:  # there is none, or several by name and none of them the default
        template = None
    return format_of(template) or BARE_JSON


def tool_names(body: ChatCompletion) -> list[str]:
    """Return the names of the functions that a request offers.

    Raises:
        HttpError: one has none.
    """
    names = []
    for place, tool in enumerate(body.tools or []):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise HttpError(400, f"tools[{place}] must be a function with a name", param="tools")
        names.append(name)
    return names
