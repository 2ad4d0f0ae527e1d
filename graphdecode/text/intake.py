"""From prompts to requests of tokens, and to the answers that their events will fill."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from graphdecode.engine import Request, RequestError, RequestMetrics, SamplingParams
from graphdecode.engine.constraint import ConstraintError
from graphdecode.engine.engine import as_int64, derived_seed
from graphdecode.errors import ArgumentError, shown
from graphdecode.text.answer import Answer
from graphdecode.text.grammar import Grammars
from graphdecode.text.outputs import CompletionOutput, RequestOutput
from graphdecode.text.router import TokenEngine
from graphdecode.text.tokenizer import is_tokenizers_own
from graphdecode.text.xgrammar_grammars import grammars_of


@dataclass(frozen=True)
class Order:
    """One prompt, ready to be handed in.

    Attributes:
        output: what its caller gets.
        requests: what the engine gets, each with the answer that its events go to; none where the prompt was refused.
    """

    output: RequestOutput
    requests: list[tuple[Request, Answer]]

    @property
    def answers(self) -> list[Answer]:
        """The answers, `n` of them, or none."""
        return [answer for _, answer in self.requests]


class Intake:
    """Encodes prompts, refuses what can never be served, and resolves what is text in the parameters.

    Args:
        engine: what will serve them.
        tokenizer: of transformers.
        structured_outputs_backend: the library that reads forms; see `EngineConfig`.
        reads_grammars: read forms to the end, so that an engine of this process, whose `constrain` is that of
            `grammars`, finds them read and nobody's step waits for it.
    """

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: Any,
        *,
        structured_outputs_backend: str = "auto",
        reads_grammars: bool = False,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._structured_outputs_backend = structured_outputs_backend
        self._reads_grammars = reads_grammars
        self._encoding = threading.Lock()  # the tokenizer keeps settings of the call that runs
        self._numbers = itertools.count()

    def encode(self, prompt: str | list[int], *, special: bool = True) -> list[int]:
        """Return a prompt's token ids; ids that were given are left as they are, and `order` looks at them.

        Args:
            prompt: a text or token ids.
            special: add the special tokens that the tokenizer begins a text with.

        Raises:
            ArgumentError: it is a text, and there is no tokenizer, or one that fails at it.
        """
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise ArgumentError("there is no tokenizer (skip_tokenizer_init): give token ids, and not a text")
        try:
            with self._encoding:
                ids = list(self._tokenizer(prompt, verbose=False, add_special_tokens=special).input_ids)
        except BaseException as error:
            if not is_tokenizers_own(error):
                raise
            raise ArgumentError(
                f"the tokenizer fails at the prompt {shown(prompt)}: {type(error).__name__}: {error}"
            ) from error
        if not ids and self._tokenizer.bos_token_id is not None:
            ids = [self._tokenizer.bos_token_id]
        return ids

    def order(
        self, prompt: str | list[int], token_ids: list[int], params: SamplingParams, *, priority: int = 0
    ) -> Order:
        """Return what a prompt becomes; one that can never be served comes back refused, with `output.error` set.

        Args:
            prompt: as it was given.
            token_ids: what `encode` made of it.
            params: of all its answers.
            priority: the lowest is served first.

        Raises:
            ArgumentError: the parameters are of text, and there is no tokenizer.
        """
        if self._tokenizer is None and (params.stop_strings or params.bad_words):
            raise ArgumentError("there is no tokenizer (skip_tokenizer_init): stop and bad_words must be None")
        number = next(self._numbers)
        token_ids = self._truncated(token_ids, params, is_text=isinstance(prompt, str))
        outputs = [CompletionOutput(index) for index in range(params.n)]
        text = prompt if isinstance(prompt, str) else None
        output = RequestOutput(number, text, token_ids, outputs, RequestMetrics(time.perf_counter()))
        seed = derived_seed(self._engine.seed, number) if params.seed is None else params.seed
        tokenizer = None if self._tokenizer is None else self._tokenizer.backend_tokenizer
        own = replace(params, n=1, stop=None, bad_words=None, structured_outputs=None, truncate_prompt_tokens=None)
        bad_words = [tokens for word in dict.fromkeys(params.bad_words or ()) for tokens in self._spellings(word)]
        requests: list[tuple[Request, Answer]] = []
        try:
            grammar = self._grammar(params)
            if grammar is not None and self._reads_grammars:
                self.grammars.constraint(grammar)
        except (ArgumentError, ConstraintError) as error:
            return _refused(output, str(error))
        for answer_output in outputs:
            index = answer_output.index
            scored = params.prompt_logprobs if index == 0 else None  # once is enough
            single = replace(own, seed=as_int64(seed + index), prompt_logprobs=scored)
            request = Request(token_ids, single, bad_words, grammar, priority)
            requests.append((request, Answer(answer_output, output, params, tokenizer)))
        try:
            self._engine.rules.check(requests[0][0])
        except RequestError as error:
            return _refused(output, str(error))
        return Order(output, requests)

    @cached_property
    def grammars(self) -> Grammars:
        """What reads the forms of answers, for this tokenizer and this engine."""
        rules = self._engine.rules
        backend, tokenizer = self._structured_outputs_backend, self._tokenizer.backend_tokenizer
        return grammars_of(backend, tokenizer, rules.vocab_size, rules.eos_token_ids)

    def _grammar(self, params: SamplingParams) -> str | None:
        """Return the grammar for the form of an answer."""
        form = params.structured_outputs
        if form is None:
            return None
        if self._tokenizer is None:
            raise ArgumentError("structured_outputs: there is no tokenizer (skip_tokenizer_init)")
        return self.grammars.grammar(form)

    def _truncated(self, token_ids: list[int], params: SamplingParams, *, is_text: bool) -> list[int]:
        """Return the last tokens of a prompt, as many as are to be kept; a text keeps what stands in front of it."""
        kept = params.truncate_prompt_tokens
        if kept is None:
            return token_ids
        if kept == -1:
            limit, room = self._engine.rules.capacity.token_limit, params.max_tokens
            kept = max(limit - (room if room is not None and room < limit else 1), 1)
        if len(token_ids) <= kept:
            return token_ids
        if is_text and token_ids[0] == self._tokenizer.bos_token_id:
            return token_ids[:1] + token_ids[len(token_ids) - kept + 1 :]
        return token_ids[-kept:]

    def _spellings(self, word: str) -> list[list[int]]:
        """Return the tokens of a word, at the beginning of a text and behind a space, where these are others."""
        word = word.lstrip()
        with self._encoding:
            plain, spaced = (
                list(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
                for text in (word, f" {word}")
            )
        return [plain] if spaced[-len(plain) :] == plain else [plain, spaced]


def _refused(output: RequestOutput, error: str) -> Order:
    output.error = error
    for answer_output in output.outputs:
        answer_output.finish_reason = "refused"
    return Order(output, [])


def as_priorities(priority: Sequence[int] | int | None, count: int) -> list[int]:
    """Return the priority of each of some prompts.

    Args:
        priority: of all prompts, or one for each; None is 0.
        count: of the prompts.

    Raises:
        ArgumentError: they are not as many, or no integers of 64 bits.
    """
    given = [priority or 0] * count if priority is None or isinstance(priority, int) else list(priority)
    if len(given) != count:
        raise ArgumentError(f"there are {count} prompts and {len(given)} priorities")
    wrong = [each for each in given if not isinstance(each, int) or isinstance(each, bool) or as_int64(each) != each]
    if wrong:
        raise ArgumentError(f"priority must be a 64-bit integer for each prompt, got {wrong[0]!r:.40}")
    return given


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return the parameters of each of some prompts.

    Args:
        params: for all prompts, or one for each; None means the defaults.
        count: of the prompts.

    Raises:
        ValueError: they are something else, or not as many.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence):
        raise ArgumentError(f"sampling_params must be SamplingParams, one or a list, got {shown(params)}")
    wrong = [type(item).__name__ for item in params if not isinstance(item, SamplingParams)]
    if wrong:
        raise ArgumentError(f"sampling_params must be SamplingParams, one or a list, got {wrong[0]}")
    if len(params) != count:
        raise ArgumentError(f"there are {count} prompts and {len(params)} sampling_params")
    return list(params)
