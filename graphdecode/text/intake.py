"""From prompts to requests of tokens, and to the answers that their events will fill."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from graphdecode.engine import Request, RequestMetrics, SamplingParams
from graphdecode.engine.constraint import ConstraintError
from graphdecode.engine.engine import as_int64, derived_seed
from graphdecode.errors import ArgumentError, shown
from graphdecode.text.answer import Answer
from graphdecode.text.grammar import Grammars
from graphdecode.text.outputs import CompletionOutput, RequestOutput
from graphdecode.text.router import TokenEngine
from graphdecode.text.tokenizer import is_tokenizers_own


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


class Asked(NamedTuple):
    """What all prompts of a request ask for, in tokens; it can be sent to another process.

    Attributes:
        params: of all answers.
        of_answer: of one answer, as the engine takes them.
        bad_words: tokens of each spelling of a word that the answers must not have.
        priority: the lowest is served first.
    """

    params: SamplingParams
    of_answer: SamplingParams
    bad_words: list[list[int]]
    priority: int


class Resolved(NamedTuple):
    """A prompt in tokens; it can be sent to another process.

    Attributes:
        prompt: the text; None: it was given as token ids.
        token_ids: of the prompt, cut as the parameters ask for it.
        asked: of its answers.
    """

    prompt: str | None
    token_ids: list[int]
    asked: Asked


class Intake:
    """Encodes prompts, refuses what can never be served, and resolves what is text in the parameters.

    Args:
        engine: what will serve them.
        tokenizer: of transformers.
        reads_grammars: read forms to the end, so that an engine of this process, whose `constrain` is that of
            `grammars`, finds them read and nobody's step waits for it.
    """

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: Any,
        *,
        reads_grammars: bool = False,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
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
        (ids,) = self._encoded([prompt], "the prompt", special=special)
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
        self._check_tokenizer(params)
        try:
            asked = self.asked(params, priority=priority, has_form=params.structured_outputs is not None)
            resolved = self.resolved(prompt, token_ids, asked)
            grammar = self._grammar(params)
            if grammar is not None and self._reads_grammars:
                self.grammars.constraint(grammar)
        except (ArgumentError, ConstraintError) as error:
            token_ids = self._truncated(token_ids, params, is_text=isinstance(prompt, str))
            return _refused(self._output(prompt if isinstance(prompt, str) else None, token_ids, params.n), str(error))
        return self.opened(resolved, grammar)

    def asked(self, params: SamplingParams, *, priority: int = 0, has_form: bool = False) -> Asked:
        """Return what a request asks for, whatever its prompts are.

        Args:
            params: of all answers.
            priority: the lowest is served first.
            has_form: the answers are to have a form.

        Raises:
            ArgumentError: the parameters are of text, and there is no tokenizer, or one that fails at it.
            RequestError: no prompt can be served with them.
        """
        self._check_tokenizer(params)
        words, rules = tuple(dict.fromkeys(params.bad_words or ())), self._engine.rules
        rules.check_count("bad_words", len(words), "max_bad_words")  # before each of them is spelled
        bad_words = self._spellings(words) if words else []
        named: dict[str, Any] = {
            name: tuple(dict.fromkeys(ids))  # each answer takes them along
            for name in ("stop_token_ids", "allowed_token_ids")
            if (ids := getattr(params, name)) is not None
        }
        params = replace(params, bad_words=None, structured_outputs=None, **named)
        of_answer = replace(params, n=1, stop=None, truncate_prompt_tokens=None)
        rules.check_sampling(of_answer, bad_words, has_form=has_form)
        return Asked(params, of_answer, bad_words, priority)

    def resolved(self, prompt: str | list[int], token_ids: list[int], asked: Asked) -> Resolved:
        """Return a prompt with all that takes a tokenizer done; see `order`.

        Raises:
            RequestError: it can never be served.
        """
        token_ids = self._truncated(token_ids, asked.params, is_text=isinstance(prompt, str))
        self._engine.rules.check_prompt(token_ids, asked.params.max_tokens)
        return Resolved(prompt if isinstance(prompt, str) else None, token_ids, asked)

    def opened(self, resolved: Resolved, grammar: str | None, turn: float = 0.0) -> Order:
        """Return the order of a prompt; see `order`.

        Args:
            resolved: what `resolved` gave, here or in another process.
            grammar: of its answers; None: they may have any form.
            turn: of its answers, among requests of one priority.
        """
        params, of_answer, bad_words, priority = resolved.asked
        output = self._output(resolved.prompt, resolved.token_ids, params.n)
        seed = derived_seed(self._engine.seed, int(output.request_id)) if params.seed is None else params.seed
        tokenizer = None if self._tokenizer is None else self._tokenizer.backend_tokenizer
        requests: list[tuple[Request, Answer]] = []
        for answer_output in output.outputs:
            index = answer_output.index
            scored = params.prompt_logprobs if index == 0 else None  # once is enough
            own = of_answer.of_answer(as_int64(seed + index), scored)
            request = Request(resolved.token_ids, own, bad_words, grammar, priority, turn)
            requests.append((request, Answer(answer_output, output, params, tokenizer)))
        return Order(output, requests)

    def _output(self, prompt: str | None, token_ids: list[int], answers: int) -> RequestOutput:
        outputs = [CompletionOutput(index) for index in range(answers)]
        return RequestOutput(next(self._numbers), prompt, token_ids, outputs, RequestMetrics(time.perf_counter()))

    def _check_tokenizer(self, params: SamplingParams) -> None:
        if self._tokenizer is None and (params.stop_strings or params.bad_words):
            raise ArgumentError("there is no tokenizer (skip_tokenizer_init): stop and bad_words must be None")

    @cached_property
    def grammars(self) -> Grammars:
        """What reads the forms of answers, for this tokenizer and this engine."""
        rules = self._engine.rules
        return Grammars(self._tokenizer.backend_tokenizer, rules.vocab_size, rules.eos_token_ids)

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

    def _spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Return the tokens of words, at the beginning of a text and behind a space, where these are others."""
        plain = self._encoded([word.lstrip() for word in words], "bad_words", special=False)
        spaced = self._encoded([f" {word.lstrip()}" for word in words], "bad_words", special=False)
        spellings = []
        for first, other in zip(plain, spaced, strict=True):
            spellings += [first] if other[-len(first) :] == first else [first, other]
        return spellings

    def _encoded(self, texts: Sequence[str], name: str, *, special: bool) -> list[list[int]]:
        """Return the tokens of some texts.

        Raises:
            ArgumentError: the tokenizer fails at one.
        """
        try:
            with self._encoding:
                return list(self._tokenizer(list(texts), verbose=False, add_special_tokens=special).input_ids)
        except BaseException as error:
            if not is_tokenizers_own(error):
                raise
            told = shown(texts[0] if len(texts) == 1 else list(texts))
            raise ArgumentError(f"the tokenizer fails at {name} {told}: {type(error).__name__}: {error}") from error


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
