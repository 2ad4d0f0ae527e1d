"""What a request gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphdecode.engine import RequestMetrics


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token, natural logarithm, its rank (1 is the most likely), and its text.

    There is no text where the request was not to be detokenised.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: which of the request's `n` answers this is.
        text: the answer, cut before a stop string, or behind it where that was asked for.
        token_ids: the generated tokens, the one that ended the answer included.
        finish_reason: "stop", "length", "abort", "refused" for a request that can never fit, or "error" for one that
            had to be given up.
        stop_reason: the stop string or token id that ended the answer; None for end-of-sequence.
        logprobs: for each token, token id -> `Logprob`; None where they were not asked for.
        cumulative_logprob: sum over the generated tokens; None where logprobs were not asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestOutput:
    """A prompt and its answers, in the order in which the prompts were given.

    Attributes:
        request_id: counts the prompts that were given, or what `AsyncLLM` was told to call it.
        prompt: the text; None where token ids were given.
        prompt_token_ids: the tokens of the prompt, those that were kept of it.
        outputs: `n` answers.
        metrics: times and counts.
        prompt_logprobs: None for the first token of the prompt, and token id -> `Logprob` for each other one; None
            where they were not asked for, and before the first tokens of the answer.
        error: why the request was refused or given up; None where it was served.
    """

    request_id: int | str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
