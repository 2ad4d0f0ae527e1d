"""Sampling parameters of a request, its stop conditions and its structured output."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from copy import copy
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

from graphdecode.config.key import (
    BOOLEAN,
    FRACTION,
    LONG_INTEGER,
    Option,
    Values,
    integer,
    is_integer,
    is_number,
    none_or,
    number,
    texts,
)
from graphdecode.config.vllm_names import SAMPLING_PARAMS, refusing
from graphdecode.errors import ArgumentError, shown

# each of the `n` outputs is a request, and each stop text is searched for at every token
MAX_OUTPUTS = 1024
MAX_STOP_STRINGS = 256
MAX_STOP_LENGTH = 256  # characters of a stop text

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_MAX_CHOICES = 10_000
_CHECKPOINTS = "Left out: the checkpoint's."


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Structured output: only tokens that follow it are sampled; names and meanings are vLLM's.

    Exactly one of the first five is given.

    Args:
        json: a JSON Schema, as a dict or as text, that the output matches, with properties in the schema's order.
        regex: a regular expression that the whole output matches.
        choice: texts, one of which the output is.
        grammar: a grammar of the output, in Lark's or GBNF's notation.
        json_object: True: the output is any JSON object.
        structural_tag: not supported.
        disable_any_whitespace: no whitespace between the parts of JSON.
        disable_additional_properties: no properties that the schema does not list, unless it allows them.
        whitespace_pattern: a regular expression of the whitespace between the parts of JSON; None: any.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            names, chosen = ", ".join(_KINDS[:-1]), " and ".join(kinds) or None
            raise ArgumentError(f"structured_outputs must have exactly one of {names}, got {chosen}")
        if self.structural_tag is not None:
            raise ArgumentError("structured_outputs: structural_tag is not supported; a grammar can say the same")
        for name, values in _STRUCTURED.items():
            self._check(name, values.accepts(getattr(self, name)), values.expected)
        self._check("json", self.json is None or isinstance(self.schema, Mapping), "a JSON Schema that is an object")

    @property
    def kind(self) -> str:
        """The field that is set: `json`, `regex`, `choice`, `grammar` or `json_object`."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @property
    def schema(self) -> Any:
        """The JSON Schema, parsed if it is a text; None if that is not JSON."""
        if not isinstance(self.json, str):
            return self.json
        try:
            return json.loads(self.json)
        except (ValueError, RecursionError):
            return None

    def _check(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise ArgumentError(f"structured_outputs: {name} must be {expected}, got {shown(getattr(self, name))}")


def _is_listed(value: Any) -> bool:
    # tensors and arrays are not sequences here: `bool` of them raises
    return value is None or (isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray))


def _are_ids(value: Any) -> bool:
    return _is_listed(value) and all(is_integer(token, 0) for token in value or ())


def _are_texts(value: Any) -> bool:
    return _is_listed(value) and all(isinstance(text, str) and text.strip() for text in value or ())


_TEXT = Values("a text that is not empty", lambda text: text is None or (isinstance(text, str) and text != ""))
_STRUCTURED = {
    **dict.fromkeys(("regex", "grammar", "whitespace_pattern"), _TEXT),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), BOOLEAN),
    "json_object": Values("True or None", lambda value: value in (None, True, False)),
    "choice": Values(
        f"a list of 1..{_MAX_CHOICES} texts, none of them empty",
        lambda value: value is None or (texts().accepts(value) and 0 < len(value) <= _MAX_CHOICES),
    ),
}
_PENALTY = number(-2, 2)
_COUNT = none_or(integer(-1))
_IDS = Values("a list of token ids >= 0", _are_ids)
_SWITCH = BOOLEAN


def _param(default: Any, values: Values | None = None, help: str = "", *flags: str, metavar: str | None = None) -> Any:
    """Return a field of `SamplingParams`, with the values that it accepts, and its command-line option."""
    return field(default=default, metadata={"values": values, "option": Option(help, flags, metavar) if help else None})


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request; the names and defaults are vLLM's.

    vLLM's other parameters are refused with advice, unless their value has no effect.

    Args:
        n: number of independent outputs, at most 1024; they share the pages of their prompt.
        temperature: 0 means greedy; else the logits are divided by it.
        top_k: sample among the k most likely tokens; 0 or -1 means all.
        top_p: sample among the most likely tokens that together hold this much probability; in (0, 1].
        min_p: sample among the tokens at least this likely, relative to the most likely one; in [0, 1].
        seed: makes the output reproducible, whatever the batch; None: from the engine's seed and the order of requests.
            Output i of `n`, from 0, is that of `n=1` with the seed `seed + i`. -1 is None, as in vLLM.
        repetition_penalty: divides positive and multiplies negative logits of tokens that occurred; 1 is off.
        presence_penalty: subtracted from the logits of generated tokens; in [-2, 2].
        frequency_penalty: subtracted once per occurrence of a generated token; in [-2, 2].
        logit_bias: token id -> value added to its logit; at most the engine's `max_logit_biases` entries.
        allowed_token_ids: only these tokens are generated; at least one.
        bad_words: texts that the output must not contain: the last token of each, tokenized with and without a space
            before it, is masked after the others. Other tokenizations of the text are not found.
        structured_outputs: a grammar or schema that the output follows. It ends with "stop" when nothing can follow,
            and takes precedence over `min_tokens` and `ignore_eos`. If `max_tokens` cuts it, it ends with "length".
        stop: texts that end the output, which is cut before them; at most 256 texts of at most 256 characters.
        stop_token_ids: tokens that end the output; they are in `token_ids`, and not in the text.
        ignore_eos: go on after the model's end-of-sequence token.
        max_tokens: generated tokens at most; None: as many as the engine's capacity allows.
            0 is for `prompt_logprobs` with `n=1`: the prompt is scored, and nothing is generated.
        min_tokens: until this many tokens, stop tokens and end-of-sequence tokens are masked, with `ignore_eos` too,
            and stop texts do not stop.
        thinking_token_budget: tokens of the reasoning that an output begins with, after which it is closed by the
            model's own marker, if the chat template has one; None and -1: as many as the model writes.
        logprobs: return the log-probabilities of this many most likely tokens, and of the sampled one; at most the
            engine's `max_logprobs`; -1 means the whole vocabulary.
        prompt_logprobs: the same for each position of the prompt, and the prompt's token there. The whole prompt is
            computed, without the prefix cache.
        truncate_prompt_tokens: keep this many of the last tokens of the prompt; -1: as many as leave room for
            `max_tokens`, or for one token if that is None or never fits. The beginning-of-sequence token that the
            tokenizer adds to a text is kept.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: write adjacent special tokens as the tokenizer does, perhaps with spaces; False:
            without spaces.
        include_stop_str_in_output: keep the stop text, or the text of the stop token, at the end of the text.
        detokenize: return text; without it, stop texts are not possible.

    Raises:
        ValueError: a value outside its range, with the name, the value and the range.
    """

    n: int = _param(1, integer(1, MAX_OUTPUTS), "Outputs per prompt.", "-n", "--n")
    temperature: float = _param(
        1.0, Values("a number >= 0 and at most 1e+30", number(0).accepts), f"0 is greedy. {_CHECKPOINTS}"
    )
    top_k: int = _param(0, integer(-1), f"Sample among the k most likely tokens; 0 is all. {_CHECKPOINTS}")
    top_p: float = _param(
        1.0, FRACTION, f"Sample among the most likely tokens of this total probability. {_CHECKPOINTS}"
    )
    min_p: float = _param(0.0, number(0, 1), f"Smallest probability, relative to the most likely token. {_CHECKPOINTS}")
    seed: int | None = _param(
        None,
        none_or(Values("a 64-bit integer", LONG_INTEGER.accepts)),
        "Seed of sampling; left out: the configuration's.",
    )
    repetition_penalty: float = _param(
        1.0, number(1e-3, 1e3), f"Divides logits of tokens that occurred; 1 is off. {_CHECKPOINTS}"
    )
    presence_penalty: float = _param(0.0, _PENALTY, "Subtracted from the logits of generated tokens.")
    frequency_penalty: float = _param(0.0, _PENALTY, "The same, once per occurrence.")
    logit_bias: Mapping[int, float] | None = _param(
        None,
        Values(
            "a dict of token ids >= 0 with finite values",
            lambda bias: (
                bias is None
                or (isinstance(bias, Mapping) and _are_ids(list(bias)) and all(map(is_number, bias.values())))
            ),
        ),
        "Added to a token's logit; may be repeated.",
        metavar="ID=VALUE",
    )
    allowed_token_ids: Sequence[int] | None = _param(
        None, _IDS, "Only these tokens are generated; may be repeated.", "--allowed-token-id"
    )
    bad_words: Sequence[str] | None = _param(
        None,
        Values("a list of texts, none of them empty", _are_texts),
        "Text that is not generated; may be repeated.",
        "--bad-word",
    )
    structured_outputs: StructuredOutputsParams | None = _param(
        None, none_or(Values("a StructuredOutputsParams", lambda value: isinstance(value, StructuredOutputsParams)))
    )
    stop: str | Sequence[str] | None = _param(
        None,
        Values("text, or a list of texts", lambda stop: isinstance(stop, str) or _is_listed(stop)),
        "Text that ends an output; may be repeated.",
    )
    stop_token_ids: Sequence[int] | None = _param(
        None, _IDS, "Token that ends an output; may be repeated.", "--stop-token-id"
    )
    ignore_eos: bool = _param(False, _SWITCH, "Go on after the end-of-sequence token.")
    max_tokens: int | None = _param(16)
    min_tokens: int = _param(0, None, "Tokens before which nothing ends an output.")
    thinking_token_budget: int | None = _param(
        None, none_or(integer(-1)), "Tokens of reasoning, after which the model's own marker closes it."
    )
    logprobs: int | None = _param(None, _COUNT, "Most likely tokens to return at each position; with --json.")
    prompt_logprobs: int | None = _param(None, _COUNT, "As --logprobs, at each position of the prompt.")
    truncate_prompt_tokens: int | None = _param(
        None,
        Values("None, -1 or an integer >= 1", lambda value: value is None or (is_integer(value, -1) and value != 0)),
        "Number of the prompt's last tokens to keep; -1: as many as leave room.",
    )
    skip_special_tokens: bool = _param(True, _SWITCH, "Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = _param(True, _SWITCH)
    include_stop_str_in_output: bool = _param(False, _SWITCH, "Keep what stopped the text at its end.")
    detokenize: bool = _param(True, _SWITCH)
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, values in _VALUES.items():
            self._check(name, values.accepts(getattr(self, name)), values.expected)
        limit = self.max_tokens
        scores_alone = self.prompt_logprobs is not None and self.n == 1
        self._check(
            "max_tokens",
            limit is None or is_integer(limit, 0 if scores_alone else 1),
            "None or an integer >= 0" if scores_alone else "None or an integer >= 1 (0 with prompt_logprobs and n=1)",
        )
        self._check(
            "min_tokens",
            is_integer(self.min_tokens, 0, math.inf if limit is None else limit),
            "an integer >= 0" if limit is None else f"an integer in 0..max_tokens={shown(limit)}",
        )
        allowed = self.allowed_token_ids
        self._check("allowed_token_ids", allowed is None or len(allowed) > 0, "None or a list of at least one token id")
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        self._check("stop", len(strings) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} texts")
        are_texts = all(isinstance(text, str) and text for text in strings)
        self._check("stop", are_texts, "text, or a list of texts, none of them empty")
        longest = max(map(len, strings), default=0)
        self._check("stop", longest <= MAX_STOP_LENGTH, f"of at most {MAX_STOP_LENGTH} characters, not {longest}")
        has_text = self.detokenize or not strings
        self._check("stop", has_text, "None if detokenize is False")
        object.__setattr__(self, "stop_strings", strings)
        for name in ("seed", "thinking_token_budget"):
            if getattr(self, name) == -1:
                object.__setattr__(self, name, None)

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed, and checked: these parameters are frozen, for requests share them."""
        return replace(self, **changes)

    def clone(self) -> SamplingParams:
        """Return a copy, as vLLM's method of this name."""
        return copy(self)

    def unchecked(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed to valid values; checking again would read all token ids."""
        changed = copy(self)
        for name, value in changes.items():
            object.__setattr__(changed, name, value)
        return changed

    def _check(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise ArgumentError(f"{name} must be {expected}, got {shown(getattr(self, name))}")


def _refuse_assignment(self: Any, name: str, value: Any) -> None:
    kind = type(self).__name__
    instead = (
        f"params.replace({name}=...)" if isinstance(self, SamplingParams) else f"dataclasses.replace(it, {name}=...)"
    )
    raise FrozenInstanceError(f"cannot assign to {name!r}: {kind} is frozen; {instead} returns a changed copy")


for _frozen in (SamplingParams, StructuredOutputsParams):
    _frozen.__setattr__ = _refuse_assignment  # type: ignore[method-assign, assignment]
SamplingParams.__init__ = refusing(SAMPLING_PARAMS)(SamplingParams.__init__)  # type: ignore[method-assign]
_VALUES: dict[str, Values] = {
    each.name: each.metadata["values"] for each in fields(SamplingParams) if each.metadata.get("values") is not None
}
