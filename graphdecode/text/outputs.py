"""Outputs of requests, and how they are made from the engine's events: detokenization and stop strings."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any

import numpy as np

from graphdecode.engine import Event, RequestMetrics, SamplingParams, TokenLogprobs
from graphdecode.text.detokenizer import Detokenizer
from graphdecode.text.token_texts import IncrementalText, TokenTexts


@dataclass(frozen=True)
class Logprob:
    """The log-probability (natural) of one token, its rank (1 is the most likely), and its text if detokenized.

    The text is what the token adds there: nothing for a part of a character, the whole character for its last part.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


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
        vars(self)["_deferred"] = vars(self).get("_deferred", {}) | {name: cache(make) for name, make in values.items()}
        for name in values:
            vars(self).pop(name, None)

    def __getattr__(self, name: str) -> Any:
        deferred = vars(self).get("_deferred", {})
        if name not in deferred:
            raise AttributeError(name)
        return deferred[name]()

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
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache had."""
        return self.metrics.num_cached_tokens

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended, or the request was refused."""
        return self.error is not None or all(output.finish_reason is not None for output in self.outputs)


class RequestState:
    """Makes one output of a prompt from the engine's events; without a tokenizer it has no text.

    The engine ends an output at tokens; a stop string ends it here, and what follows is neither shown nor counted.
    """

    def __init__(
        self, output: CompletionOutput, request: RequestOutput, params: SamplingParams, texts: TokenTexts | None
    ) -> None:
        self.output = output
        self.request = request
        self.request_id = -1  # the engine's, once it was submitted
        self.pieces: deque[str] = deque()  # text that was not read yet
        self.embedding: np.ndarray | None = None  # of a request that pools, or logits: see `Event`
        self.on_change: Callable[[], None] = lambda: None  # called at each change, in the thread that brought it
        self._params = params
        self._texts = texts if params.detokenize else None
        self._shown = 0  # characters of the detokenized text that are visible
        self._begun = False
        self._changing = threading.Lock()  # between the thread that steps and one that aborts

    @cached_property
    def _detokenizer(self) -> Detokenizer | None:
        """The output's detokenizer, made at its first event: the ids of a refused prompt may be invalid."""
        params = self._params
        if self._texts is None:
            return None
        return Detokenizer(
            self._texts,
            params.stop_strings,
            params.skip_special_tokens,
            params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            spaced=params.spaces_between_special_tokens,
            prompt=self.request.prompt_token_ids,
        )

    @cached_property
    def _prompt_text(self) -> IncrementalText | None:
        """Text of the prompt's tokens so far: those with log-probabilities, and the first."""
        if self._texts is None:
            return None
        is_text = self.request.prompt is not None  # which has no special tokens that the tokenizer added
        text = IncrementalText(self._texts, skip_special_tokens=is_text)
        text.push(self.request.prompt_token_ids[0])
        return text

    @property
    def finished(self) -> bool:
        """Whether it is complete or aborted; it changes no more."""
        return self.output.finish_reason is not None

    def take(self, event: Event) -> bool:
        """Take an event; return whether a stop string ended the output, so that the engine has to stop the request."""
        with self._changing:
            if self.output.finish_reason is not None:
                return False
            if event.prompt_logprobs is not None:  # for the prompt's next tokens; its first one has none
                earlier, scores = self.request.prompt_logprobs or [None], event.prompt_logprobs
                tokens, text = (
                    self.request.prompt_token_ids[len(earlier) : len(earlier) + len(scores)],
                    self._prompt_text,
                )
                entries: list[dict[int, Logprob] | None] = []
                for token, scored in zip(tokens, scores, strict=True):
                    entries.append(_entries(token, scored, text))
                    if text is not None:
                        text.push(token)
                self.request.prompt_logprobs = earlier + entries
            if event.is_part:
                return False
            if not self._begun:
                self._begun = True
                metrics, shared = event.metrics, self.request.metrics
                shared.first_scheduled_time = _earliest(shared.first_scheduled_time, metrics.first_scheduled_time)
                shared.first_token_time = _earliest(shared.first_token_time, metrics.first_token_time)
                shared.num_cached_tokens = max(shared.num_cached_tokens, metrics.num_cached_tokens)
            self.embedding = event.embedding
            stop = self._take_tokens(event)
            reason, stop_reason = ("stop", stop) if stop is not None else (event.finish_reason, event.stop_reason)
            if reason is None:
                self._show(final=False)
            else:
                self.request.metrics.num_preemptions += event.metrics.num_preemptions
                self._end(reason, stop_reason, event.error, event.error_code)
        self.on_change()
        return stop is not None

    def abort(self, error: str | None = None) -> None:
        """End it with the output so far, and with an error unless its reader asked for that."""
        with self._changing:
            if self.output.finish_reason is None:
                self._end("abort", None, error)
        self.on_change()

    def fail(self, error: str) -> None:
        """End it with an error, without detokenizing the rest."""
        with self._changing:
            if self.output.finish_reason is None:
                self.request.error = error
                self.output.finish_reason = "error"
        self.on_change()

    def snapshot(self) -> CompletionOutput:
        """Return the output so far, which later events do not change; it is copied when it is read."""
        with self._changing:
            output, logprobs = self.output, self.output.logprobs
            count = len(output.token_ids)
            ended, total = (output.finish_reason, output.stop_reason), output.cumulative_logprob
            snapshot = CompletionOutput(output.index, "", [], *ended, None, total)
            snapshot.defer(  # they only grow
                token_ids=lambda: output.token_ids[:count], logprobs=lambda: logprobs and logprobs[:count]
            )
            self._show_text(snapshot)
            return snapshot

    def _take_tokens(self, event: Event) -> str | None:
        """Take the tokens; return the stop string that ended them, if one did."""
        # a stop token has no text unless that was requested; a grammar's last token has
        ends_silently = event.finish_reason == "stop" and not (
            event.completes or self._params.include_stop_str_in_output
        )
        detokenizer, silent = self._detokenizer, len(event.token_ids) - ends_silently
        for index, token in enumerate(event.token_ids):
            self.output.token_ids.append(token)
            if event.logprobs is not None:
                scored = event.logprobs[index]
                if self.output.logprobs is None:
                    self.output.logprobs = []
                self.output.logprobs.append(_entries(token, scored, detokenizer))
                self.output.cumulative_logprob = (self.output.cumulative_logprob or 0.0) + scored.sampled
            if detokenizer is not None and index < silent and (stop := detokenizer.push(token)) is not None:
                return stop
        return None

    def _end(
        self, reason: str, stop_reason: str | int | None, error: str | None, error_code: str | None = None
    ) -> None:
        if self._detokenizer is not None and not isinstance(stop_reason, str):
            late_stop = self._detokenizer.finish()
            if late_stop is not None:
                reason, stop_reason = "stop", late_stop
        self._show(final=True)
        if error is not None:
            self.request.error_code = error_code
            self.request.error = error
        self.request.metrics.finished_time = time.perf_counter()
        self.output.stop_reason = stop_reason
        self.output.finish_reason = reason  # last: other threads take it as the sign that all else is set

    def _show(self, *, final: bool) -> None:
        """Update the visible text of the output and of the stream."""
        if self._detokenizer is not None and (piece := self._detokenizer.take(final)):
            self._shown += len(piece)
            self._show_text(self.output)
            self.pieces.append(piece)

    def _show_text(self, output: CompletionOutput) -> None:
        """Let an output have the text so far, which is copied when it is read."""
        if self._detokenizer is not None:
            detokenizer, shown = self._detokenizer, self._shown
            output.defer(text=lambda: detokenizer.text[:shown])


def _entries(token: int, logprobs: TokenLogprobs, text: Detokenizer | IncrementalText | None) -> dict[int, Logprob]:
    """Return the most likely tokens at a position, and the token there; `text` is the one before it."""
    text_of: Callable[[int], str | None] = (lambda _: None) if text is None else text.text_of
    entries = {other: Logprob(value, rank, text_of(other)) for rank, (other, value) in enumerate(logprobs.top, 1)}
    if token not in entries:
        entries[token] = Logprob(logprobs.sampled, logprobs.rank, text_of(token))
    return entries


def _earliest(*times: float | None) -> float | None:
    return min((moment for moment in times if moment is not None), default=None)
