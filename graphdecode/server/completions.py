"""`POST /v1/completions` and `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from graphdecode.errors import ArgumentError
from graphdecode.server.desk import Desk
from graphdecode.server.http import HttpError
from graphdecode.server.protocol import ChatCompletion, Completion, Tokenize, sampling_params, without_large_parts
from graphdecode.server.reply import Cursor, Delta, Reply
from graphdecode.server.service import Service
from graphdecode.server.structured_outputs import StructuredOutput, structured_output_of, structured_output_of_calls
from graphdecode.server.tool_calls import BARE_JSON, ToolCallReader, ToolFormat, format_of, told_messages
from graphdecode.text.chat import RenderedChat, render_chat
from graphdecode.text.input_processor import Order, Resolved
from graphdecode.text.outputs import Logprob

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionReply(Reply):
    """Answers one request for completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body_fields: Completion

    def choices_of(self, cursor: Cursor, delta: Delta) -> list[dict[str, Any]]:
        """Return what is new as one choice."""
        start = cursor.text_length - len(delta.text)
        choice = self._choice(cursor, delta.text, delta.token_ids, delta.logprobs, start, is_first=delta.is_first)
        if not (choice["text"] or choice["logprobs"] or delta.finish_reason or self.body_fields.return_token_ids):
            return []
        return [choice | {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}]

    def whole_choice(self, cursor: Cursor) -> dict[str, Any]:
        """Return the finished answer."""
        output = cursor.answer.output
        choice = self._choice(cursor, output.text, output.token_ids, output.logprobs, 0, is_first=True)
        return choice | {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}

    def _choice(
        self,
        cursor: Cursor,
        text: str,
        token_ids: list[int],
        entries: list[dict[int, Logprob]] | None,
        offset: int,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        """Return some text and its tokens as a choice; `offset` counts the answer's characters before them."""
        body, prompt = self.body_fields, cursor.order.output
        scored: list[dict[int, Logprob] | None] = [*(entries or ())]
        tokens = token_ids
        if body.echo:
            echoed = prompt.prompt
            if echoed is None:
                echoed = str(self.service.tokenizer.decode(prompt.prompt_token_ids))
            if is_first:
                text = echoed + text
                scored, tokens = [*(prompt.prompt_logprobs or ()), *scored], prompt.prompt_token_ids + token_ids
            else:
                offset += len(echoed)
        wants_logprobs = body.logprobs is not None and len(scored) == len(tokens)
        choice: dict[str, Any] = {
            "index": cursor.index,
            "text": text,
            "logprobs": self._logprobs(scored, tokens, offset) if wants_logprobs else None,
        }
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt.prompt_logprobs
        if body.return_token_ids:
            choice |= {"token_ids": token_ids, "prompt_token_ids": prompt.prompt_token_ids}
        return choice

    def _logprobs(self, entries: list[dict[int, Logprob] | None], token_ids: list[int], offset: int) -> dict[str, Any]:
        """Return log-probabilities as completions have them; a prompt's first token has none."""
        texts: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for scored, token in zip(entries, token_ids, strict=True):
            if scored is None:
                texts.append(str(self.service.tokenizer.decode([token])))
                values.append(None)
                tops.append(None)
                continue
            texts.append(scored[token].decoded_token or "")
            values.append(scored[token].logprob)
            tops.append({entry.decoded_token or "": entry.logprob for entry in scored.values()})
        offsets = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


class PreparedCompletion(NamedTuple):
    """A prepared request for completions."""

    body: Completion  # without its large parts
    prompts: list[Resolved]  # in tokens
    structured: StructuredOutput | None  # of the answers; None: they may have any


def prepared_completion(desk: Desk, body: Completion) -> PreparedCompletion:
    """Validate a request, and prepare it for the engine.

    Raises:
        HttpError: it cannot be served.
        ArgumentError: a value outside its range.
    """
    if body.suffix:
        raise HttpError(400, "suffix is not supported: text is generated behind a prompt only", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise HttpError(400, "best_of is not supported: ask for n answers and choose", param="best_of")
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    scored = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    params = sampling_params(
        body, desk.sampling_defaults, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=scored
    )
    structured, special, prompts = structured_output_of(body), body.add_special_tokens is not False, _prompts(body)
    asked = desk.asked(params, len(prompts), priority=body.priority or 0, is_structured=structured is not None)
    resolved = [desk.resolved(prompt, asked, special=special) for prompt in prompts]
    return PreparedCompletion(without_large_parts(body), resolved, structured)


async def complete(service: Service, prepared: PreparedCompletion, caller: str) -> CompletionReply:
    """Return the response to a request.

    Raises:
        HttpError: it cannot be served.
    """
    orders = await service.orders(caller, prepared.prompts, prepared.structured)
    return CompletionReply(service, prepared.body, orders)


def _prompts(body: Completion) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]


class ChatReply(Reply):
    """Answers one request for a chat completion."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body_fields: ChatCompletion

    def __init__(self, service: Service, prepared: PreparedChat, order: Order) -> None:
        super().__init__(service, prepared.body, [order])
        tools, names = prepared.tools, prepared.names
        self._readers = [None if tools is None else ToolCallReader(tools, names) for _ in self.cursors]
        self._call_counts = [0] * len(self.cursors)

    def choices_of(self, cursor: Cursor, delta: Delta) -> list[dict[str, Any]]:
        """Return the new content, tool calls and finish reason."""
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
    """A prepared request for a chat completion."""

    body: ChatCompletion  # without its large parts
    prompt: Resolved  # in tokens
    structured: StructuredOutput | None  # of the answers; None: they may have any
    tools: ToolFormat | None  # how the model writes calls; None: they are not looked for
    names: frozenset[str]  # of the functions that may be called


def prepared_chat(desk: Desk, body: ChatCompletion) -> PreparedChat:
    """Validate a request, and prepare it for the engine.

    Raises:
        HttpError: it cannot be served.
        ArgumentError: a value outside its range, or messages that the template refuses.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    wants_tools = bool(body.tools) and body.tool_choice != "none"
    names = frozenset(tool_names(body))
    tools = _tool_format(desk, body, body.tools) if wants_tools else None
    structured = _structured(desk, body, tools)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, desk.sampling_defaults, max_tokens=limit, logprobs=logprobs)
    if tools is not None and tools.is_special:
        params = params.unchecked(skip_special_tokens=False)
    rendered = rendered_chat(desk, body, with_tools=wants_tools)
    asked = desk.asked(rendered.ending(params), 1, priority=body.priority or 0, is_structured=structured is not None)
    prompt = desk.checked(rendered.text, rendered.token_ids, asked)
    return PreparedChat(without_large_parts(body), prompt, structured, tools, names)


async def chat(service: Service, prepared: PreparedChat, caller: str) -> ChatReply:
    """Return the response to a request.

    Raises:
        HttpError: it cannot be served.
    """
    (order,) = await service.orders(caller, [prepared.prompt], prepared.structured)
    return ChatReply(service, prepared, order)


def _structured(desk: Desk, body: ChatCompletion, tools: ToolFormat | None) -> StructuredOutput | None:
    """Return the structured output that is asked for.

    Raises:
        HttpError: there are two.
    """
    asked = structured_output_of(body)
    if tools is None:
        if body.tool_choice not in (None, "none", "auto"):
            raise HttpError(400, "tool_choice needs tools to choose from", param="tool_choice")
        return asked
    opening_id = desk.tokenizer.convert_tokens_to_ids(tools.opening) if tools.is_special else None
    calls = structured_output_of_calls(body, tools, opening_id)
    if calls is not None and asked is not None:
        raise HttpError(400, f"{asked.field} and calls of tools that have a form: ask for one", param=asked.field)
    return asked or calls


def rendered_chat(desk: Desk, body: ChatCompletion | Tokenize, *, with_tools: bool = True) -> RenderedChat:
    """Render and tokenize a conversation.

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
    if body.messages and body.chat_template is None and not desk.tokenizer.chat_template:
        raise ArgumentError(
            "this model has no chat template: ask /v1/completions, which takes prompts as they are, or start with "
            "--chat-template FILE"
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
