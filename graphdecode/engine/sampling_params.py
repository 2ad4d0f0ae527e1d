"""What a request asks of sampling and of stopping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from graphdecode.config.vllm_names import SAMPLING_PARAMS, refusing
from graphdecode.engine.structured_outputs import StructuredOutputsParams
from graphdecode.errors import ArgumentError, shown

# What one request may ask of the host: each answer is a request of its own, and each stop text is looked for at every
# token. Far above what people ask for, and far below what others would feel.
MAX_ANSWERS = 1024
MAX_STOP_STRINGS = 256
MAX_STOP_LENGTH = 256  # characters of a stop text

_LARGEST = 1e30  # well inside float32, which slots hold
_SWITCHES = (
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "detokenize",
)


def _is_number(value: Any) -> bool:
    # an integer may be too large to become a float
    return isinstance(value, Real) and not isinstance(value, bool) and bool(abs(value) <= _LARGEST)  # type: ignore[operator]


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_listed(value: Any) -> bool:
    # a tensor or an array is a collection too, but none that could be asked whether it is empty
    return value is None or (isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray))


@refusing(SAMPLING_PARAMS)
@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request; the names and defaults are vLLM's.

    What vLLM has beyond these is refused with what to do instead, unless its value asks for nothing.

    Args:
        n: how many independent answers to give, at most 1024; they share the pages of their prompt.
        temperature: 0 means greedy; else the logits are divided by it.
        top_k: sample among the k most likely tokens; 0 or -1 means all.
        top_p: sample among the most likely tokens that together hold this much probability; in (0, 1].
        min_p: sample among the tokens at least this likely, relative to the most likely one; in [0, 1].
        seed: makes the answer reproducible, whatever else runs beside it; None takes one from the engine's seed and
            the order of requests. The i-th of `n` answers, from 0, has the seed `seed + i`: it is the answer that
            `n=1` gives with that seed.
        repetition_penalty: divides positive and multiplies negative logits of tokens that occurred; 1 is off.
        presence_penalty: subtracted from the logits of tokens that were generated; in [-2, 2].
        frequency_penalty: subtracted once for each time that a token was generated; in [-2, 2].
        logit_bias: token id -> value added to its logit; as many as the engine's `max_logit_biases`.
        allowed_token_ids: no other tokens are generated; at least one.
        bad_words: texts that the answer must not contain: the last token of one, as it is written with and without a
            space before it, is not generated behind the others. What spells it in other tokens is not found.
        structured_outputs: the form of the answer, which ends with "stop" as soon as nothing can follow; it counts for
            more than `min_tokens` and `ignore_eos`. One that `max_tokens` cuts ends with "length", and is not complete.
        stop: text that ends the answer, which is cut before it; at most 256 texts of at most 256 characters.
        stop_token_ids: tokens that end the answer; they stay in `token_ids` and out of the text.
        ignore_eos: go on after the model's end-of-sequence token.
        max_tokens: how many tokens to generate at most; the engine's capacity is a limit as well, and the only one
            with None. 0 is for `prompt_logprobs` with `n=1`: the prompt is scored, and nothing generated.
        min_tokens: until this many tokens are there, end-of-sequence and stop tokens are masked, and stop texts that
            come up do not stop.
        logprobs: return the log-probabilities of this many most likely tokens, and of the sampled one; at most the
            engine's `max_logprobs`, and -1 is all of the vocabulary.
        prompt_logprobs: return the log-probabilities of this many most likely tokens at each place of the prompt, and
            of the token that stands there. Such a prompt is computed whole, whatever the prefix cache holds of it.
        truncate_prompt_tokens: keep the last tokens of a longer prompt, so many; -1 keeps as many as leave room for
            `max_tokens`, or for one token where that is None or fits in no case. The beginning-of-sequence token that
            a tokenizer puts in front of a text stays there.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: where special tokens stay, write those that follow one another as the tokenizer
            does, which may be with spaces; False writes them side by side.
        include_stop_str_in_output: let the text end with what stopped it, a stop text or a token.
        detokenize: make text of the tokens; without, there can be no stop texts.

    Raises:
        ValueError: a value outside its range, with the name, the value and the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check("n", _is_integer(self.n) and 1 <= self.n <= MAX_ANSWERS, f"an integer in 1..{MAX_ANSWERS}")
        self._check("temperature", _is_number(self.temperature) and self.temperature >= 0, "a number >= 0")
        self._check("top_k", _is_integer(self.top_k) and -1 <= self.top_k < 2**31, "an integer >= -1")
        self._check("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]")
        self._check("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]")
        self._check(
            "seed",
            self.seed is None or (_is_integer(self.seed) and -(2**63) <= self.seed < 2**63),
            "None or a 64-bit integer",
        )
        self._check(
            "repetition_penalty",
            _is_number(self.repetition_penalty) and 1e-3 <= self.repetition_penalty <= 1e3,
            "a number in [0.001, 1000]",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            self._check(name, _is_number(value) and -2 <= value <= 2, "a number in [-2, 2]")
        self._check_lengths()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._check(name, value is None or (_is_integer(value) and value >= -1), "None or an integer >= -1")
        for name in _SWITCHES:
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        form = self.structured_outputs
        self._check(
            "structured_outputs",
            form is None or isinstance(form, StructuredOutputsParams),
            "None or a StructuredOutputsParams",
        )
        self._check_tokens()
        object.__setattr__(self, "stop_strings", self._checked_stop())

    def _checked_stop(self) -> tuple[str, ...]:
        self._check("stop", isinstance(self.stop, str) or _is_listed(self.stop), "text, or a list of texts")
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        self._check("stop", len(strings) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} texts")
        self._check(
            "stop", all(isinstance(s, str) and s for s in strings), "text, or a list of texts, none of them empty"
        )
        longest = max(map(len, strings), default=0)
        self._check("stop", longest <= MAX_STOP_LENGTH, f"of at most {MAX_STOP_LENGTH} characters, not {longest}")
        self._check(
            "stop", self.detokenize or not strings, "None where detokenize is False: without text none is found"
        )
        return strings

    def _check_lengths(self) -> None:
        limit, kept = self.max_tokens, self.truncate_prompt_tokens
        scores_alone = self.prompt_logprobs is not None and self.n == 1
        self._check(
            "max_tokens",
            limit is None or (_is_integer(limit) and limit >= (0 if scores_alone else 1)),
            "None or an integer >= 0" if scores_alone else "None or an integer >= 1 (0 with prompt_logprobs and n=1)",
        )
        self._check(
            "min_tokens",
            _is_integer(self.min_tokens) and self.min_tokens >= 0 and (limit is None or self.min_tokens <= limit),
            "an integer >= 0" if limit is None else f"an integer in 0..max_tokens={shown(limit)}",
        )
        self._check(
            "truncate_prompt_tokens",
            kept is None or (_is_integer(kept) and (kept == -1 or kept >= 1)),
            "None, -1 or an integer >= 1",
        )

    def _check_tokens(self) -> None:
        bias = {} if self.logit_bias is None else self.logit_bias
        self._check(
            "logit_bias",
            isinstance(bias, Mapping) and all(_is_integer(k) and k >= 0 and _is_number(v) for k, v in bias.items()),
            "a dict of token ids >= 0 with finite values",
        )
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            self._check(
                name,
                _is_listed(ids) and all(_is_integer(token) and token >= 0 for token in ids or ()),
                "a list of token ids >= 0",
            )
        allowed = self.allowed_token_ids
        self._check("allowed_token_ids", allowed is None or len(allowed) > 0, "None or a list of at least one token id")
        words = self.bad_words
        self._check(
            "bad_words",
            _is_listed(words) and all(isinstance(word, str) and word.strip() for word in words or ()),
            "a list of texts, none of them empty",
        )

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise ArgumentError(f"{name} must be {expected}, got {shown(getattr(self, name))}")
