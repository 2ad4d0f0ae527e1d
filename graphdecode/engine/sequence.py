"""One answer in the making: what the engine knows of it between its steps."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from graphdecode.engine.detokenizer import Detokenizer
from graphdecode.engine.outputs import CompletionOutput, RequestOutput
from graphdecode.engine.sampling_params import SamplingParams


@dataclass(eq=False)
class Sequence:
    """A prompt and its tokens so far.

    Keys and values are kept for all tokens but the last: the last one is fed to the next decode step, which writes its
    keys and values and samples its successor. A prompt is no different: its last token is fed to a decode step, so a
    token is sampled in one place only, and a sequence that was preempted goes on exactly where it was.

    Attributes:
        sequence_id: names it in the cache.
        token_ids: prompt and answer.
        prompt_length: tokens of the prompt.
        max_length: tokens that prompt and answer may have together.
        cached_length: tokens whose keys and values are in the cache.
        seed: of its sampling.
        eos_token_ids: tokens that end it.
        output: where its answer goes.
        request: the prompt's output that the answer is part of.
    """

    sequence_id: int
    token_ids: list[int]
    params: SamplingParams
    detokenizer: Detokenizer
    seed: int
    max_length: int
    eos_token_ids: tuple[int, ...]
    output: CompletionOutput
    request: RequestOutput
    cached_length: int = 0
    published_length: int = 0
    pieces: deque[str] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.token_ids)
        own = self.params.stop_token_ids or ()
        eos = () if self.params.ignore_eos else self.eos_token_ids
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(itertools.chain(own, eos)))

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.output.finish_reason is not None

    @property
    def prefilled(self) -> bool:
        """Whether only the last token waits to be fed, so that decode steps can take over."""
        return self.cached_length >= len(self.token_ids) - 1

    def accept(self, token_id: int) -> None:
        """Take a sampled token: the step that sampled it has also cached the token before it."""
        self.token_ids.append(token_id)
        self.output.token_ids.append(token_id)
        self.cached_length = len(self.token_ids) - 1
        generated = len(self.output.token_ids)
        if token_id in self.stop_ids and generated > self.params.min_tokens:
            self._finish("stop", None if token_id in self.eos_token_ids else token_id)
        elif (stop := self.detokenizer.push(token_id)) is not None:
            self._finish("stop", stop)
        elif len(self.token_ids) >= self.max_length:
            self._finish("length", None)
        self.show()

    def show(self) -> None:
        """Bring the visible text up to date, for readers of the output and of the stream."""
        piece = self.detokenizer.take(final=self.finished)
        if piece:
            self.output.text += piece
            self.pieces.append(piece)

    def abort(self) -> None:
        """End the answer where it is."""
        if not self.finished:
            self._finish("abort", None)
            self.show()

    def _finish(self, reason: str, stop_reason: str | int | None) -> None:
        if reason != "stop" or not isinstance(stop_reason, str):
            late_stop = self.detokenizer.finish()
            if late_stop is not None:
                reason, stop_reason = "stop", late_stop
        self.output.finish_reason = reason
        self.output.stop_reason = stop_reason
