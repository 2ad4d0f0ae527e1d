"""Endpoints that take bodies: parsing and preparation, in a child process if that takes long, and the response."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from graphdecode.errors import GraphdecodeError
from graphdecode.server import ollama, pooling, protocol
from graphdecode.server.anthropic.reply import MessageReply, prepared_count, prepared_message
from graphdecode.server.anthropic.request import CountTokens, Messages
from graphdecode.server.chat_completions import ChatReply, prepared_chat
from graphdecode.server.completions import CompletionReply, prepared_completion
from graphdecode.server.http import LARGE_BYTES, HttpError, as_http_error
from graphdecode.server.jobs import JobError, JobLimits
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.protocol import ChatCompletion, Completion, GeneratingPath
from graphdecode.server.reply import Prepared, Reply
from graphdecode.server.request_fields import check_fields
from graphdecode.server.responses.reply import KnownItems, NeededItems, ResponseReply, prepared_response
from graphdecode.server.responses.request import Responses
from graphdecode.server.service import Service

_MAX_INLINE_PARTS = 64  # bodies with more are prepared in a child process; these take some milliseconds
_LIMITS = JobLimits(cpu_seconds=20, wall_seconds=60.0, memory_bytes=1 << 30)


@dataclass(frozen=True)
class BodyReader:
    """Parses and prepares a body, in a child process if that takes long."""

    body_type: type[protocol.Body]
    prepare: Callable[[Preprocessor, Any], Any]  # raises HttpError or ArgumentError

    async def read(self, service: Service, data: bytes, caller: str, *, known_bytes: int = 0) -> Any:
        """Return a prepared body, or raise `HttpError`; `known_bytes`: what is read beside it."""
        prepared, size = None, len(data) + known_bytes
        if size <= LARGE_BYTES:
            prepare = partial(self.prepared, service.preprocessor, data, in_child=False)
            prepared = await service.thread.run(prepare, caller=caller, size=size)
        if prepared is None:
            try:
                prepare = partial(self.prepared, in_child=True)
                prepared = await service.work.run(prepare, data, limits=_LIMITS, caller=caller, size=size)
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
            problem = protocol.problem_of(error)
            raise HttpError(400, problem.message, param=problem.param, code=problem.code) from None
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


@dataclass(frozen=True)
class ResponsesEndpoint(GeneratingEndpoint):
    """The endpoint of responses, which may go on from stored ones."""

    async def read(self, service: Service, data: bytes, caller: str, *, known_bytes: int = 0) -> Prepared:
        """See `BodyReader.read`."""
        prepared: Prepared | NeededItems = await super().read(service, data, caller)
        if isinstance(prepared, NeededItems):
            previous_id, store = prepared.previous_id, service.responses
            history = [] if previous_id is None else store.history(caller, previous_id)
            known = KnownItems(history, {each: store.item(caller, each) for each in prepared.item_ids})
            reader = BodyReader(self.body_type, partial(prepared_response, known=known))
            prepared = await reader.read(service, data, caller, known_bytes=known.nbytes)
        assert isinstance(prepared, Prepared)
        return prepared._replace(about=prepared.about._replace(caller=caller))


async def as_prepared(service: Service, prepared: bytes) -> Response:
    """Answer with JSON that the preparation made."""
    return Response(prepared, media_type="application/json")


# whose requests are translated to chat completions
TRANSLATED: dict[str, Endpoint | GeneratingEndpoint] = {
    "/v1/messages": GeneratingEndpoint(Messages, prepared_message, MessageReply),
    "/v1/responses": ResponsesEndpoint(Responses, prepared_response, ResponseReply),
    "/v1/messages/count_tokens": Endpoint(CountTokens, prepared_count, as_prepared),
}
GENERATING: dict[GeneratingPath, GeneratingEndpoint] = {
    "/v1/completions": GeneratingEndpoint(Completion, prepared_completion, CompletionReply),
    "/v1/chat/completions": GeneratingEndpoint(ChatCompletion, prepared_chat, ChatReply),
}
_RERANK = GeneratingEndpoint(pooling.Rerank, pooling.prepared_rerank, pooling.RerankReply)
_SCORE = GeneratingEndpoint(pooling.Score, pooling.prepared_score, pooling.ScoreReply)
OLLAMA = {
    "/api/chat": GeneratingEndpoint(ollama.OllamaChat, ollama.prepared_ollama_chat, ollama.OllamaChatReply),
    "/api/generate": GeneratingEndpoint(ollama.OllamaGenerate, ollama.prepared_generate, ollama.OllamaGenerateReply),
    "/api/embed": GeneratingEndpoint(ollama.OllamaEmbed, ollama.prepared_embed, ollama.OllamaEmbedReply),
}
POOLING = {
    "/v1/embeddings": GeneratingEndpoint(pooling.Embeddings, pooling.prepared_embeddings, pooling.EmbeddingsReply),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), _RERANK),
    **dict.fromkeys(("/v1/score", "/score"), _SCORE),
}
