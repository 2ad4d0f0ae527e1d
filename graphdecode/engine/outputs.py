"""What a request gets back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token, natural logarithm, and its rank (1 is the most likely)."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: which of the request's `n` answers this is.
        text: the answer, cut before a stop string.
        token_ids: the generated tokens, the one that ended the answer included.
        finish_reason: "stop", "length", "abort", or "refused" for a request that can never fit.
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
class RequestMetrics:
    """When things happened, in seconds of `time.perf_counter`, and what it took.

    Attributes:
        arrival_time: the request was handed in.
        first_scheduled_time: it first got a row and pages; None before.
        first_token_time: its first token was known to the host; None before.
        finished_time: its last answer was finished; None before.
        num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
        num_preemptions: how often the request gave its pages back and was recomputed.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """A prompt and its answers, in the order in which the prompts were given.

    Attributes:
        request_id: counts the prompts that the engine was given.
        prompt: the text; None where token ids were given.
        prompt_token_ids: the tokens of the prompt.
        outputs: `n` answers.
        metrics: times and counts.
        error: why the request was refused; None where it was served.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    error: str | None = None
