"""Prompts to requests of tokens, and to the answers that their events will fill."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, NamedTuple, Protocol

from graphdecode.engine import Request, RequestMetrics, SamplingParams
from graphdecode.engine.constraint import ConstraintError
from graphdecode.engine.engine import as_int64, derived_seed
from graphdecode.engine.request import RequestRules
from graphdecode.errors import ArgumentError, shown
from graphdecode.text.answer import Answer
from graphdecode.text.grammar import Grammars
from graphdecode.text.outputs import CompletionOutput, RequestOutput
from graphdecode.text.tokenizer import is_tokenizers_own

Prompt = str | Sequence[int] | Mapping[str, Any]

_EXPECTED = "a prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`"
_DICT_KEYS = {"prompt", "prompt_token_ids"}


def as_prompt(prompt: Any) -> str | list[int]:
    """Return one prompt as a text or a list of token ids.

    Args:
        prompt: a text; integers in a sequence, a NumPy array or a tensor; or a dict as vLLM takes it, in which
            `prompt_token_ids` wins over `prompt`.

    Raises:
        ValueError: it is none of these, or a text with halves of surrogate pairs.
    """
    if isinstance(prompt, Mapping):
        if not prompt or set(prompt) - _DICT_KEYS:
            raise ArgumentError(f"{_EXPECTED}, got a dict with {sorted(map(str, prompt))}")
        return as_prompt(prompt.get("prompt_token_ids", prompt.get("prompt")))
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ArgumentError(f"a prompt is no valid text: {error}") from error
        return prompt
    ids = _listed(prompt)
    if type(ids) is list and set(map(type, ids)) == {int}:  # of a million, each would be looked at for a while
        return list(ids)
    if not isinstance(ids, Sequence) or isinstance(ids, bytes | bytearray) or not all(map(_is_token, ids)):
        raise ArgumentError(f"{_EXPECTED}, got {shown(prompt)}")
    return [int(token) for token in ids]


def as_prompts(prompts: Any) -> list[str | list[int]]:
    """Return what `generate` was given as a list of prompts.

    Args:
        prompts: one prompt, or an iterable of prompts; integers are one prompt.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(prompts, str | Mapping):
        return [as_prompt(prompts)]
    prompts = _listed(prompts)
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise ArgumentError(f"{_EXPECTED}, and prompts are a list of them, got {shown(prompts)}")
    items = list(prompts)
    return [as_prompt(items)] if items and all(map(_is_token, items)) else [as_prompt(item) for item in items]


def _listed(given: Any) -> Any:
    return given.tolist() if hasattr(given, "tolist") else given


def _is_token(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class Order:
    """One prompt with its requests, ready to submit."""

    output: RequestOutput  # what its caller gets
    # what the engine gets, each with the answer that its events go to; none where the prompt was refused
    requests: list[tuple[Request, Answer]]

    @property
    def answers(self) -> list[Answer]:
        """The answers, `n` of them, or none."""
        return [answer for _, answer in self.requests]


class Asked(NamedTuple):
    """Parameters that all prompts of a request share, in tokens; picklable."""

    params: SamplingParams  # of all answers
    of_answer: SamplingParams  # of one answer, as the engine takes them
    bad_words: list[list[int]]  # tokens of each spelling of a word that the answers must not have
    priority: int  # the lowest is served first


class Resolved(NamedTuple):
    """A prompt in tokens; picklable."""

    prompt: str | None  # the text; None: it was given as token ids
    token_ids: list[int]  # of the prompt, cut as the parameters ask for it
    asked: Asked  # of its answers


class _Serving(Protocol):
    """The limits and the seed of an engine."""

    @property
    def rules(self) -> RequestRules: ...

    @property
    def seed(self) -> int: ...  # of the requests that bring none


class Intake:
    """Tokenizes prompts and textual parameters, and refuses what can never be served.

    Args:
        reads_grammars: compile grammars here, so that an engine of this process, whose `constrain` is that of
            `grammars`, finds them read and nobody's step waits for it.
    """

    def __init__(self, engine: _Serving, tokenizer: Any, *, reads_grammars: bool = False) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._reads_grammars = reads_grammars
        self._encoding = threading.Lock()  # the tokenizer keeps settings of the call that runs
        self._numbers = itertools.count()

    def encode(self, prompt: str | list[int], *, special: bool = True) -> list[int]:
        """Return a prompt's token ids; ids that were given are left as they are, and `order` looks at them.

        Args:
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
        """Return the order of a prompt; one that can never be served is refused, with `output.error` set.

        Args:
            token_ids: what `encode` made of it.

        Raises:
            ArgumentError: the parameters are of text, and there is no tokenizer.
        """
        self._check_tokenizer(params)
        try:
            asked = self.asked(params, priority=priority, is_structured=params.structured_outputs is not None)
            resolved = self.resolved(prompt, token_ids, asked)
            grammar, structured = None, params.structured_outputs
            if structured is not None:
                if self._tokenizer is None:
                    raise ArgumentError("structured_outputs: there is no tokenizer (skip_tokenizer_init)")
                grammar = self.grammars.grammar(structured)
                if self._reads_grammars:
                    self.grammars.constraint(grammar)
        except (ArgumentError, ConstraintError) as error:
            token_ids = self._truncated(token_ids, params, is_text=isinstance(prompt, str))
            output = self._output(prompt if isinstance(prompt, str) else None, token_ids, params.n)
            output.error = str(error)
            for answer_output in output.outputs:
                answer_output.finish_reason = "refused"
            return Order(output, [])
        return self.opened(resolved, grammar)

    def asked(self, params: SamplingParams, *, priority: int = 0, is_structured: bool = False) -> Asked:
        """Check and resolve the parameters that all prompts of a request share.

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
        params = params.unchecked(bad_words=None, structured_outputs=None, **named)
        of_answer = params.unchecked(n=1, stop=None, stop_strings=(), truncate_prompt_tokens=None)
        rules.check_sampling(of_answer, bad_words, has_form=is_structured)
        return Asked(params, of_answer, bad_words, priority)

    def resolved(self, prompt: str | list[int], token_ids: list[int], asked: Asked) -> Resolved:
        """Truncate and check a tokenized prompt; see `order`.

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
            grammar: of its answers; None: unconstrained.
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
            own = of_answer.unchecked(seed=as_int64(seed + index), prompt_logprobs=scored)
            request = Request(resolved.token_ids, own, bad_words, grammar, priority, turn, is_checked=True)
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
        """The compiler of structured outputs, for this tokenizer and engine."""
        rules = self._engine.rules
        return Grammars(self._tokenizer.backend_tokenizer, rules.vocab_size, rules.eos_token_ids)

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


def as_priorities(priority: Sequence[int] | int | None, count: int) -> list[int]:
    """Return the priority of each of some prompts.

    Args:
        priority: of all prompts, or one for each; None is 0.

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
