"""Outputs of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, TypeVar, overload

from graphdecode.engine import RequestMetrics

T = TypeVar("T")


class Later(Generic[T]):
    """A lazy value.

    Args:
        make: makes it; called once, or once for each thread that reads it at the same time.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._made: list[T] = []

    def read(self) -> T:
        """Return the value."""
        make = self._make
        if make is not None:
            self._made, self._make = [make()], None
        return self._made[0]


class GrowingText:
    """Growing text with lazy snapshots: pieces are joined when a snapshot is read."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0
        self._joined = (0, "")  # how many of the pieces, and their text

    def add(self, piece: str) -> None:
        """Add a piece at the end."""
        self._pieces.append(piece)
        self._length += len(piece)

    def now(self) -> Later[str]:
        """Return the text as it is now."""
        return Later(partial(self._first, len(self._pieces), self._length))

    def _first(self, count: int, length: int) -> str:
        joined, text = self._joined
        if joined < count:
            text += "".join(self._pieces[joined:count])
            self._joined = (count, text)
        return text[:length]


class _Read(Generic[T]):
    """A dataclass field that may be set to a `Later`; its default is made by `make`."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._left_out = Later(make)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Later[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> T | Later[T]:
        if instance is None:
            return self._left_out
        value = vars(instance)[self._name]
        return value.read() if isinstance(value, Later) else value

    def __set__(self, instance: object, value: T | Later[T]) -> None:
        vars(instance)[self._name] = self._make() if value is self._left_out else value


def _none() -> None:
    return None


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token, natural logarithm, its rank (1 is the most likely), and its text.

    There is no text where the request was not to be detokenized.
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
    text: _Read[str] = _Read(str)
    token_ids: _Read[list[int]] = _Read(list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _Read[list[dict[int, Logprob]] | None] = _Read(_none)
    cumulative_logprob: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


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
        error_code: what sort of error that was, where a program might want to know: see `Event`.
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
        """Whether nothing of it changes any more: all answers have ended, or it was refused."""
        return self.error is not None or all(output.finish_reason is not None for output in self.outputs)
