"""Endpoints that generate: bodies, over HTTP or from a batch, to requests and responses."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from graphdecode.errors import ArgumentError, GraphdecodeError
from graphdecode.server import protocol
from graphdecode.server.admission import Admission
from graphdecode.server.http import LARGE_BYTES, HttpError, as_http_error
from graphdecode.server.jobs import JobError, JobLimits
from graphdecode.server.logprobs import chat_logprobs, completion_logprobs, offsets_in_prompt
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.protocol import ChatCompletion, Completion, GeneratingPath, Tokenize
from graphdecode.server.reply import Cursor, Delta, Prepared, Reply
from graphdecode.server.request_fields import check_fields
from graphdecode.server.service import Service
from graphdecode.server.structured_outputs import StructuredOutput, structured_output_of, structured_output_of_calls
from graphdecode.server.tool_calls import (
    BARE_JSON,
    ToolCallReader,
    ToolFormat,
    format_of,
    function_name,
    messages_with_tools,
)
from graphdecode.text.arguments import as_prompt
from graphdecode.text.chat import RenderedChat, render_chat
from graphdecode.text.input_processor import ParentRequest
from graphdecode.text.outputs import Logprob
from graphdecode.text.token_texts import text_of_tokens

_MAX_INLINE_PARTS = 64  # bodies with more are prepared in a child process; these take some milliseconds
_LIMITS = JobLimits(cpu_seconds=20, wall_seconds=60.0, memory_bytes=1 << 30)
_DEFAULT_MAX_TOKENS = 16  # OpenAI's; null is as many as fit, as vLLM's


@dataclass(frozen=True)
class BodyReader:
    """Parses and prepares a body, in a child process if that takes long."""

    body_type: type[protocol.Body]
    prepare: Callable[[Preprocessor, Any], Any]  # raises HttpError or ArgumentError

    async def read(self, service: Service, data: bytes, caller: str) -> Any:
        """Return a prepared body, or raise `HttpError`."""
        prepared = None
        if len(data) <= LARGE_BYTES:
            prepare = partial(self.prepared, service.preprocessor, data, in_child=False)
            prepared = await service.thread.run(prepare, caller=caller, size=len(data))
        if prepared is None:
            try:
                prepare = partial(self.prepared, in_child=True)
                prepared = await service.work.run(prepare, data, limits=_LIMITS, caller=caller, size=len(data))
            except JobError as error:
                raise HttpError(400, f"reading the body {error}") from error
        result, unknown, model = prepared
        service.preprocessor.check_model(model)
        service.note_unknown(unknown)
        return result

    def prepared(
        self, preprocessor: Preprocessor, data: bytes, *, in_child: bool
    ) -> tuple[Any, tuple[str, ...], str | None] | None:
        """Parse and prepare a body; return it with the names of its unknown fields and its model's name, unchecked.

        None, but not in a child process, for a slow body or one with a template. Raises `HttpError` if it cannot be
        used.
        """
        try:
            body = self.body_type.model_validate_json(data)
        except ValidationError as error:
            message, location, code = protocol.problem_of(error)
            raise HttpError(400, message, param=str(location[0]) if location else None, code=code) from None
        unknown = check_fields(body)
        if not in_child and (body.parts > _MAX_INLINE_PARTS or getattr(body, "chat_template", None) is not None):
            return None
        with self.as_http_errors():
            return self.prepare(preprocessor, body), protocol.for_log(unknown), body.model

    @contextlib.contextmanager
    def as_http_errors(self) -> Iterator[None]:
        """Raise errors as `HttpError`s that name a field of the body."""
        try:
            yield
        except HttpError:
            raise
        except GraphdecodeError as error:
            raise as_http_error(error, frozenset(self.body_type.model_fields)) from error


@dataclass(frozen=True)
class Endpoint(BodyReader):
    """An endpoint that answers at once."""

    answer: Callable[[Service, Any], Awaitable[Any]]  # takes a prepared body

    async def respond(self, service: Service, data: bytes, caller: str) -> Any:
        """Return the response to a body, or raise `HttpError`."""
        body = await self.read(service, data, caller)
        with self.as_http_errors():
            return await self.answer(service, body)


@dataclass(frozen=True)
class GeneratingEndpoint(BodyReader):
    """An endpoint whose requests are admitted: the response generates when it is sent."""

    reply: type[Reply]

    async def respond(self, service: Service, data: bytes, caller: str) -> Reply:
        """Admit a request, and return its response, or raise `HttpError`."""
        admission = service.admit()
        try:
            body: Prepared = await self.read(service, data, caller)
            admission.reserve(sum(prompt.params.sampling.n for prompt in body.prompts))
            with self.as_http_errors():
                parents = await service.parent_requests(caller, body.prompts, body.structured)
            return self.reply(service, body, parents, admission)
        except BaseException:
            admission.release()
            raise


class CompletionReply(Reply):
    """The response to a request for completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body_fields: Completion

    def choice(self, cursor: Cursor, delta: Delta, *, whole: bool = False) -> dict[str, Any] | None:
        """See `Reply.choice`."""
        body, prompt = self.body_fields, cursor.parent.output
        text, tokens = delta.text, delta.token_ids
        scored: list[dict[int, Logprob] | None] = [*(delta.logprobs or ())]
        offsets: list[int] = []
        if body.echo and delta.is_first:
            echoed, is_text = prompt.prompt, prompt.prompt is not None
            if echoed is None:
                echoed = text_of_tokens(self._texts, prompt.prompt_token_ids)
            offsets = offsets_in_prompt(self._texts, echoed, prompt.prompt_token_ids, is_text=is_text)
            text, tokens = echoed + text, prompt.prompt_token_ids + tokens
            scored, cursor.offset = [*(prompt.prompt_logprobs or ()), *scored], len(echoed)
        logprobs = None
        if body.logprobs is not None and len(scored) == len(tokens):
            offsets += self._offsets(cursor, delta)
            as_ids = bool(body.return_tokens_as_token_ids)
            logprobs = completion_logprobs(self._texts, tokens, scored, offsets, as_ids=as_ids)
        if not (whole or text or logprobs or delta.finish_reason or body.return_token_ids):
            return None
        choice = {"index": cursor.index, "text": text, "logprobs": logprobs}
        if whole:
            choice["prompt_logprobs"] = None if body.prompt_logprobs is None else prompt.prompt_logprobs
        if whole or body.return_token_ids:
            choice["token_ids"] = delta.token_ids if body.return_token_ids else None
        if whole or (body.return_token_ids and delta.is_first):
            choice["prompt_token_ids"] = prompt.prompt_token_ids if body.return_token_ids else None
        return choice | {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}

    def _offsets(self, cursor: Cursor, delta: Delta) -> list[int]:
        """Return where the text of each new token begins, however much of it is held back."""
        skipped = () if self.body_fields.skip_special_tokens is False else self._texts.special
        offsets = []
        for token, entries in zip(delta.token_ids, delta.logprobs or (), strict=True):
            offsets.append(cursor.offset)
            cursor.offset += 0 if token in skipped else len(entries[token].decoded_token or "")
        return offsets


def prepared_completion(preprocessor: Preprocessor, body: Completion) -> Prepared:
    """Validate and tokenize a request; see `Endpoint.prepare`."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise HttpError(400, "best_of is not supported: request n outputs and choose", param="best_of")
    max_tokens = body.max_tokens if "max_tokens" in body.model_fields_set else _DEFAULT_MAX_TOKENS
    scored = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    params = protocol.sampling_params(
        body, preprocessor.sampling_defaults, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=scored
    )
    structured, special, prompts = structured_output_of(body), body.add_special_tokens is not False, _prompts(body)
    shared = preprocessor.tokenized_params(params, len(prompts), body, is_structured=structured is not None)
    processor, tokenized = preprocessor.input_processor, []
    for prompt in map(as_prompt, prompts):
        ids = processor.encode(prompt, special=special)
        tokenized.append(preprocessor.tokenized_prompt(prompt, ids, shared, body))
    return Prepared(protocol.without_large_parts(body), tokenized, structured)


def _prompts(body: Completion) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]


class ChatReply(Reply):
    """The response to a request for a chat completion."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body_fields: ChatCompletion

    def __init__(
        self, service: Service, prepared: Prepared, parents: list[ParentRequest], admission: Admission
    ) -> None:
        super().__init__(service, prepared, parents, admission)
        tools, names, self._echoed = prepared.tools, prepared.names, prepared.echoed
        self._readers = [None if tools is None else ToolCallReader(tools, names) for _ in self.cursors]
        self._call_counts = [0] * len(self.cursors)

    def choice(self, cursor: Cursor, delta: Delta, *, whole: bool = False) -> dict[str, Any] | None:
        """See `Reply.choice`."""
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
        """See `Reply.about_prompt`."""
        body, prompt = self.body_fields, self.parents[0].output
        tokens = {"prompt_token_ids": prompt.prompt_token_ids if body.return_token_ids else None}
        if not whole:
            return tokens if body.return_token_ids else {}
        return {"prompt_logprobs": None if body.prompt_logprobs is None else prompt.prompt_logprobs} | tokens

    def _message(self, cursor: Cursor, text: str, finish_reason: str | None) -> tuple[dict[str, Any], str | None]:
        reader = self._readers[cursor.index]
        if reader is None:
            return ({"content": text} if text else {}), finish_reason
        content, calls = reader.feed(text, final=finish_reason is not None)
        message: dict[str, Any] = {"content": content} if content else {}
        if calls:
            first = self._call_counts[cursor.index]
            message["tool_calls"] = [call.as_choice(index) for index, call in enumerate(calls, first)]
            self._call_counts[cursor.index] += len(calls)
        # as OpenAI's: a call that `tool_choice` named ends with "stop"
        is_named = isinstance(self.body_fields.tool_choice, dict)
        called = finish_reason == "stop" and self._call_counts[cursor.index] and not is_named
        return message, "tool_calls" if called else finish_reason


def prepared_chat(preprocessor: Preprocessor, body: ChatCompletion) -> Prepared:
    """Validate, render and tokenize a request; see `Endpoint.prepare`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    wants_tools = bool(body.tools) and body.tool_choice != "none"
    names = frozenset(_tool_names(body))
    tools = _tool_format(preprocessor, body, body.tools) if wants_tools else None
    structured = _structured(preprocessor, body, tools)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = protocol.sampling_params(
        body, preprocessor.sampling_defaults, max_tokens=body.most_tokens, logprobs=logprobs
    )
    if tools is not None and tools.is_special:
        params = params.unchecked(skip_special_tokens=False)
    rendered = rendered_chat(preprocessor, body, with_tools=wants_tools)
    ending, is_structured = rendered.ending(params), structured is not None
    shared = preprocessor.tokenized_params(ending, 1, body, is_structured=is_structured)
    prompt = preprocessor.tokenized_prompt(rendered.text, rendered.token_ids, shared, body)
    return Prepared(protocol.without_large_parts(body), [prompt], structured, tools, names, body.echoed)


def _structured(preprocessor: Preprocessor, body: ChatCompletion, tools: ToolFormat | None) -> StructuredOutput | None:
    requested = structured_output_of(body)
    if tools is None:
        if body.tool_choice not in (None, "none", "auto"):
            raise HttpError(400, "tool_choice needs tools to choose from", param="tool_choice")
        return requested
    opening_id = preprocessor.tokenizer.convert_tokens_to_ids(tools.opening) if tools.is_special else None
    calls = structured_output_of_calls(body, tools, opening_id)
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
    if _tool_format(preprocessor, body, tools) is not BARE_JSON:
        return render(messages, tools=tools)
    choice = getattr(body, "tool_choice", None)
    try:
        return render(messages_with_tools(messages, tools, choice))
    except ArgumentError:  # some templates take no system message
        return render(messages_with_tools(messages, tools, choice, to_user=True))


def _tool_format(
    preprocessor: Preprocessor, body: ChatCompletion | Tokenize, tools: Sequence[dict[str, Any]] | None
) -> ToolFormat:
    """Return how the model writes calls: bare JSON if its template has no format."""
    try:
        template = preprocessor.tokenizer.get_chat_template(body.chat_template, tools)
    except ValueError:  # it has none, or several and no default
        template = None
    return format_of(template) or BARE_JSON


def _tool_names(body: ChatCompletion) -> Iterator[str]:
    for index, tool in enumerate(body.tools or []):
        if (name := function_name(tool)) is None:
            raise HttpError(400, f"tools[{index}] must be a function with a name", param="tools")
        yield name


GENERATING: dict[GeneratingPath, GeneratingEndpoint] = {
    "/v1/completions": GeneratingEndpoint(Completion, prepared_completion, CompletionReply),
    "/v1/chat/completions": GeneratingEndpoint(ChatCompletion, prepared_chat, ChatReply),
}
