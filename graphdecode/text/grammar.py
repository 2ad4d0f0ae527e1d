"""Structured outputs compiled to masks of the tokens that may come next, by llguidance."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from graphdecode.config.sampling_params import StructuredOutputsParams
from graphdecode.engine.constraint import Constraint, ConstraintError, TokenAutomaton, allow, forbid
from graphdecode.errors import ArgumentError
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS
from graphdecode.text.automata import AutomatonConstraint, TokenAutomata

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 64  # grammars that stay compiled: clients ask for the same few again and again
MAX_GRAMMAR_LENGTH = 1 << 20  # characters
_WORTH_THREADS_BYTES = 1024  # of one mask
_PLAIN = {"NoExtensionBias": "no text has this form"}  # what llguidance says


def is_available() -> bool:
    """Return whether llguidance is installed."""
    return find_spec("llguidance") is not None


class Grammars:
    """Compiles structured outputs to constraints for one vocabulary; any thread may use it.

    Args:
        tokenizer: a `tokenizers.Tokenizer`, or what its `to_str` gives.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher | TokenAutomaton] = OrderedDict()
        self._good: OrderedDict[str, None] = OrderedDict()  # that were looked at, and can be kept
        self._books = threading.Lock()  # of the three above

    def load(self) -> LLTokenizer:
        """Return the vocabulary, read at the first call; large ones take a second.

        Raises:
            ArgumentError: llguidance is not installed, or cannot read this tokenizer.
        """
        if not is_available():
            raise ArgumentError("structured_outputs: needs llguidance: pip install 'graphdecode[structured]'")
        from llguidance import LLTokenizer

        with self._books:
            if self._vocabulary is None:
                source = self._source if isinstance(self._source, str) else self._source.to_str()
                eos = list(self._eos_token_ids)
                try:
                    vocabulary = LLTokenizer(source, n_vocab=self._vocab_size, eos_token=eos or None)
                    if not eos:  # the library takes one nevertheless: better one that is no text
                        special = (each for each in range(self._vocab_size) if vocabulary.is_special_token(each))
                        eos = [next(special, vocabulary.eos_token)]
                        vocabulary = LLTokenizer(source, n_vocab=self._vocab_size, eos_token=eos)
                    self._vocabulary = vocabulary
                except ValueError as error:
                    raise ArgumentError(f"structured_outputs: this tokenizer cannot be used: {error}") from error
            return self._vocabulary

    def grammar(self, params: StructuredOutputsParams) -> str:
        """Return the grammar of a structured output as text, which `constraint` takes.

        Raises:
            ArgumentError: it cannot be kept; the message names the keyword or the place.
        """
        vocabulary, kind = self.load(), params.kind
        from llguidance import LLMatcher

        with _taken(kind):
            grammar = _grammar_text(params)
            grammar.encode()  # half of a surrogate pair is no text
        if len(grammar) > MAX_GRAMMAR_LENGTH:
            raise ArgumentError(
                f"structured_outputs: {kind} must have at most {MAX_GRAMMAR_LENGTH} characters, got {len(grammar)}"
            )
        with self._books:
            if grammar in self._good or grammar in self._compiled:
                return grammar
        with _taken(kind):
            is_wrong, found = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary)
        if is_wrong:
            reason = found[0].strip().replace("Unimplemented keys", "keywords that are not supported")
            raise ArgumentError(f"structured_outputs: {kind} cannot be kept: {reason}")
        self._keep(self._good, grammar, None)
        return grammar

    def constraint(self, grammar: str) -> Constraint:
        """Return a new constraint for a grammar.

        Args:
            grammar: what `grammar` gave.

        Raises:
            ConstraintError: it cannot be read.
        """
        try:
            with self._books:
                compiled = self._compiled.get(grammar)
                if compiled is not None:
                    self._compiled.move_to_end(grammar)
            if compiled is None:
                compiled = self.compiled(grammar)
                self._keep(self._compiled, grammar, compiled)
        except ArgumentError as error:
            raise ConstraintError(str(error)) from error
        return self.held(compiled)

    def warm(self) -> None:
        """Make what all grammars share.

        Raises:
            ArgumentError: as `load`.
        """
        self._automata.warm()

    def compiled(self, grammar: str) -> LLMatcher | TokenAutomaton:
        """Compile a grammar to a matcher, or to an automaton, which is picklable.

        Raises:
            ArgumentError: it cannot be read, or no text matches it.
            ConstraintError: likewise.
        """
        vocabulary = self.load()
        with _taken("grammar"):
            matcher = _compile(vocabulary, grammar)
            return self._automata.of(grammar, matcher) or matcher

    def held(self, compiled: LLMatcher | TokenAutomaton) -> Constraint:
        """Return a new constraint over what `compiled` gave."""
        if isinstance(compiled, TokenAutomaton):
            return AutomatonConstraint(compiled, self._eos_token_ids)
        never = () if self._eos_token_ids else (self.load().eos_token,)
        return TokenGrammar(compiled.deep_copy(), self._together, self._eos_token_ids, never)

    @cached_property
    def _together(self) -> _Together:
        return _Together(self._vocab_size)

    @cached_property
    def _automata(self) -> TokenAutomata:
        return TokenAutomata(self.load(), self._vocab_size, self._eos_token_ids)

    def _keep(self, kept: OrderedDict[str, Any], grammar: str, value: Any) -> None:
        with self._books:
            kept[grammar] = value
            if len(kept) > _KEPT:
                kept.popitem(last=False)


@contextmanager
def _taken(kind: str) -> Iterator[None]:
    """Raise llguidance's errors, and its panics, which are no `Exception`, as `ArgumentError`."""
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
        options: Any = {  # those that a schema states in `x-guidance` do not count
            "whitespace_flexible": not params.disable_any_whitespace,
            "whitespace_pattern": params.whitespace_pattern,
            "lenient": False,
            "coerce_one_of": False,
        }
        return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=options)
    if params.kind == "regex":
        return LLMatcher.grammar_from_regex(str(params.regex))
    if params.kind == "choice":
        return grammar_from("choice", json.dumps(list(params.choice or ())))
    return grammar_from("grammar", str(params.grammar))


def _compile(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    # an error goes to the owner of the answer, and to the log: without the text and the state of the grammar
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first one takes longest, and its copies have it
    if matcher.is_error():
        raise ConstraintError(f"the grammar cannot be read: {_reason(matcher)}")
    return matcher


class _Together:
    """Computes the masks of several answers in one call, without Python's lock, on several threads.

    Args:
        vocab_size: of the vocabulary that the answers' matchers were made for.
    """

    def __init__(self, vocab_size: int) -> None:
        from llguidance import LLExecutor

        self._executor = LLExecutor()
        self.num_words = -(-vocab_size // MASK_BITS)
        self._words = np.zeros((1, self.num_words), dtype=np.int32)
        self._address = self._words.ctypes.data

    def fill(self, matchers: Sequence[LLMatcher]) -> np.ndarray:
        """Return int32 [matchers, words], good until the next call."""
        if len(matchers) > len(self._words):
            self._words = np.zeros((len(matchers), self._words.shape[1]), dtype=np.int32)
            self._address = self._words.ctypes.data
        size_bytes = self._words.shape[1] * self._words.itemsize
        if size_bytes < _WORTH_THREADS_BYTES:  # these wake up more slowly than such a mask is computed
            for place, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(self._address + place * size_bytes, size_bytes)
        else:
            jobs = [(matcher, place) for place, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(jobs, self._address, size_bytes, len(self._words))
        return self._words


class TokenGrammar(Constraint):
    """Constrains one answer to a grammar; see `graphdecode.engine.constraint.Constraint`.

    Args:
        eos_token_ids: tokens that the matcher allows by itself where the answer may end.
        never: tokens that it allows there, and that end no answer of the model.
    """

    def __init__(
        self, matcher: LLMatcher, together: _Together, eos_token_ids: Sequence[int], never: Sequence[int] = ()
    ) -> None:
        self._matcher = matcher
        self._together = together
        self.num_words = together.num_words
        self._eos_token_ids = eos_token_ids
        self._never = never

    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Write which tokens may come next; see `Constraint.fill`."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._end(words, stop_ids)

    @classmethod
    def fill_all(
        cls, constraints: Sequence[Self], stop_ids: Sequence[Sequence[int]]
    ) -> list[np.ndarray | ConstraintError]:
        """Return for several answers what `fill` writes, or why it cannot; see `Constraint.fill_all`."""
        found: list[np.ndarray | ConstraintError] = []
        words = constraints[0]._together.fill([constraint._matcher for constraint in constraints])
        for mask, constraint, stops in zip(words, constraints, stop_ids, strict=False):
            try:
                constraint._end(mask, stops)
            except ConstraintError as error:
                found.append(error)
            else:
                found.append(mask)
        return found

    def _end(self, mask: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Allow the stop ids where the answer may end; raise the matcher's error."""
        if self._matcher.is_error():
            raise _failure(self._matcher)
        forbid(mask, self._never)
        # the matcher allows what ends a text, and not what ends a turn
        if stop_ids != self._eos_token_ids and self._matcher.is_accepting():
            allow(mask, stop_ids)

    def accept(self, token_id: int) -> bool:
        """Take the token that came; see `Constraint.accept`."""
        if not self._matcher.consume_token(token_id):
            raise _failure(self._matcher)
        return self._matcher.is_stopped()


def _failure(matcher: LLMatcher) -> ConstraintError:
    return ConstraintError(f"its grammar cannot be followed further: {_reason(matcher)}")


def _reason(matcher: LLMatcher) -> str:
    """Return in plain words why a matcher has stopped with an error."""
    reason = matcher.get_error().removesuffix("<non-verbose/>").partition(";")[0].strip()
    return _PLAIN.get(reason, reason)


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it speaks of."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed
