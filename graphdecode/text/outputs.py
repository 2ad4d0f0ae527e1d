"""Outputs of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from graphdecode.engine import RequestMetrics


@dataclass(frozen=True)
class Logprob:
    """The log-probability (natural) of one token, its rank (1 is the most likely), and its text if detokenized."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass
class CompletionOutput:
    """One of the `n` outputs of a request.

    Attributes:
        index: 0..n-1.
        text: cut before a stop string, or after it with `include_stop_str_in_output`.
        token_ids: the generated tokens, with the one that ended the output.
        finish_reason: "stop", "length", "abort", "refused" for a request that can never fit, or "error".
        stop_reason: the stop string or token id that ended the output; None for end-of-sequence.
        logprobs: one dict per token, token id -> `Logprob`; None if not requested.
        cumulative_logprob: sum over the generated tokens; None if not requested.
    """

    # a field with a factory is not an attribute of the class, so that `__getattr__` is called if it is deferred
    index: int
    text: str = field(default_factory=str)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = field(default_factory=lambda: None)
    cumulative_logprob: float | None = None

    def defer(self, **values: Callable[[], Any]) -> None:
        """Compute fields at their first read."""
        vars(self)["_deferred"] = values
        for name in values:
            del vars(self)[name]

    def __getattr__(self, name: str) -> Any:
        deferred = vars(self).get("_deferred", {})
        if name not in deferred:
            raise AttributeError(name)
        value = vars(self)[name] = deferred[name]()
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass
class RequestOutput:
    """A prompt and its outputs.

    Attributes:
        request_id: the number of the prompt, or the id given to `AsyncLLM`.
        prompt: the text; None if token ids were given.
        prompt_token_ids: the tokens of the prompt, after truncation.
        outputs: `n` outputs.
        metrics: times and counts.
        prompt_logprobs: None for the first token of the prompt, and token id -> `Logprob` for each other one; None if
            not requested, and before the first tokens of the output.
        error: why the request was refused or failed; None otherwise.
        error_code: the kind of error, for programs: see `Event`.
    """

    request_id: int | str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error_code: str | None = None

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended, or the request was refused."""
        return self.error is not None or all(output.finish_reason is not None for output in self.outputs)
