"""Embeddings and scores: their parameters and outputs, and how both are made of what the engine pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphdecode.config.key import is_integer
from graphdecode.errors import ArgumentError, NotSupportedError, shown
from graphdecode.models.sentence_transformers import SentenceFiles, sentence_files_of
from graphdecode.text.input_processor import ParentRequest

QUERY, DOCUMENT = "query", "document"
_DOCUMENT_PROMPTS = (DOCUMENT, "passage", "corpus")  # names of sentence-transformers, the first counts
# the form that Qwen3-Reranker was trained on (its model card)
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class PoolingParams:
    """Parameters of an embedding, as vLLM's class of this name.

    Attributes:
        dimensions: the first ones that are kept, before the length is made 1; None: all.
        use_activation: for embeddings, whether their length is made 1, for scores, whether a label's logit becomes a
            probability; None: as the checkpoint's files say, else yes.
    """

    dimensions: int | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None and (not is_integer(self.dimensions) or self.dimensions < 1):
            raise ArgumentError(f"dimensions must be an integer >= 1, got {shown(self.dimensions)}")
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise ArgumentError(f"use_activation must be true or false, got {shown(self.use_activation)}")


@dataclass(frozen=True)
class EmbeddingOutput:
    """One embedding."""

    embedding: list[float]  # empty if the request failed

    @property
    def hidden_size(self) -> int:
        """Its dimensions."""
        return len(self.embedding)


@dataclass(frozen=True)
class ScoringOutput:
    """The score of a pair."""

    score: float  # 0 if the request failed


@dataclass(frozen=True)
class _PoolingOutput:
    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    error: str | None = None  # why the request was refused or failed; None otherwise


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequestOutput(_PoolingOutput):
    """A prompt and its embedding, as vLLM's class of this name."""

    outputs: EmbeddingOutput


@dataclass(frozen=True, kw_only=True)
class ScoringRequestOutput(_PoolingOutput):
    """A pair of texts and its score, as vLLM's class of this name; the token ids are those of both."""

    outputs: ScoringOutput


class Pair(NamedTuple):
    """A query, and a document that may answer it."""

    query: str
    document: str


def as_pairs(data_1: Any, data_2: Any, names: tuple[str, str] = ("data_1", "data_2")) -> list[Pair]:
    """Return the pairs of 1 with 1, 1 with n, or n with n texts; raises ArgumentError for anything else."""
    firsts, seconds = ([each] if isinstance(each, str) else each for each in (data_1, data_2))
    for name, texts in zip(names, (firsts, seconds), strict=True):
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(each, str) for each in texts):
            raise ArgumentError(f"{name} must be a text or a list of texts, got {shown(texts)}")
    if len(firsts) not in (1, len(seconds)):
        raise ArgumentError(
            f"{names[0]} must be one text, or as many as {names[1]}, which are {len(seconds)}, got {len(firsts)}"
        )
    return [Pair(*each) for each in zip(list(firsts) * (len(seconds) // len(firsts)), seconds, strict=True)]


@dataclass(frozen=True)
class Pooler:
    """Makes embeddings and scores of a model, as its files say; picklable."""

    files: SentenceFiles

    @classmethod
    def of(cls, path: Path, pooling: str) -> Pooler:
        """Return the pooler of a model, by its files; a `pooling` that is not "auto" overrides them."""
        files = sentence_files_of(path)
        return cls(files if pooling == "auto" else replace(files, pooling=pooling, unsupported=None))

    @property
    def scores_pairs(self) -> bool:
        """Whether the model reads both texts of a pair at once, and its labels' logits are the score."""
        return self.files.label_ids is not None

    def check_embeds(self) -> None:
        """Raise `NotSupportedError` if the checkpoint's embeddings are of a kind that is not supported."""
        if self.files.unsupported is not None:
            raise NotSupportedError(f"embeddings: {self.files.unsupported}; pooling='last' or 'mean' overrides it")

    def prompted(self, text: str | list[int], name: str | None = None) -> str | list[int]:
        """Return a text with the prompt of a name in front, or the default one; token ids stay as they are.

        Raises ArgumentError if the name is unknown.
        """
        prompts = self.files.prompts
        if name is not None and name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            raise ArgumentError(f"prompt_name must be one of the checkpoint's prompts ({known}), got {shown(name)}")
        name = self.files.default_prompt if name is None else name
        return text if name is None or not isinstance(text, str) else prompts[name] + text

    def sides(self, pair: Pair) -> Pair:
        """Return a pair with the prompts of queries and documents in front, where the checkpoint has them."""
        prompts = self.files.prompts
        of_document = next((name for name in _DOCUMENT_PROMPTS if name in prompts), None)
        names = QUERY if QUERY in prompts else None, of_document
        return Pair(*(str(self.prompted(text, name)) for text, name in zip(pair, names, strict=True)))

    def joined(self, tokenizer: Any, pair: Pair, instruction: str | None = None) -> str:
        """Return the text of a pair for a model that `scores_pairs`: by its chat template if that knows both roles.

        `instruction`: what the query asks for; None: the checkpoint's default prompt, or that of its training.
        """
        template = getattr(tokenizer, "chat_template", None)
        default = self.files.prompts.get(self.files.default_prompt or "")
        instruction = instruction or default or _INSTRUCTION
        if isinstance(template, str) and DOCUMENT in template and QUERY in template:
            messages = [{"role": "system", "content": instruction}] + [
                {"role": role, "content": text} for role, text in pair._asdict().items()
            ]
            options = {"tokenize": False, "add_generation_prompt": True, "instruction": instruction}
            return str(tokenizer.apply_chat_template(messages, **options))
        asked = f"<Instruct>: {instruction}\n<Query>: {pair.query}\n<Document>: {pair.document}"
        turns = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n"
        return f"{turns}<|im_start|>assistant\n<think>\n\n</think>\n\n"

    def embedding(self, pooled: np.ndarray, params: PoolingParams) -> np.ndarray:
        """Return the embedding, float32, of a pooled hidden state."""
        vector = pooled[: params.dimensions].astype(np.float64)
        normalize = self.files.normalize if params.use_activation is None else params.use_activation
        length = float(np.linalg.norm(vector)) if normalize else 0.0
        return (vector / length if length else vector).astype(np.float32)

    def output(self, parent: ParentRequest, params: PoolingParams) -> EmbeddingRequestOutput:
        """Return the output of a request that has ended."""
        pooled = pooled_of(parent)
        embedding = [] if pooled is None else self.embedding(pooled, params).tolist()
        return EmbeddingRequestOutput(*_about([parent]), outputs=EmbeddingOutput(embedding))

    def scoring_output(self, parents: Sequence[ParentRequest], params: PoolingParams) -> ScoringRequestOutput:
        """Return the output of a pair: of one request for both texts, or of one for each."""
        pooled = [each for each in map(pooled_of, parents) if each is not None]
        score = 0.0
        if len(pooled) == len(parents):
            score = self.score(pooled[0], params) if len(pooled) == 1 else similarity(*pooled)
        return ScoringRequestOutput(*_about(parents), outputs=ScoringOutput(score))

    def score(self, logits: np.ndarray, params: PoolingParams) -> float:
        """Return the score of a pair, given the logits of relevant, and irrelevant if there is such a label."""
        difference = float(logits[0]) - (float(logits[1]) if len(logits) > 1 else 0.0)
        return difference if params.use_activation is False else 0.5 + 0.5 * math.tanh(difference / 2)  # the sigmoid


def pooled_of(parent: ParentRequest) -> np.ndarray | None:
    """Return what the engine has pooled for a request; None if it was refused or has failed."""
    return parent.states[0].embedding if parent.states else None


def _about(parents: Sequence[ParentRequest]) -> tuple[str, list[int], int, bool, str | None]:
    """Return the fields of an output that both kinds have."""
    outputs = [parent.output for parent in parents]
    tokens = [token for output in outputs for token in output.prompt_token_ids]
    error = next((output.error for output in outputs if output.error is not None), None)
    return str(outputs[0].request_id), tokens, sum(output.num_cached_tokens for output in outputs), True, error


def similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Return the cosine of two embeddings; 0 if one is zero."""
    one, other = first.astype(np.float64), second.astype(np.float64)
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else 0.0
