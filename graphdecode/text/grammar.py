"""Structured outputs, compiled by llguidance to masks of the allowed next tokens."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from graphdecode.config.sampling_params import StructuredOutputsParams
from graphdecode.engine.constraint import Constraint, ConstraintError, TokenAutomaton, allow, forbid
from graphdecode.errors import ArgumentError, shown
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS
from graphdecode.text.automata import AutomatonConstraint, TokenAutomata

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_COMPILED = 64  # compiled grammars: clients repeat the same few
MAX_GRAMMAR_LENGTH = 1 << 20  # characters
_MOST_ALTERNATIVES = 1000  # llguidance follows 2000 items of a grammar at a time
_WORTH_THREADS_BYTES = 1024  # size of one mask
# llguidance stores the numbers of schemas as doubles, and rounds others
_LARGEST = 2**53 - 1  # beyond it, two integers may be one double
_DIGITS = sys.float_info.dig  # of any decimal that a double holds
_LARGEST_INT64 = 2**63 - 1  # `maximum` of generated schemas, which llguidance enforces
_ANNOTATIONS = ("default", "examples", "example")  # are not enforced
_NAMING = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # names of schemas
_VALUES = ("const", "enum")
_IN_GRAMMAR = re.compile(r"%json\s*(?=[{\[])")
_REASONS = {"NoExtensionBias": "no text matches it"}  # llguidance's reasons, in words


def is_available() -> bool:
    """Return whether llguidance is installed."""
    return find_spec("llguidance") is not None


class Grammars:
    """Compiles structured outputs to constraints for one vocabulary; thread-safe.

    `tokenizer` is a `tokenizers.Tokenizer`, or its `to_str()`.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._validated = lru_cache(_MAX_COMPILED)(self._validate)
        self._compiled = lru_cache(_MAX_COMPILED)(self.compiled)

    def load(self) -> LLTokenizer:
        """Return the vocabulary, loaded at the first call, which may take a second.

        Raises `ArgumentError` if llguidance is not installed, or cannot read this tokenizer.
        """
        if not is_available():
            raise ArgumentError("structured_outputs: needs llguidance: pip install 'graphdecode[structured]'")
        from llguidance import LLTokenizer

        with self._loading:
            if self._vocabulary is None:
                source = self._source if isinstance(self._source, str) else self._source.to_str()
                eos = list(self._eos_token_ids)
                try:
                    vocabulary = LLTokenizer(source, n_vocab=self._vocab_size, eos_token=eos or None)
                    if not eos:  # llguidance needs one: take a special token
                        special = filter(vocabulary.is_special_token, range(self._vocab_size))
                        eos = [next(special, vocabulary.eos_token)]
                        vocabulary = LLTokenizer(source, n_vocab=self._vocab_size, eos_token=eos)
                    self._vocabulary = vocabulary
                except ValueError as error:
                    raise ArgumentError(f"structured_outputs: this tokenizer cannot be used: {error}") from error
            return self._vocabulary

    def grammar(self, params: StructuredOutputsParams) -> str:
        """Return the text of a structured output's grammar; raises `ArgumentError` if it cannot be enforced."""
        self.load()
        try:
            if params.kind == "grammar":
                _check_numbers_in_grammar(str(params.grammar))
            else:
                _check_numbers(params.schema)
        except ArgumentError as error:
            raise ArgumentError(f"structured_outputs: {params.kind} cannot be enforced: {error}") from error
        with _as_argument_errors(params.kind):
            grammar = _grammar_text(params)
            grammar.encode()  # fails at surrogates
        if len(grammar) > MAX_GRAMMAR_LENGTH:
            raise ArgumentError(
                f"structured_outputs: {params.kind} must have at most {MAX_GRAMMAR_LENGTH} characters, "
                f"got {len(grammar)}"
            )
        self._validated(grammar, params.kind)
        return grammar

    def _validate(self, grammar: str, kind: str) -> None:
        from llguidance import LLMatcher

        with _as_argument_errors(kind):
            is_wrong, warnings = LLMatcher.validate_grammar_with_warnings(grammar, self.load())
        if is_wrong:
            reason = warnings[0].strip().replace("Unimplemented keys", "keywords that are not supported")
            raise ArgumentError(f"structured_outputs: {kind} cannot be enforced: {reason}")

    def constraint(self, grammar: str) -> Constraint:
        """Return a new constraint for a grammar; raises `ConstraintError` if it cannot be compiled."""
        try:
            return self.new_constraint(self._compiled(grammar))
        except ArgumentError as error:
            raise ConstraintError(str(error)) from error

    def warm(self) -> None:
        """Compute what all grammars share; raises as `load`."""
        self._automata.warm()

    def compiled(self, grammar: str) -> LLMatcher | TokenAutomaton:
        """Compile a grammar to a matcher, or to an automaton, which is picklable.

        Raises `ArgumentError` or `ConstraintError` if it cannot be read, or no text matches it.
        """
        from llguidance import LLMatcher, LLParserLimits

        vocabulary = self.load()
        with _as_argument_errors("grammar"):
            # errors go to clients and logs, and must not contain the grammar's text and state
            matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first one is the slowest, and copies share it
            if matcher.is_error():
                raise ConstraintError(f"the grammar cannot be read: {_reason(matcher)}")
            return self._automata.of(grammar, matcher) or matcher

    def new_constraint(self, compiled: LLMatcher | TokenAutomaton) -> Constraint:
        """Return a new constraint over what `compiled` returned."""
        if isinstance(compiled, TokenAutomaton):
            return AutomatonConstraint(compiled, self._eos_token_ids)
        never = () if self._eos_token_ids else (self.load().eos_token,)
        return GrammarConstraint(compiled.deep_copy(), self._masks, self._eos_token_ids, never)

    @cached_property
    def _masks(self) -> _MaskBatch:
        return _MaskBatch(self._vocab_size)

    @cached_property
    def _automata(self) -> TokenAutomata:
        return TokenAutomata(self.load(), self._vocab_size, self._eos_token_ids)


@contextmanager
def _as_argument_errors(kind: str) -> Iterator[None]:
    """Raise llguidance's errors and panics as `ArgumentError`; a panic is not an `Exception`."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"structured_outputs: {kind} cannot be read: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ArgumentError(f"structured_outputs: {kind} cannot be read") from error


def _grammar_text(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher, grammar_from

    if params.kind in ("json", "json_object"):
        schema = {"type": "object"} if params.json is None else params.schema
        if params.disable_additional_properties:
            schema = _closed(schema)
        options: Any = {  # they override a schema's own `x-guidance`
            "whitespace_flexible": not params.disable_any_whitespace,
            "whitespace_pattern": params.whitespace_pattern,
            "lenient": False,
            "coerce_one_of": False,
        }
        return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=options)
    if params.kind == "regex":
        return LLMatcher.grammar_from_regex(str(params.regex))
    if params.kind == "choice":
        alternatives = grammar_from("choice", json.dumps(list(params.choice or ())))
        if len(params.choice or ()) <= _MOST_ALTERNATIVES:
            return alternatives
        return alternatives.replace("start:", "start: CHOICE\nCHOICE:", 1)  # one lexeme, which has no such limit
    return grammar_from("grammar", str(params.grammar))


class _MaskBatch:
    """Computes the masks of several outputs in one call, on several threads, without the GIL."""

    def __init__(self, vocab_size: int) -> None:
        from llguidance import LLExecutor

        self._executor = LLExecutor()
        self.num_words = -(-vocab_size // MASK_BITS)
        self._words = np.zeros((1, self.num_words), dtype=np.int32)

    def fill(self, matchers: Sequence[LLMatcher]) -> np.ndarray:
        """Return int32 [matchers, words], valid until the next call."""
        if len(matchers) > len(self._words):
            self._words = np.zeros((len(matchers), self.num_words), dtype=np.int32)
        address, size_bytes = self._words.ctypes.data, self.num_words * self._words.itemsize
        if size_bytes < _WORTH_THREADS_BYTES:  # faster than waking threads
            for row, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(address + row * size_bytes, size_bytes)
        else:
            jobs = [(matcher, row) for row, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(jobs, address, size_bytes, len(self._words))
        return self._words


class GrammarConstraint(Constraint):
    """Constrains one output to a grammar; see `graphdecode.engine.constraint.Constraint`.

    `never` are tokens that the matcher allows where the output may end, but that do not end the model's outputs.
    """

    def __init__(
        self, matcher: LLMatcher, masks: _MaskBatch, eos_token_ids: Sequence[int], never: Sequence[int] = ()
    ) -> None:
        self._matcher = matcher
        self._masks = masks
        self.num_words = masks.num_words
        self._eos_token_ids = eos_token_ids
        self._never = never

    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Write the mask of the next token; see `Constraint.fill`."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._end(words, stop_ids)

    @classmethod
    def fill_all(
        cls, constraints: Sequence[Self], stop_ids: Sequence[Sequence[int]]
    ) -> list[np.ndarray | ConstraintError]:
        """Return for several outputs what `fill` writes, or its error; see `Constraint.fill_all`."""
        masks: list[np.ndarray | ConstraintError] = []
        words = constraints[0]._masks.fill([constraint._matcher for constraint in constraints])
        for mask, constraint, stops in zip(words, constraints, stop_ids, strict=False):
            masks.append(mask)
            try:
                constraint._end(mask, stops)
            except ConstraintError as error:
                masks[-1] = error
        return masks

    def _end(self, mask: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Allow the stop ids where the output may end; raise the matcher's error."""
        if self._matcher.is_error():
            raise _failure(self._matcher)
        forbid(mask, self._never)
        # the matcher allows its end-of-sequence tokens, and no other stop ids
        if stop_ids != self._eos_token_ids and self._matcher.is_accepting():
            allow(mask, stop_ids)

    def accept(self, token_id: int) -> bool:
        """Take the next token; see `Constraint.accept`."""
        if not self._matcher.consume_token(token_id):
            raise _failure(self._matcher)
        return self._matcher.is_stopped()


def _failure(matcher: LLMatcher) -> ConstraintError:
    return ConstraintError(f"its grammar cannot be followed further: {_reason(matcher)}")


def _reason(matcher: LLMatcher) -> str:
    reason = matcher.get_error().removesuffix("<non-verbose/>").partition(";")[0].strip()
    return _REASONS.get(reason, reason)


def _closed(schema: Any) -> Any:
    """Return a schema whose objects allow only the properties that they list."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _check_numbers(schema: Any) -> None:
    """Raise `ArgumentError` if a number of a schema cannot be enforced as it is."""
    waiting: list[tuple[Any, str, str]] = [(schema, "", "schema")]  # value, its JSON path, and its kind
    while waiting:
        value, path, kind = waiting.pop()
        if isinstance(value, dict):
            for name, each in value.items():
                if kind == "schema" and name in _ANNOTATIONS:
                    continue
                inner = {"names": "schema", "values": "values"}.get(kind)
                if inner is None:
                    inner = "names" if name in _NAMING else "values" if name in _VALUES else "schema"
                waiting.append((each, f"{path}.{name}" if path else str(name), inner))
        elif isinstance(value, list):
            waiting += [(each, f"{path}[{index}]", kind) for index, each in enumerate(value)]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            is_bound = kind == "schema" and path.rpartition(".")[2] == "maximum"
            if not (_is_exact(value) or (is_bound and type(value) is int and value == _LARGEST_INT64)):
                raise ArgumentError(
                    f"{path} must be an integer in -{_LARGEST}..{_LARGEST} (2**53 - 1), or a number of at most "
                    f"{_DIGITS} digits, got {shown(value)}: another would be rounded"
                )


def _is_exact(number: float) -> bool:
    if not -_LARGEST <= number <= _LARGEST:  # NaN, too
        return False
    return isinstance(number, int) or len(Decimal(repr(number)).normalize().as_tuple().digits) <= _DIGITS


def _check_numbers_in_grammar(grammar: str) -> None:
    """Raise `ArgumentError` as `_check_numbers` for the schemas in a Lark grammar."""
    decoder = json.JSONDecoder()
    for match in _IN_GRAMMAR.finditer(grammar):
        try:
            schema, _ = decoder.raw_decode(grammar, match.end())
        except (ValueError, RecursionError):  # llguidance will say so
            continue
        _check_numbers(schema)
