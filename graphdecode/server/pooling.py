"""Embeddings, scores and rankings: their bodies to prompts that are pooled, and what was pooled to responses."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
from pydantic import AliasChoices, Field

from graphdecode.engine import SamplingParams
from graphdecode.errors import NotSupportedError
from graphdecode.server import protocol
from graphdecode.server.admission import Admission
from graphdecode.server.choices import in_pieces
from graphdecode.server.http import HttpError, as_json
from graphdecode.server.preprocessing import Preprocessor
from graphdecode.server.protocol import Body, Listed, Salt
from graphdecode.server.reply import Reply
from graphdecode.server.service import Service
from graphdecode.text.input_processor import ParentRequest, TokenizedParams, TokenizedPrompt
from graphdecode.text.pooling import Pair, PoolingParams, as_pairs

_ENCODINGS = Literal["float", "base64"]


class PoolingBody(Body):
    """Fields that all of them share."""

    stream: ClassVar[None] = None
    request_id: str | None = Field(None, min_length=1, max_length=protocol.MAX_ID_LENGTH)
    priority: int | None = None
    cache_salt: Salt | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    user: str | None = None


class Embeddings(PoolingBody):
    """`POST /v1/embeddings`."""

    input: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    dimensions: int | None = None
    encoding_format: _ENCODINGS | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None


class Score(PoolingBody):
    """`POST /v1/score`; vLLM has several names of the two sides."""

    text_1: str | Listed[str] = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: str | Listed[str] = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))
    instruction: str | None = None


class RerankDocument(Body):
    """A document as an object."""

    text: str


class Rerank(PoolingBody):
    """`POST /v1/rerank`, as Jina's and Cohere's."""

    query: str
    documents: Listed[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class PreparedPooling(NamedTuple):
    """A request that was validated and tokenized."""

    body: PoolingBody
    prompts: list[TokenizedPrompt]
    groups: list[list[int]]  # the prompts of each result: one, or those of both sides of a pair
    params: PoolingParams
    structured: None = None


def _parameters(preprocessor: Preprocessor, body: PoolingBody, *, scores: bool) -> TokenizedParams:
    processor = preprocessor.input_processor
    try:
        if not scores:
            preprocessor.pooler.check_embeds()
    except NotSupportedError as error:
        raise HttpError(400, str(error), code="not_supported") from error
    shared = processor.tokenized_params(SamplingParams(truncate_prompt_tokens=body.truncate_prompt_tokens))
    return shared._replace(
        priority=body.priority or 0,
        adapter=preprocessor.adapter_of(body.model),
        cache_salt=body.cache_salt,
        truncation_side=body.truncation_side or "right",
        pools=True,
        scores=scores,
    )


def _prompts(
    preprocessor: Preprocessor, texts: Sequence[str | list[int]], shared: TokenizedParams, *, special: bool
) -> list[TokenizedPrompt]:
    processor = preprocessor.input_processor
    return [processor.tokenized_prompt(text, processor.encode(text, special=special), shared) for text in texts]


def prepared_embeddings(preprocessor: Preprocessor, body: Embeddings) -> PreparedPooling:
    """Validate and tokenize the texts to embed; see `Endpoint.prepare`."""
    params = PoolingParams(body.dimensions, body.use_activation)
    shared = _parameters(preprocessor, body, scores=False)
    preprocessor.engine.rules.check_pools(body.dimensions)
    is_one = isinstance(body.input, str) or (bool(body.input) and isinstance(body.input[0], int))
    texts = cast(list[str | list[int]], [body.input] if is_one else body.input)
    preprocessor.check_counts(len(texts), 1, "input")
    texts = [preprocessor.pooler.prompted(text, body.prompt_name) for text in texts]
    prompts = _prompts(preprocessor, texts, shared, special=body.add_special_tokens is not False)
    slim = body.model_copy(update={"input": ""})
    return PreparedPooling(slim, prompts, [[index] for index in range(len(prompts))], params)


def _prepared_pairs(
    preprocessor: Preprocessor, body: Score | Rerank, pairs: list[Pair], name: str
) -> tuple[list[TokenizedPrompt], list[list[int]]]:
    pooler = preprocessor.pooler
    preprocessor.check_counts(len(pairs), 1, name)
    if pooler.scores_pairs and body.truncate_prompt_tokens is not None:
        raise HttpError(400, "truncate_prompt_tokens must be null: it would cut off what follows a document")
    shared = _parameters(preprocessor, body, scores=pooler.scores_pairs)
    preprocessor.engine.rules.check_pools(scores=pooler.scores_pairs)
    if pooler.scores_pairs:
        sides = [[pooler.joined(preprocessor.tokenizer, pair, body.instruction)] for pair in pairs]
    else:
        sides = [list(pooler.sides(pair)) for pair in pairs]
    number = {text: index for index, text in enumerate(dict.fromkeys(text for texts in sides for text in texts))}
    prompts = _prompts(preprocessor, list(number), shared, special=not pooler.scores_pairs)
    return prompts, [[number[text] for text in texts] for texts in sides]


def prepared_score(preprocessor: Preprocessor, body: Score) -> PreparedPooling:
    """Validate and tokenize the pairs to score; see `Endpoint.prepare`."""
    pairs = as_pairs(body.text_1, body.text_2, ("text_1", "text_2"))
    prompts, groups = _prepared_pairs(preprocessor, body, pairs, "text_2")
    slim = body.model_copy(update={"text_1": "", "text_2": ""})
    return PreparedPooling(slim, prompts, groups, PoolingParams(use_activation=body.use_activation))


def prepared_rerank(preprocessor: Preprocessor, body: Rerank) -> PreparedPooling:
    """Validate and tokenize a query and the documents to rank; see `Endpoint.prepare`."""
    if body.top_n is not None and body.top_n < 0:
        raise HttpError(400, f"top_n must be an integer >= 0, got {body.top_n}", param="top_n")
    prompts, groups = _prepared_pairs(
        preprocessor, body, as_pairs(body.query, body.texts, ("query", "documents")), "documents"
    )
    return PreparedPooling(body, prompts, groups, PoolingParams(use_activation=body.use_activation))


class PoolingReply(Reply):
    """A response that is made when all prompts are pooled."""

    def __init__(
        self, service: Service, prepared: PreparedPooling, parents: list[ParentRequest], admission: Admission
    ) -> None:
        super().__init__(service, cast(Any, prepared), parents, admission)
        self._params = prepared.params
        self._groups = [[parents[index] for index in group] for group in prepared.groups]
        self._pooler = service.preprocessor.pooler

    async def new_events(self) -> bytes:
        """Return nothing: there are no streams of embeddings."""
        return b""

    async def last_events(self) -> bytes:
        """See `new_events`."""
        return b""

    def failure_events(self, error: HttpError) -> bytes:
        """See `new_events`."""
        return b""

    @property
    def _usage(self) -> dict[str, Any]:
        count = sum(len(parent.output.prompt_token_ids) for parent in self.parents)
        return {"prompt_tokens": count, "total_tokens": count}

    async def _listed(self, data: list[dict[str, Any]]) -> bytes:
        """Return the body with one entry after another: other tasks run in between."""
        head = {"id": self.response_id, "object": "list", "created": self.created, "model": self._model}
        entries = b",".join([await in_pieces(each) for each in data])
        return b"".join([as_json(head)[:-1], b',"data":[', entries, b"],", as_json({"usage": self._usage})[1:]])

    @property
    def _model(self) -> str:
        return self.body_fields.model or self.service.model_name

    @property
    def _scores(self) -> list[float]:
        return [self._pooler.scoring_output(group, self._params).outputs.score for group in self._groups]


class EmbeddingsReply(PoolingReply):
    """The response with embeddings."""

    prefix = "embd-"

    async def whole_body(self) -> bytes:
        """See `Reply.whole_body`."""
        is_encoded = cast(Any, self.body_fields).encoding_format == "base64"
        data = []
        for index, (parent,) in enumerate(self._groups):
            vector = self._pooler.output(parent, self._params).outputs.embedding
            encoded = base64.b64encode(np.array(vector, dtype="<f4").tobytes()).decode() if is_encoded else vector
            data.append({"index": index, "object": "embedding", "embedding": encoded})
        return await self._listed(data)


class ScoreReply(PoolingReply):
    """The response with scores."""

    prefix = "score-"

    async def whole_body(self) -> bytes:
        """See `Reply.whole_body`."""
        scores = enumerate(self._scores)
        return await self._listed([{"index": index, "object": "score", "score": score} for index, score in scores])


class RerankReply(PoolingReply):
    """The response with documents, the most relevant first."""

    prefix = "rerank-"

    async def whole_body(self) -> bytes:
        """See `Reply.whole_body`."""
        body = cast(Rerank, self.body_fields)
        ranked = sorted(enumerate(self._scores), key=lambda each: -each[1])
        results = []
        for index, score in ranked[: body.top_n or None]:
            document = {} if body.return_documents is False else {"document": {"text": body.texts[index]}}
            results.append({"index": index, **document, "relevance_score": score})
        content = {"id": self.response_id, "model": self._model, "usage": self._usage, "results": results}
        return await in_pieces(content)
