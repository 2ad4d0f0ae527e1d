"""Endpoints that generate: bodies, over HTTP or from a batch, to responses, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphdecode.errors import ArgumentError, GraphdecodeError
from graphdecode.server import protocol
from graphdecode.server.http import (
    LARGE_BYTES,
    SSE_DONE,
    HttpError,
    as_http_error,
    as_json,
    error_response,
    sse_event,
    unless_disconnected,
)
from graphdecode.server.jobs import JobError, JobLimits
from graphdecode.server.logprobs import chat_logprobs, completion_logprobs, offsets_in_prompt
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.protocol import ChatCompletion, Completion, GeneratingPath, Generation, StreamOptions, Tokenize
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
from graphdecode.text.input_processor import ParentRequest, TokenizedPrompt
from graphdecode.text.outputs import Logprob, RequestState
from graphdecode.text.token_texts import text_of_tokens

_POSITIONS_AT_ONCE = 50  # positions with up to 21 log-probabilities each: some milliseconds
log = logging.getLogger(__name__)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Prepared(NamedTuple):
    """A request that was validated and tokenized."""

    body: Generation  # without its large parts
    prompts: list[TokenizedPrompt]
    structured: StructuredOutput | None
    tools: ToolFormat | None = None  # None: the output is not searched for tool calls
    names: frozenset[str] = frozenset()  # functions that may be called
    echoed: str = ""  # the text before the answer in its message


class Delta(NamedTuple):
    """The new part of an output."""

    text: str
    token_ids: list[int]  # their text may still be held back
    logprobs: list[dict[int, Logprob]] | None  # one per token, if requested
    is_first: bool
    finish_reason: str | None  # set in the last delta
    stop_reason: str | int | None  # the stop text or token, in the last delta


@dataclass
class Cursor:
    """Reads an output as it grows."""

    index: int
    parent: ParentRequest
    state: RequestState
    offset: int = 0  # where the text of the next token begins
    _tokens_read: int = 0
    _began: bool = False
    _ended: bool = False

    def take(self) -> Delta | None:
        """Return what is new; None if nothing is."""
        state, output = self.state, self.state.output
        if self._ended:
            return None
        self._ended = state.finished
        start, end = self._tokens_read, len(output.token_ids)
        text = "".join(state.pieces)
        if not (text or end > start or self._ended):
            return None
        state.pieces.clear()
        is_first, self._began, self._tokens_read = not self._began, True, end
        logprobs = None if output.logprobs is None else output.logprobs[start:end]
        ending = (output.finish_reason, output.stop_reason) if self._ended else (None, None)
        return Delta(text, output.token_ids[start:end], logprobs, is_first, *ending)

    def whole(self) -> Delta:
        """Return all of a finished output."""
        output = self.state.output
        return Delta(output.text, output.token_ids, output.logprobs, True, output.finish_reason, output.stop_reason)


class Reply(Response, ABC):
    """The response to a request, which generates when it is sent."""

    prefix: str  # of the response's id
    kind: str  # `object` of the whole response
    chunk_kind: str  # `object` of a chunk

    def __init__(self, service: Service, prepared: Prepared, parents: list[ParentRequest]) -> None:
        self.service = service
        self.body_fields = body = prepared.body
        self.parents = parents
        pairs = [(parent, state) for parent in parents for state in parent.states]
        texts = service.preprocessor.input_processor.texts
        assert texts is not None
        self._texts = texts
        self.cursors = [Cursor(index, parent, state) for index, (parent, state) in enumerate(pairs)]
        self.background = None
        self._room = contextlib.ExitStack()  # for the outputs, until they are submitted
        self.status_code = 200
        self._head = {
            "id": f"{self.prefix}-{body.request_id or uuid.uuid4().hex}",
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": body.model or service.model_name,
        }

    @abstractmethod
    def choice(self, cursor: Cursor, delta: Delta, *, whole: bool = False) -> dict[str, Any] | None:
        """Return the choice of a chunk or of the whole response; None: the chunk would be empty."""

    def about_prompt(self, *, whole: bool) -> dict[str, Any]:
        """Return the fields beside the choices, of the whole response or of the first chunk of a choice."""
        return {}

    async def _choice(self, cursor: Cursor, delta: Delta, *, whole: bool = False) -> dict[str, Any] | None:
        """Return `choice`, which is made in a thread if it has many log-probabilities, so that other tasks run."""
        of_prompt = cursor.parent.output.prompt_logprobs if delta.is_first else None
        if len(delta.logprobs or ()) + len(of_prompt or ()) <= _POSITIONS_AT_ONCE:
            return self.choice(cursor, delta, whole=whole)
        return await asyncio.to_thread(self.choice, cursor, delta, whole=whole)

    def usage(self) -> dict[str, Any]:
        """Return the counts of tokens so far."""
        prompt = sum(len(parent.output.prompt_token_ids) for parent in self.parents)
        generated = sum(len(cursor.state.output.token_ids) for cursor in self.cursors)
        cached = sum(parent.output.metrics.num_cached_tokens for parent in self.parents)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send, until the client disconnects; raises `HttpError` if there is no room."""
        self._room.enter_context(self.service.reserved(len(self.cursors)))
        if asked := Headers(scope=scope).get("x-request-id"):  # takes precedence, as in vLLM
            self._head["id"] = f"{self.prefix}-{asked[: protocol.MAX_ID_LENGTH]}"
        failed: Exception | None = None
        sending = self._stream(send) if self.body_fields.stream else self._whole(scope, receive, send)
        try:
            await unless_disconnected(receive, sending)
        except Exception as error:
            failed = error
        finally:
            self._room.close()
        if self.service.config.log_requests:
            for cursor in self.cursors:
                prompt, output = cursor.parent.output, cursor.state.output
                requested = prompt.prompt_token_ids if prompt.prompt is None else prompt.prompt
                line = (self._head["id"], cursor.index, requested, output.text, output.finish_reason)
                log.info("%s %d: %r -> %r (%s)", *line)
        if self.service.tracer is not None:
            for parent in self.parents:
                self.service.tracer.trace(str(self._head["id"]), parent, self.body_fields, Headers(scope=scope))
        if failed is not None:
            raise failed

    async def _updates(self) -> AsyncGenerator[None, None]:
        """Submit the prompts, and yield whenever their outputs change."""
        service, began = self.service, False
        with service.metrics.tracked(self.parents) as count_tokens:
            async with (
                contextlib.aclosing(service.front.follow(self.parents)) as updates,
                asyncio.timeout(service.request_timeout),
            ):
                self._room.close()  # the next line submits them
                async for _ in updates:
                    if not began:
                        began = True
                        requests = [request for parent in self.parents for request, _ in parent.children]
                        if not any(request.priority for request in requests):  # priorities override the queue
                            service.queue.began(min(request.start_tag for request in requests))
                    count_tokens()
                    yield

    async def whole(self) -> bytes:
        """Generate, and return the body of the whole response, or raise `HttpError`."""
        try:
            async with contextlib.aclosing(self._updates()) as updates:
                async for _ in updates:
                    pass
        except (GraphdecodeError, TimeoutError) as error:
            raise self._failure(error) from error
        choices = []
        for cursor in self.cursors:
            choice = await self._choice(cursor, cursor.whole(), whole=True)
            assert choice is not None
            choices.append(await in_pieces(choice))
            await asyncio.sleep(0)  # other tasks wait
        head, rest = as_json(self._head), await in_pieces({"usage": self.usage()} | self.about_prompt(whole=True))
        return b"".join([head[:-1], b',"choices":[', b",".join(choices), b"],", rest[1:]])

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response: Response = Response(await self.whole(), media_type="application/json")
        except HttpError as failed:
            response = error_response(failed)
        except asyncio.CancelledError:
            if self.service.draining:
                await error_response(self._cut_off())(scope, receive, send)
            raise
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        options = self.body_fields.stream_options or StreamOptions()
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async with contextlib.aclosing(self._updates()) as updates:
                async for _ in updates:
                    now = {"usage": self.usage() if options.continuous_usage_stats else None}
                    events = []
                    for cursor in self.cursors:
                        if (delta := cursor.take()) is None or (choice := await self._choice(cursor, delta)) is None:
                            continue
                        chunk = self._head | {"choices": [choice]} | (now if options.include_usage else {})
                        if not delta.is_first:
                            events.append(sse_event(chunk))
                            continue
                        chunk |= self.about_prompt(whole=False)
                        events.append(b"data: " + await in_pieces(chunk) + b"\n\n")  # an echo may be long
                    if events:
                        await _send_more(send, b"".join(events))
            end = self._head | {"choices": [], "usage": self.usage()}
            await _send_more(send, (sse_event(end) if options.include_usage else b"") + SSE_DONE)
        except (GraphdecodeError, TimeoutError) as error:
            await _send_more(send, sse_event(self._failure(error).body) + SSE_DONE)
        except asyncio.CancelledError:
            if self.service.draining:
                await _send_more(send, sse_event(self._cut_off().body) + SSE_DONE)
            raise
        await send({"type": "http.response.body", "body": b""})

    def _cut_off(self) -> HttpError:
        log.warning("%s was cut off: drain_timeout_s is over", self._head["id"])
        return HttpError(503, "the server is shutting down, and drain_timeout_s is over", code="shutting_down")

    def _failure(self, error: Exception) -> HttpError:
        if isinstance(error, TimeoutError):
            return HttpError(504, f"the request took longer than {self.service.request_timeout:g} s", code="timeout")
        assert isinstance(error, GraphdecodeError)
        return as_http_error(error, frozenset(type(self.body_fields).model_fields))


async def in_pieces(data: Any) -> bytes:
    """Return JSON, letting other tasks run between pieces of its long lists."""
    if isinstance(data, dict):
        members = [as_json(str(name)) + b":" + await in_pieces(value) for name, value in data.items()]
        return b"{" + b",".join(members) + b"}"
    if not isinstance(data, list):
        return as_json(data)
    if len(data) <= _POSITIONS_AT_ONCE:
        return b"[" + b",".join([await in_pieces(each) for each in data]) + b"]"
    pieces = []
    for first in range(0, len(data), _POSITIONS_AT_ONCE):
        pieces.append(as_json(data[first : first + _POSITIONS_AT_ONCE])[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(pieces) + b"]"


async def _send_more(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


_MAX_PARTS_HERE = 64  # bodies with more are prepared in a child process; these take some milliseconds
_LIMITS = JobLimits(cpu_seconds=20, wall_seconds=60.0, memory_bytes=1 << 30)
_DEFAULT_MAX_TOKENS = 16  # OpenAI's; null is as many as fit, as vLLM's


@dataclass(frozen=True)
class Endpoint:
    """Parses and prepares a body, in a child process if that takes long, and makes the response."""

    body_type: type[protocol.Body]
    prepare: Callable[[Preprocessor, Any], Any]  # raises HttpError or ArgumentError
    answer: Callable[[Service, Any, str], Awaitable[Any]]  # takes a prepared body and its caller

    async def respond(self, service: Service, data: bytes, caller: str) -> Any:
        """Return the response to a body, or raise `HttpError`."""
        if issubclass(self.body_type, protocol.Generation):
            service.check_room(1)
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
        with self._as_http_errors():
            return await self.answer(service, result, caller)

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
        if not in_child and (body.parts > _MAX_PARTS_HERE or getattr(body, "chat_template", None) is not None):
            return None
        with self._as_http_errors():
            return self.prepare(preprocessor, body), protocol.for_log(unknown), body.model

    @contextlib.contextmanager
    def _as_http_errors(self) -> Iterator[None]:
        try:
            yield
        except HttpError:
            raise
        except GraphdecodeError as error:
            raise as_http_error(error, frozenset(self.body_type.model_fields)) from error


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
            echoed, is_given = prompt.prompt, prompt.prompt is not None
            if echoed is None:
                echoed = text_of_tokens(self._texts, prompt.prompt_token_ids)
            offsets = offsets_in_prompt(self._texts, echoed, prompt.prompt_token_ids, is_given=is_given)
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

    def __init__(self, service: Service, prepared: Prepared, parents: list[ParentRequest]) -> None:
        super().__init__(service, prepared, parents)
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


async def _generate(reply: type[Reply], service: Service, prepared: Prepared, caller: str) -> Reply:
    return reply(service, prepared, await service.parent_requests(caller, prepared.prompts, prepared.structured))


GENERATING: dict[GeneratingPath, Endpoint] = {
    "/v1/completions": Endpoint(Completion, prepared_completion, partial(_generate, CompletionReply)),
    "/v1/chat/completions": Endpoint(ChatCompletion, prepared_chat, partial(_generate, ChatReply)),
}
