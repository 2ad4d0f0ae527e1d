"""Forms that xgrammar reads in place of llguidance."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from graphdecode.engine.constraint import Constraint, ConstraintError, allow
from graphdecode.engine.sampling_params import StructuredOutputsParams
from graphdecode.errors import ArgumentError
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS
from graphdecode.text.automata import spelled_tokens
from graphdecode.text.grammar import MAX_GRAMMAR_LENGTH, Grammars
from graphdecode.text.xgrammar_schema import kept_schema

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from xgrammar import CompiledGrammar, Grammar, GrammarCompiler, GrammarMatcher

_MARK = "xgrammar "  # before the text of a grammar that xgrammar wrote
_OF_LLGUIDANCE = "%llguidance"
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
_ESCAPED_OR_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def grammars_of(backend: str, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
    """Return what reads forms with a library.

    Args:
        backend: xgrammar; guidance or auto, which are llguidance.
        tokenizer: see `Grammars`, as for the others.
        vocab_size: of the model.
        eos_token_ids: of the model.
    """
    kind = XGrammars if backend == "xgrammar" else Grammars
    return kind(tokenizer, vocab_size, eos_token_ids)


class XGrammars(Grammars):
    """Reads forms with xgrammar; grammars that are llguidance's by their header (`%llguidance`) are left to it.

    What the tokens spell is what llguidance makes of the tokenizer, so that both libraries see one vocabulary.
    """

    def load(self) -> LLTokenizer:
        """Return the vocabulary; see `Grammars.load`.

        Raises:
            ArgumentError: xgrammar or llguidance is not installed, or cannot read this tokenizer.
        """
        if find_spec("xgrammar") is None:
            raise ArgumentError(
                "structured_outputs: the backend is xgrammar, which is missing: pip install 'graphdecode[xgrammar]'"
            )
        return super().load()

    def grammar(self, params: StructuredOutputsParams) -> str:
        """Return the text of the grammar for a form; see `Grammars.grammar`."""
        if str(params.grammar).startswith(_OF_LLGUIDANCE):
            return super().grammar(params)
        self.load()
        with _named(params.form):
            text = _MARK + _grammar(params).serialize_json()
            if len(text) > MAX_GRAMMAR_LENGTH:
                raise ArgumentError(f"its grammar must have at most {MAX_GRAMMAR_LENGTH} characters, got {len(text)}")
            self._compiled_by_xgrammar(text)
        return text

    def warm(self) -> None:
        """Make what all forms share; see `Grammars.warm`."""
        super().warm()
        _ = self._compiler

    def compiled(self, grammar: str) -> Any:
        """Return what constraints are made of; see `Grammars.compiled`."""
        if not grammar.startswith(_MARK):
            return super().compiled(grammar)
        self.load()
        with _named("grammar"):
            return self._compiled_by_xgrammar(grammar)

    def held(self, compiled: Any) -> Constraint:
        """Return what holds one answer to a grammar; see `Grammars.held`."""
        from xgrammar import CompiledGrammar, GrammarMatcher

        if not isinstance(compiled, CompiledGrammar):
            return super().held(compiled)
        return XGrammarConstraint(GrammarMatcher(compiled), self._vocab_size, self._eos_token_ids)

    def _compiled_by_xgrammar(self, text: str) -> CompiledGrammar:
        from xgrammar import Grammar, GrammarMatcher

        with self._books:
            compiled = self._kept.get(text)
        if compiled is None:
            compiled = self._compiler.compile_grammar(Grammar.deserialize_json(text.removeprefix(_MARK)))
            first = XGrammarConstraint(GrammarMatcher(compiled), self._vocab_size, self._eos_token_ids)
            if not first.mask().any():
                raise ArgumentError("nothing has this form")
            self._keep(self._kept, text, compiled)
        return compiled

    @cached_property
    def _kept(self) -> OrderedDict[str, CompiledGrammar]:
        return OrderedDict()

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

        eos = list(self._eos_token_ids)
        spelled = spelled_tokens(self.load(), self._vocab_size, eos)
        vocabulary = TokenizerInfo(spelled, VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=eos)
        return GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)


class XGrammarConstraint(Constraint):
    """Holds one answer to a grammar; see `graphdecode.engine.constraint.Constraint`.

    Args:
        matcher: at the beginning of the answer.
        vocab_size: of the model.
        eos_token_ids: tokens that the matcher allows by itself where the answer may end.
    """

    def __init__(self, matcher: GrammarMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.num_words = -(-vocab_size // MASK_BITS)
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._mask: np.ndarray | None = None  # of the next token, where it is known already

    def mask(self) -> np.ndarray:
        """Return int32 [ceil(vocab / 32)]: which tokens the library allows next; bits beyond them are 0."""
        if self._mask is None:
            words = np.zeros((1, self.num_words), dtype=np.int32)
            self._matcher.fill_next_token_bitmask(words)
            if self._vocab_size % MASK_BITS:
                words[0, -1] &= (1 << self._vocab_size % MASK_BITS) - 1
            self._mask = words[0]
        return self._mask

    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Write which tokens may come next; see `Constraint.fill`."""
        words[:] = self.mask()
        if self._matcher.is_completed():
            allow(words, stop_ids)
        if not words.any():
            raise ConstraintError("its grammar cannot be followed further: no token continues it")

    def accept(self, token_id: int) -> bool:
        """Take the token that came; see `Constraint.accept`."""
        self._mask = None
        if not self._matcher.accept_token(token_id):
            raise ConstraintError(f"token {token_id} is none that its form allows")
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        ends = np.zeros_like(self.mask())
        allow(ends, self._eos_token_ids)
        return not (self.mask() & ~ends).any()


@contextmanager
def _named(form: str) -> Iterator[None]:
    """Say of a form that cannot be kept which one it is."""
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(f"structured_outputs: {form} cannot be kept: {error}") from error
    except (RuntimeError, ValueError, RecursionError) as error:
        reason = _PLACE.sub("", str(error)).strip()  # of xgrammar's source
        raise ArgumentError(f"structured_outputs: {form} cannot be kept: {reason}") from error


def _grammar(params: StructuredOutputsParams) -> Grammar:
    """Return what xgrammar makes of a form.

    Raises:
        ArgumentError: it does not keep all of it.
        RuntimeError: it cannot read it.
    """
    from xgrammar import Grammar

    if params.form in ("json", "json_object"):
        if params.whitespace_pattern is not None:
            raise ArgumentError("xgrammar knows no whitespace_pattern")
        schema = {"type": "object"} if params.json is None else kept_schema(params.schema)
        return Grammar.from_json_schema(
            json.dumps(schema, ensure_ascii=False),
            any_whitespace=not params.disable_any_whitespace,
            separators=(",", ":"),
            strict_mode=False,  # `kept_schema` closes what has to be closed
        )
    if params.form == "regex":
        expression = str(params.regex)
        inner = expression.removeprefix("^").removesuffix("$")
        if set("^$") & set(_ESCAPED_OR_CLASS.sub("", inner)):  # it would pass over them
            raise ArgumentError("xgrammar knows ^ and $ at the ends of an expression alone")
        return Grammar.from_regex(expression)
    if params.form == "choice":
        texts = (json.dumps(text, ensure_ascii=False) for text in params.choice or ())
        return Grammar.from_ebnf(f"root ::= {' | '.join(texts)}")
    text = str(params.grammar)
    return Grammar.from_ebnf(text) if "::=" in text else Grammar.from_lark(text)
