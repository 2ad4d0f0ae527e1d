"""One answer in progress: the engine's tokens to text, and stop strings."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from graphdecode.engine import Event, SamplingParams, TokenLogprobs
from graphdecode.text.detokenizer import Detokenizer
from graphdecode.text.outputs import CompletionOutput, GrowingText, Later, Logprob, RequestOutput


class Answer:
    """Makes one answer of a prompt from the engine's events of one request.

    Tokens end an answer in the engine; a stop text ends it here, and nothing behind it is shown or counted.

    Args:
        output: where the answer goes.
        request: the prompt's output that the answer is part of.
        tokenizer: a `tokenizers.Tokenizer`; None: there is no text.
    """

    def __init__(
        self, output: CompletionOutput, request: RequestOutput, params: SamplingParams, tokenizer: Any
    ) -> None:
        self.output = output
        self.request = request
        self.pieces: deque[str] = deque()  # text that nobody has taken yet
        self._text = GrowingText()
        self.on_news: Callable[[], None] = lambda: None  # is called in whichever thread brought something new
        self._tokenizer = tokenizer
        self._includes_stop = params.include_stop_str_in_output
        self._detokenizer = None
        if params.detokenize and tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer,
                params.stop_strings,
                params.skip_special_tokens,
                params.min_tokens,
                include_stop=self._includes_stop,
                spaced=params.spaces_between_special_tokens,
            )
        self._begun = False
        self._texts: dict[int, str] = {}  # of single tokens, which log-probabilities name again and again
        self._changing = threading.Lock()  # whose thread steps, and who gives the answer up

    @property
    def finished(self) -> bool:
        """Whether it is complete, or was given up; nothing of it changes any more."""
        return self.output.finish_reason is not None

    def take(self, event: Event) -> bool:
        """Take what the engine tells of it; return whether its text ended it, so that the engine is to be told."""
        with self._changing:
            if self.output.finish_reason is not None:
                return False
            if event.prompt_logprobs is not None:  # of the prompt's next tokens; the first one of all has none
                known, scores = self.request.prompt_logprobs or [None], event.prompt_logprobs
                tokens = self.request.prompt_token_ids[len(known) : len(known) + len(scores)]
                self.request.prompt_logprobs = known + [
                    self._entries(*each) for each in zip(tokens, scores, strict=True)
                ]
            if event.is_part:
                return False
            if not self._begun:
                self._begun = True
                own, shared = event.metrics, self.request.metrics
                shared.first_scheduled_time = _earliest(shared.first_scheduled_time, own.first_scheduled_time)
                shared.first_token_time = _earliest(shared.first_token_time, own.first_token_time)
                shared.num_cached_tokens = max(shared.num_cached_tokens, own.num_cached_tokens)
            stop = self._take_tokens(event)
            reason, stop_reason = ("stop", stop) if stop is not None else (event.finish_reason, event.stop_reason)
            if reason is None:
                self._show(final=False)
            else:
                self.request.metrics.num_preemptions += event.metrics.num_preemptions
                self._end(reason, stop_reason, event.error, event.error_code)
        self.on_news()
        return stop is not None

    def give_up(self, error: str | None = None) -> None:
        """End it where it is.

        Args:
            error: why, where it is not what its reader wanted.
        """
        with self._changing:
            if self.output.finish_reason is None:
                self._end("abort", None, error)
        self.on_news()

    def fail(self, error: str) -> None:
        """End it with what there is, for its text cannot be made."""
        with self._changing:
            if self.output.finish_reason is None:
                self.request.error = error
                self.output.finish_reason = "error"
        self.on_news()

    def snapshot(self) -> CompletionOutput:
        """Return what there is so far, which later events do not change; who reads none of it pays for no copy."""
        with self._changing:
            output = self.output
            tokens, logprobs = output.token_ids, output.logprobs  # which only grow
            so_far = slice(len(tokens))
            return CompletionOutput(
                output.index,
                self._text.now(),
                Later(lambda: tokens[so_far]),
                output.finish_reason,
                output.stop_reason,
                None if logprobs is None else Later(lambda: logprobs[so_far]),
                output.cumulative_logprob,
            )

    def _take_tokens(self, event: Event) -> str | None:
        """Take the tokens; return the stop text that ended them, if one did."""
        # a token that ends an answer is part of its tokens, and not of its text unless that is asked for; one behind
        # which nothing can follow is part of both
        ends_silently = event.finish_reason == "stop" and not (event.completes or self._includes_stop)
        detokenizer, silent = self._detokenizer, len(event.token_ids) - ends_silently
        for place, token in enumerate(event.token_ids):
            self.output.token_ids.append(token)
            if event.logprobs is not None:
                scored = event.logprobs[place]
                if self.output.logprobs is None:
                    self.output.logprobs = []
                self.output.logprobs.append(self._entries(token, scored))
                self.output.cumulative_logprob = (self.output.cumulative_logprob or 0.0) + scored.sampled
            if detokenizer is not None and place < silent and (stop := detokenizer.push(token)) is not None:
                return stop
        return None

    def _end(
        self, reason: str, stop_reason: str | int | None, error: str | None, error_code: str | None = None
    ) -> None:
        """Show all of the text, and be finished."""
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
        self.output.finish_reason = reason  # last: other threads look at it to know that all else is there

    def _show(self, *, final: bool) -> None:
        """Bring the visible text up to date, for readers of the output and of the stream."""
        piece = self._detokenizer.take(final) if self._detokenizer is not None else ""
        if piece:
            self._text.add(piece)
            self.output.text = self._text.now()
            self.pieces.append(piece)

    def _entries(self, token: int, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        """Return what is known of one place: the likeliest tokens, and the one that stands there."""
        entries = {
            other: Logprob(value, rank, self._decode(other)) for rank, (other, value) in enumerate(logprobs.top, 1)
        }
        if token not in entries:
            entries[token] = Logprob(logprobs.sampled, logprobs.rank, self._decode(token))
        return entries

    def _decode(self, token: int) -> str | None:
        if self._detokenizer is None:
            return None
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


def _earliest(*times: float | None) -> float | None:
    return min((moment for moment in times if moment is not None), default=None)
