"""Input processor: prompts to requests of tokens, and the outputs that their events fill."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from graphdecode.engine import Request, RequestMetrics, SamplingParams
from graphdecode.engine.constraint import ConstraintError
from graphdecode.engine.engine import as_int64, derived_seed
from graphdecode.engine.request import ContextLengthError, RequestError, RequestRules
from graphdecode.errors import ArgumentError, shown
from graphdecode.text.grammar import Grammars
from graphdecode.text.light_tokenizer import is_tokenizer_error
from graphdecode.text.outputs import CompletionOutput, RequestOutput, RequestState
from graphdecode.text.reasoning import PromptReasoning, reasoning_of
from graphdecode.text.token_texts import TokenTexts


@dataclass(frozen=True)
class ParentRequest:
    """A prompt and the engine's requests for its `n` outputs, as vLLM's class of this name."""

    output: RequestOutput  # for its caller
    children: list[tuple[Request, RequestState]]  # one for each output; empty if the prompt was refused

    @property
    def states(self) -> list[RequestState]:
        """The outputs in progress: `n`, or none."""
        return [state for _, state in self.children]

    def refuse(self, error: str) -> None:
        """End it with an error before it is submitted."""
        self.children.clear()
        self.output.error = error
        for output in self.output.outputs:
            output.finish_reason = "refused"


class TokenizedParams(NamedTuple):
    """Parameters that all prompts of a request share, tokenized; picklable."""

    sampling: SamplingParams
    per_output: SamplingParams  # for one output in the engine
    bad_words: list[list[int]]  # tokens of each spelling
    priority: int = 0  # the lowest is served first
    adapter: str | None = None  # its name; None: the base model
    cache_salt: str | None = None  # see `Request`
    truncation_side: str = "left"  # where tokens are cut: "left" keeps the last ones, "right" the first
    pools: bool = False  # see `Request`
    scores: bool = False

    @property
    def most_generated(self) -> int | None:
        """The most tokens that are generated; None: as many as fit."""
        return 0 if self.pools else self.sampling.max_tokens


class TokenizedPrompt(NamedTuple):
    """A tokenized prompt; picklable."""

    prompt: str | None  # the text; None if token ids were given
    token_ids: list[int]  # truncated to `truncate_prompt_tokens`
    params: TokenizedParams
    begins_message: bool = False  # whether the output begins a chat's message


class InputProcessor:
    """Tokenizes and checks prompts and parameters; the engine does not check them again.

    `rules` and `seed` are the engine's. Without a tokenizer, from transformers or `load_tokenizer`, prompts are token
    ids.
    """

    def __init__(self, rules: RequestRules, seed: int, tokenizer: Any, *, reasoning_parser: str | None = None) -> None:
        self._rules, self._seed, self._tokenizer = rules, seed, tokenizer
        self._reasoning_parser = reasoning_parser
        self._encoding = threading.Lock()  # tokenizers keep state of the running call
        self._numbers = itertools.count()

    def encode(self, prompt: str | list[int], *, special: bool = True) -> list[int]:
        """Return a prompt's token ids, with the tokenizer's special tokens if `special`; given ids stay as they are."""
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise ArgumentError("there is no tokenizer (skip_tokenizer_init): give token ids instead of a text")
        (ids,) = self._encoded([prompt], "the prompt", special=special)
        if not ids and self._tokenizer.bos_token_id is not None:
            ids = [self._tokenizer.bos_token_id]
        return ids

    def process(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        token_ids: list[int] | None = None,
        priority: int = 0,
        adapter: str | None = None,
        cache_salt: str | None = None,
        begins_message: bool = False,
        pools: bool = False,
        scores: bool = False,
    ) -> ParentRequest:
        """Tokenize a prompt to the requests of its outputs; one that is too long is refused, with `output.error` set.

        A grammar is compiled here, so that no step waits for it. Raises `ArgumentError` if there is no tokenizer for a
        text, or it fails; `RequestError` if the prompt or the parameters can never be right.

        Args:
            token_ids: the prompt's; None: from `encode`.
            priority: the lowest is served first.
            adapter: its name; None: the base model.
            cache_salt, pools, scores: see `Request`.
            begins_message: whether the output begins a chat's message, which may begin with reasoning.
        """
        token_ids = self.encode(prompt) if token_ids is None else token_ids
        if self._tokenizer is None and (params.stop_strings or params.bad_words):
            raise ArgumentError("there is no tokenizer (skip_tokenizer_init): stop and bad_words must be None")
        structured, grammar = params.structured_outputs, None
        try:
            shared = self.tokenized_params(params, is_structured=structured is not None)
            shared = shared._replace(priority=priority, adapter=adapter, cache_salt=cache_salt)
            if pools:
                shared = shared._replace(pools=pools, scores=scores, truncation_side="right")
            tokenized = self.tokenized_prompt(prompt, token_ids, shared, begins_message=begins_message)
            if structured is not None:
                if self._tokenizer is None:
                    raise ArgumentError("structured_outputs: there is no tokenizer (skip_tokenizer_init)")
                grammar = self.grammars.grammar(structured)
                self.grammars.constraint(grammar)
        except ConstraintError as error:
            raise RequestError(str(error)) from error
        except ContextLengthError as error:
            shared = TokenizedParams(params, params, [])
            parent = self.parent_request(self._truncated(prompt, token_ids, shared), None)
            parent.refuse(str(error))
            return parent
        return self.parent_request(tokenized, grammar)

    def tokenized_params(self, params: SamplingParams, *, is_structured: bool = False) -> TokenizedParams:
        """Tokenize and check the parameters that all prompts of a request share; the caller sets the other fields.

        Raises `ArgumentError` if the tokenizer fails, `RequestError` if no prompt can be served with them.
        """
        words, rules = tuple(dict.fromkeys(params.bad_words or ())), self._rules
        rules.check_count("bad_words", len(words), "max_bad_words")  # before tokenizing each
        bad_words = self._spellings(words) if words else []
        named: dict[str, Any] = {
            name: tuple(dict.fromkeys(ids))  # each request holds a copy
            for name in ("stop_token_ids", "allowed_token_ids")
            if (ids := getattr(params, name)) is not None
        }
        params = params.unchecked(bad_words=None, structured_outputs=None, **named)
        per_output = params.unchecked(n=1, stop=None, stop_strings=(), truncate_prompt_tokens=None)
        if params.thinking_token_budget is not None and self._reasoning is None:
            per_output = per_output.unchecked(thinking_token_budget=None)
        is_constrained = is_structured or per_output.thinking_token_budget is not None
        rules.check_sampling(per_output, bad_words, is_structured=is_constrained)
        return TokenizedParams(params, per_output, bad_words)

    def tokenized_prompt(
        self, prompt: str | list[int], token_ids: list[int], params: TokenizedParams, *, begins_message: bool = False
    ) -> TokenizedPrompt:
        """Truncate a tokenized prompt by its parameters; raises `RequestError` if it can never be served."""
        if isinstance(prompt, str) and not token_ids:
            raise RequestError("the prompt is empty, and the model has no beginning-of-sequence token to start from")
        tokenized = self._truncated(prompt, token_ids, params)
        self._rules.check_prompt(tokenized.token_ids, params.most_generated)
        return tokenized._replace(begins_message=begins_message)

    def parent_request(self, tokenized: TokenizedPrompt, grammar: str | None, start_tag: float = 0.0) -> ParentRequest:
        """Return the requests of a prompt, which may have been tokenized in another process.

        `grammar`: None: unconstrained; `start_tag`: see `Request`.
        """
        params, per_output, bad_words, priority, adapter, salt, _, pools, scores = tokenized.params
        reasoning = None
        if self._reasoning is not None and (grammar is not None or per_output.thinking_token_budget is not None):
            text = tokenized.prompt
            if text is None:
                text = self._tokenizer.backend_tokenizer.decode(tokenized.token_ids, skip_special_tokens=False)
            reasoning = self._reasoning.markers(text, begins_message=tokenized.begins_message)
        outputs = [CompletionOutput(index) for index in range(params.n)]
        times = RequestMetrics(time.perf_counter())
        output = RequestOutput(next(self._numbers), tokenized.prompt, tokenized.token_ids, outputs, times)
        seed = derived_seed(self._seed, int(output.request_id)) if params.seed is None else params.seed
        children: list[tuple[Request, RequestState]] = []
        for completion in output.outputs:
            index = completion.index
            scored = params.prompt_logprobs if index == 0 else None  # computed once
            child_params = per_output.unchecked(seed=as_int64(seed + index), prompt_logprobs=scored)
            request = Request(
                tokenized.token_ids,
                child_params,
                bad_words,
                grammar,
                priority,
                start_tag,
                adapter,
                salt,
                is_checked=True,
                pools=pools,
                scores=scores,
                reasoning=reasoning,
            )
            children.append((request, RequestState(completion, output, params, self.texts)))
        return ParentRequest(output, children)

    @cached_property
    def _reasoning(self) -> PromptReasoning | None:
        return reasoning_of(self._tokenizer, self._reasoning_parser)

    def special_tokens(self, markers: Collection[str]) -> dict[str, int]:
        """Return the special tokens within some markers, by their text."""
        return _within(markers, {} if self.texts is None else self.texts.special)

    def marks(self, markers: Collection[str]) -> dict[str, int]:
        """Return the tokens within some markers that grammars must name by their ids, by their text."""
        return _within(markers, {} if self.texts is None else self.texts.marks)

    @cached_property
    def texts(self) -> TokenTexts | None:
        """The texts of single tokens; None without a tokenizer."""
        return None if self._tokenizer is None else TokenTexts(self._tokenizer.backend_tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler of structured outputs."""
        return Grammars(self._tokenizer.backend_tokenizer, self._rules.vocab_size, self._rules.eos_token_ids)

    def _truncated(self, prompt: str | list[int], token_ids: list[int], params: TokenizedParams) -> TokenizedPrompt:
        """Return the last tokens of a prompt, or the first; a text keeps its beginning-of-sequence token."""
        text, most = prompt if isinstance(prompt, str) else None, params.sampling.truncate_prompt_tokens
        if most == -1:
            limit, room = self._rules.capacity.token_limit, params.most_generated
            most = max(limit - (room if room is not None and room < limit else 1), 1)
        if most is not None and len(token_ids) > most and params.truncation_side == "right":
            ending = self._ending(token_ids) if params.pools and text is not None else []
            token_ids = token_ids[: most - len(ending)] + ending if most > len(ending) else token_ids[-most:]
        elif most is not None and len(token_ids) > most:
            first = token_ids[:1] if text is not None and token_ids[0] == self._tokenizer.bos_token_id else []
            token_ids = first + token_ids[len(token_ids) - most + len(first) :]
        return TokenizedPrompt(text, token_ids, params)

    def _ending(self, token_ids: list[int]) -> list[int]:
        """Return the special tokens that the tokenizer has appended, whose hidden states stand for the text."""
        special = self.encode("")
        ending = special[1:] if special[:1] == [self._tokenizer.bos_token_id] else special
        return ending if ending and token_ids[-len(ending) :] == ending else []

    def _spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Return the tokens of words at the beginning of a text, and after a space if those differ."""
        unspaced = self._encoded([word.lstrip() for word in words], "bad_words", special=False)
        spaced = self._encoded([f" {word.lstrip()}" for word in words], "bad_words", special=False)
        spellings = []
        for first, other in zip(unspaced, spaced, strict=True):
            spellings += [first] if other[-len(first) :] == first else [first, other]
        return spellings

    def _encoded(self, texts: Sequence[str], name: str, *, special: bool) -> list[list[int]]:
        try:
            with self._encoding:
                return list(self._tokenizer(list(texts), verbose=False, add_special_tokens=special).input_ids)
        except BaseException as error:
            if not is_tokenizer_error(error):
                raise
            wrong = shown(texts[0] if len(texts) == 1 else list(texts))
            raise ArgumentError(
                f"the tokenizer cannot encode {name} {wrong}: {type(error).__name__}: {error}"
            ) from error


def _within(markers: Collection[str], tokens: Mapping[int, str]) -> dict[str, int]:
    """Return those of some tokens that are a part of a marker, by their text."""
    return {text: token for token, text in tokens.items() if text and any(text in each for each in markers)}
