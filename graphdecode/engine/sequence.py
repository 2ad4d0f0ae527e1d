"""One answer in the making: what the engine knows of it between its steps."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from graphdecode.engine.metrics import RequestMetrics
from graphdecode.engine.sampling_params import SamplingParams
from graphdecode.engine.steps import NO_CHOICE, RowInputs, RowSampling


@dataclass(eq=False)
class Sequence:
    """A prompt and its tokens so far.

    Keys and values are kept for all tokens but the last: the last one is fed to the next decode step, which writes its
    keys and values and samples its successor. A prompt is no different: its last token is fed to a decode step, so a
    token is sampled in one place only, and a sequence that was preempted goes on exactly where it was.

    Attributes:
        request_id: names it, in the engine and in the cache.
        token_ids: prompt and answer.
        params: what was asked for.
        prompt_length: tokens of the prompt.
        max_length: tokens that prompt and answer may have together.
        stop_ids: tokens that end it.
        eos_token_ids: those of them that are the model's.
        sampling: what the step is told of it.
        metrics: times and counts.
        cached_length: tokens whose keys and values are in the cache; the one book of it.
        finish_reason: "stop", "length" or "error" once it has ended; None before.
        stop_reason: the request's stop token that ended it.
    """

    request_id: int
    token_ids: list[int]
    params: SamplingParams
    prompt_length: int
    max_length: int
    stop_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    sampling: RowSampling
    metrics: RequestMetrics
    cached_length: int = 0
    finish_reason: str | None = None
    stop_reason: int | None = None

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    @property
    def prefilled(self) -> bool:
        """Whether only the last token waits to be fed, so that decode steps can take over."""
        return self.cached_length >= len(self.token_ids) - 1

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.prompt_length

    def accept(self, token_id: int) -> None:
        """Take a sampled token, and decide whether it ends the answer.

        The step that sampled it has also cached the token before it.
        """
        self.cached_length = len(self.token_ids)
        self.token_ids.append(token_id)
        if token_id in self.stop_ids and self.num_generated > self.params.min_tokens:
            self.finish_reason = "stop"
            self.stop_reason = None if token_id in self.eos_token_ids else token_id
        elif len(self.token_ids) >= self.max_length:
            self.finish_reason = "length"

    def fail(self, why: int) -> str:
        """End it, for no token can be chosen; return an error that says so.

        Args:
            why: one of NO_CHOICE.
        """
        self.finish_reason = "error"
        return (
            f"request {self.request_id} was ended: no token can be chosen at position {len(self.token_ids)} "
            f"(temperature {self.params.temperature:g}): {NO_CHOICE[why]}"
        )

    def row_inputs(self, pages: SequenceOf[int]) -> RowInputs:
        """Return what a step is told of it.

        Args:
            pages: of the cache that it owns.
        """
        return RowInputs(self.token_ids, self.prompt_length, pages, self.sampling)
