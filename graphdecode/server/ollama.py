"""Ollama's API, as a translation: `/api/chat`, `/api/generate`, `/api/embed`, and the list of models."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ValidationError

from graphdecode.errors import shown
from graphdecode.server.blocks import BlocksReply, ReplyBlock
from graphdecode.server.chat_completions import prepared_chat
from graphdecode.server.completions import prepared_completion
from graphdecode.server.http import HttpError, as_json
from graphdecode.server.pooling import Embeddings, EmbeddingsReply, PreparedPooling, prepared_embeddings
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.protocol import Body, Completion, Listed, problem_of
from graphdecode.server.reply import Prepared
from graphdecode.server.translation import Turns, string_in, translated

_TAG = ":latest"  # that clients add to a name without a tag
# name of an option -> ours
_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"} | {
    name: name
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
}
_REFUSED = {"suffix": "text is generated after a prompt only", "template": "the model's own is used"}


def _untagged(name: Any) -> Any:
    return name.removesuffix(_TAG) if isinstance(name, str) else name


class OllamaBody(Body):
    """Fields that its requests share; `keep_alive` has no effect: the server's setting holds."""

    model: Annotated[str | None, BeforeValidator(_untagged)] = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | int | None = None


class OllamaGeneration(OllamaBody):
    """Fields of requests that generate."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of OpenAI's requests that say the same; raises `HttpError`."""
        asked = {_OPTIONS[name]: value for name, value in (self.options or {}).items() if name in _OPTIONS}
        if asked.get("max_tokens") in (-1, -2):  # as many as fit
            del asked["max_tokens"]
        fields = {"model": self.model, "stream": self.stream is not False, **asked}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            schema = {"name": "format", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.format:
            raise HttpError(400, f'format must be "json" or a JSON schema, got {shown(self.format)}', param="format")
        return fields

    @property
    def thinking(self) -> dict[str, Any]:
        """What says in a chat whether, and how much, the model thinks."""
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        return {} if self.think is None else {"chat_template_kwargs": {"enable_thinking": self.think}}


class OllamaChat(OllamaGeneration):
    """`POST /api/chat`."""

    messages: Listed[dict[str, Any]]
    tools: Listed[dict[str, Any]] | None = None


class OllamaGenerate(OllamaGeneration):
    """`POST /api/generate`."""

    prompt: str
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: Listed[str] | None = None
    context: Listed[int] | None = None  # of an earlier answer; obsolete, and without effect


class OllamaEmbed(OllamaBody):
    """`POST /api/embed`."""

    stream: ClassVar[None] = None
    input: str | Listed[str]
    dimensions: int | None = None
    truncate: bool | None = None


def _refuse_images(images: Any, where: str) -> None:
    if images:
        raise HttpError(400, f"{where} is not supported: only text models are served", param=where)


def _turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return chat messages; results are those of the calls before them, in their order."""
    turns, pending, count = Turns(), list[str](), 0
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _refuse_images(message.get("images"), f"{where}.images")
        role, content = string_in(message, "role", where), message.get("content") or ""
        if not isinstance(content, str):
            raise HttpError(400, f"{where}.content must be a string, got {shown(content)}", param=f"{where}.content")
        match role:
            case "system":
                turns.system(content)
            case "user":
                turns.user(content)
            case "tool":
                turns.result(pending.pop(0) if pending else "call_0", content)
            case "assistant":
                if thought := message.get("thinking"):
                    turns.reasoning(str(thought))
                turns.content(content)
                for call in message.get("tool_calls") or ():
                    called = call.get("function") if isinstance(call, dict) else None
                    function = called if isinstance(called, dict) else {}
                    name = string_in(function, "name", f"{where}.tool_calls")
                    pending.append(f"call_{count}")
                    count += 1
                    turns.call(pending[-1], name, json.dumps(function.get("arguments") or {}, ensure_ascii=False))
            case _:
                message_text = f"{where}.role must be system, user, assistant or tool, got {shown(role)}"
                raise HttpError(400, message_text, param=f"{where}.role")
    return turns.messages


def prepared_ollama_chat(preprocessor: Preprocessor, body: OllamaChat) -> Prepared:
    """Translate and prepare a chat; see `Endpoint.prepare`."""
    if not body.messages:
        raise HttpError(400, "messages must have at least one message", param="messages")
    tools = {"tools": body.tools} if body.tools else {}
    chat = translated({"messages": _turns(body.messages)} | tools | body.thinking | body.fields)
    return prepared_chat(preprocessor, chat)


def prepared_generate(preprocessor: Preprocessor, body: OllamaGenerate) -> Prepared:
    """Translate and prepare a prompt, by the chat template if there is one; see `Endpoint.prepare`."""
    for name, why in _REFUSED.items():
        if getattr(body, name):
            raise HttpError(400, f"{name} is not supported: {why}", param=name)
    _refuse_images(body.images, "images")
    if body.raw or not preprocessor.tokenizer.chat_template:
        try:
            plain = Completion(prompt=f"{body.system or ''}{body.prompt}", **body.fields)
        except ValidationError as error:
            problem = problem_of(error)
            raise HttpError(400, problem.message, param=problem.param, code=problem.code) from None
        return prepared_completion(preprocessor, plain)
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}]
    return prepared_chat(preprocessor, translated({"messages": messages} | body.thinking | body.fields))


def prepared_embed(preprocessor: Preprocessor, body: OllamaEmbed) -> PreparedPooling:
    """Translate and prepare texts to embed; see `Endpoint.prepare`."""
    cut = None if body.truncate is False else -1
    fields = {"input": body.input, "model": body.model, "dimensions": body.dimensions, "truncate_prompt_tokens": cut}
    return prepared_embeddings(preprocessor, Embeddings.model_validate(fields))


def _line(data: dict[str, Any]) -> bytes:
    return as_json(data) + b"\n"


class OllamaChatReply(BlocksReply):
    """The response to a chat: lines of JSON, or one object."""

    prefix = ""
    stream_type = b"application/x-ndjson"

    async def whole_body(self) -> bytes:
        """See `Reply.whole_body`."""
        thinking = "".join(block.text for block in self.blocks if block.kind == "reasoning")
        calls = {block.index: _call(block) for block in self.blocks if block.kind == "call" and not block.is_cut}
        content = "".join(block.text for block in self.blocks if block.index not in calls and block.kind != "reasoning")
        return as_json(self._head(content, thinking, list(calls.values())) | self._ending())

    async def new_events(self) -> bytes:
        """See `Reply.new_events`."""
        delta = self.cursor.take()
        return b"" if delta is None else b"".join(map(_line, self._changes(delta)))

    async def last_events(self) -> bytes:
        """See `Reply.last_events`."""
        return _line(self._head("") | self._ending())

    def failure_events(self, error: HttpError) -> bytes:
        """See `Reply.failure_events`."""
        return _line(error.ollama_body)

    def begun(self, block: ReplyBlock) -> list[dict[str, Any]]:
        """See `BlocksReply.begun`."""
        return []

    def grown(self, block: ReplyBlock, text: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """See `BlocksReply.grown`."""
        if block.kind == "call":
            return []
        is_text = block.kind == "text"
        return [self._head(text if is_text else "", "" if is_text else text) | {"done": False}]

    def ended(self, block: ReplyBlock) -> list[dict[str, Any]]:
        """See `BlocksReply.ended`."""
        if block.kind != "call":
            return []
        said = self._head(block.text) if block.is_cut else self._head("", calls=[_call(block)])
        return [said | {"done": False}]

    def _head(self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        model = self.body_fields.model or self.service.model_name
        return {"model": model, "created_at": datetime.now(UTC).isoformat()} | self._message(
            text, thinking, calls or []
        )

    def _message(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        others = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        return {"message": {"role": "assistant", "content": text, **others}}

    def _ending(self) -> dict[str, Any]:
        """Return why the output ended, counts, and times in nanoseconds."""
        prompt, output = self.cursor.parent.output, self.cursor.state.output
        metrics, now = prompt.metrics, time.perf_counter()
        first, end = metrics.first_token_time or now, metrics.finished_time or now
        begun = metrics.first_scheduled_time or metrics.arrival_time
        spans = {
            "total_duration": end - metrics.arrival_time,
            "load_duration": 0.0,
            "prompt_eval_duration": first - begun,
            "eval_duration": end - first,
        }
        return {
            "done": True,
            "done_reason": output.finish_reason,
            **{name: int(max(seconds, 0.0) * 1e9) for name, seconds in spans.items()},
            "prompt_eval_count": len(prompt.prompt_token_ids),
            "eval_count": len(output.token_ids),
        }


class OllamaGenerateReply(OllamaChatReply):
    """The response to a prompt."""

    def _message(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": text} | ({"thinking": thinking} if thinking else {})


class OllamaEmbedReply(EmbeddingsReply):
    """The response with embeddings."""

    async def whole_body(self) -> bytes:
        """See `Reply.whole_body`."""
        vectors = [self._pooler.output(parent, self._params).outputs.embedding for (parent,) in self._groups]
        count = sum(len(parent.output.prompt_token_ids) for parent in self.parents)
        return as_json({"model": self._model, "embeddings": vectors, "prompt_eval_count": count})


def _call(block: ReplyBlock) -> dict[str, Any]:
    """Return a call that was not cut: clients take no other, so that its arguments are content."""
    return {"function": {"name": block.name, "arguments": json.loads(block.text)}}


def tag(name: str, path: Path) -> dict[str, Any]:
    """Return a model as `/api/tags` and `/api/ps` list it."""
    is_gguf = path.suffix == ".gguf"
    details = dict.fromkeys(("parent_model", "family", "parameter_size", "quantization_level"), "")
    details |= {"format": "gguf" if is_gguf else "safetensors"}
    modified = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat()
    files = [path] if is_gguf else path.glob("*.safetensors")
    size = sum(file.stat().st_size for file in files)
    return {"name": name, "model": name, "modified_at": modified, "size": size, "digest": "", "details": details}
