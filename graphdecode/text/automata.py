"""Token automata of choices and regular expressions, each verified against llguidance's masks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from graphdecode.engine.constraint import Constraint, ConstraintError, Guide, TokenAutomaton, allow, forbid
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS
from graphdecode.text.regex_automaton import Ranges, UnknownPatternError, byte_automaton, merged

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_STATES, MOST_CLASSES = 1024, 1024  # per automaton
_MOST_STEPS = 1_000_000  # transitions, each from a state by a token
_MOST_CHOICES_LENGTH = 1 << 16  # characters; more would exceed MOST_STATES anyway
_TEXT = r'"(?:[^"\\]|\\.)*"'
_CHOICES = re.compile(rf"start: {_TEXT}(?: \| {_TEXT})*\s*")


class TokenAutomata:
    """Makes automata over the tokens of one vocabulary; thread-safe."""

    def __init__(self, vocabulary: LLTokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    def of(self, grammar: str, matcher: LLMatcher) -> TokenAutomaton | None:
        """Return the automaton of a grammar with the masks of `matcher`, which is in its first state.

        None if it is neither choices nor a plain regex, or is too large.
        """
        try:
            expression = _expression(grammar)
            if expression is None:
                return None
            by_byte, accepts = byte_automaton(expression, _class_of, MOST_STATES)
            eos = self._eos_token_ids
            walk = _Walk(self._token_bytes, by_byte, accepts, matcher, eos or [self._vocabulary.eos_token])
            return walk.automaton(self._vocab_size, never=() if eos else walk.eos_token_ids)
        except (UnknownPatternError, RecursionError):
            return None

    def warm(self) -> None:
        """Compute what all automata share."""
        _ = self._token_bytes
        for name in "dws":
            _class_of(name)

    @cached_property
    def _token_bytes(self) -> _TokenBytes:
        vocabulary, count = self._vocabulary, min(self._vocab_size, self._vocabulary.vocab_size)
        special = {*self._eos_token_ids, *filter(vocabulary.is_special_token, range(count))}
        return _TokenBytes([b"" if token in special else vocabulary.decode_bytes([token]) for token in range(count)])


def _expression(grammar: str) -> str | None:
    """Return the regular expression of a grammar; None if it is something else."""
    if _CHOICES.fullmatch(grammar) and len(grammar) <= _MOST_CHOICES_LENGTH:
        return "|".join(re.escape(json.loads(text)) for text in re.findall(_TEXT, grammar))
    if not grammar.startswith("{"):
        return None
    (part, *others) = json.loads(grammar)["grammars"]
    if others or part.get("name") != "regex":
        return None
    return str(part["lark_grammar"]).removeprefix("start: /").removesuffix("/").replace("\\/", "/")


class _Walk:
    """Walks through the states of an automaton over bytes token by token, and compares each with llguidance's matcher.

    Raises `UnknownPatternError` if there are too many states, or the matcher allows other tokens than the automaton,
    and `eos_token_ids` where the text may end.
    """

    def __init__(
        self,
        token_bytes: _TokenBytes,
        by_byte: np.ndarray,
        accepts: np.ndarray,
        matcher: LLMatcher,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._token_bytes = token_bytes
        self._by_byte = by_byte
        self._accepts = accepts
        self._follower = matcher.deep_copy()
        self.eos_token_ids = eos_token_ids
        # where only one string can follow, the library allows only the tokenizer's own tokens for it
        self._is_forced = ((by_byte >= 0).sum(axis=1) == 1) & ~accepts
        self._completes = accepts & (by_byte < 0).all(axis=1)
        self._numbers: dict[int, int] = {}  # numbers of the states reached so far
        self._leading: list[tuple[np.ndarray, np.ndarray]] = []  # tokens, and the byte states that they lead to
        self._masks: list[bytes] = []
        self._steps = 0
        self._walk()

    def _walk(self) -> None:
        waiting, path = [(0, -1, -1)], [-1]  # (state, the one before it, token); the states passed so far
        while waiting:
            state, parent, token = waiting.pop()
            while path[-1] != parent:
                path.pop()
                self._follower.rollback(1)
            if parent >= 0:
                self._follower.consume_token(token)
            path.append(state)
            number = self._numbers.get(state)
            if number is not None:
                if not self._completes[state] and self._follower.compute_bitmask() != self._masks[number]:
                    raise UnknownPatternError("the library's mask depends on more than the state")
                continue
            for target, first in self._enter(state):
                if self._is_forced[target] or target not in self._numbers:
                    waiting.append((target, state, first))

    def _enter(self, state: int) -> list[tuple[int, int]]:
        """Add the state that the matcher is in, too; return the states it leads to, each with its first token."""
        if len(self._numbers) == MOST_STATES:
            raise UnknownPatternError("too many states")
        if self._follower.is_error() or self._completes[state] != self._follower.is_stopped():
            raise UnknownPatternError("the library's final states differ")
        self._numbers[state] = len(self._numbers)
        tokens, targets = self._token_bytes.followed(self._by_byte, state)
        self._steps += len(tokens)
        if self._steps > _MOST_STEPS:
            raise UnknownPatternError("too many tokens from too many states")
        mask = b"" if self._completes[state] else self._follower.compute_bitmask()
        if mask:
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))
            if self._is_forced[state] and len(allowed) == 1:
                targets, tokens = targets[tokens == allowed], tokens[tokens == allowed]
            if not np.array_equal(allowed, np.union1d(tokens, self.eos_token_ids) if self._accepts[state] else tokens):
                raise UnknownPatternError("the library allows other tokens")
        self._masks.append(mask)
        self._leading.append((tokens, targets))
        reached, first = np.unique(targets, return_index=True)
        return list(zip(reached.tolist(), tokens[first].tolist(), strict=True))

    def automaton(self, vocab_size: int, never: Sequence[int]) -> TokenAutomaton:
        """Return the automaton without the tokens `never`, which end a text, but not the model's outputs."""
        states = list(self._numbers)
        number_of = np.full(len(self._by_byte), -1, dtype=np.int32)
        number_of[states] = np.arange(len(states))
        # tokens with the same transitions have the same sum; collisions are checked below
        sums = np.zeros(vocab_size, dtype=np.uint64)
        weights = np.random.default_rng(0).integers(1, 2**63, size=len(states), dtype=np.uint64)
        for weight, (tokens, targets) in zip(weights, self._leading, strict=True):
            sums[tokens] += weight * (number_of[targets].astype(np.uint64) + np.uint64(1))
        _, classes = np.unique(sums, return_inverse=True)
        if classes.max() >= MOST_CLASSES:
            raise UnknownPatternError("too many classes of tokens")
        following = np.full((len(states), int(classes.max()) + 1), -1, dtype=np.int32)
        masks = np.zeros((len(states), -(-vocab_size // MASK_BITS)), dtype=np.int32)
        for number, (tokens, targets) in enumerate(self._leading):
            following[number, classes[tokens]] = number_of[targets]
            if not np.array_equal(np.flatnonzero(following[number, classes] >= 0), tokens):
                raise UnknownPatternError("the sums of two classes collide")
            words = np.frombuffer(self._masks[number], dtype=np.int32)[: masks.shape[1]]
            masks[number, : len(words)] = words
            forbid(masks[number], never)
        return TokenAutomaton(
            classes.astype(np.int32), following, masks, self._accepts[states], self._completes[states]
        )


class _TokenBytes:
    """The bytes of all tokens in one array, to follow all tokens together; special tokens have none."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.lengths = np.array([len(token) for token in tokens])
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        self.bytes = np.frombuffer(b"".join(tokens), dtype=np.uint8)
        nonempty = np.flatnonzero(self.lengths)
        first = self.bytes[self.offsets[nonempty]]
        self.by_first = [nonempty[first == byte] for byte in range(256)]

    def followed(self, by_byte: np.ndarray, state: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens allowed in a state, ascending, and the states that they lead to."""
        alive = [(self.by_first[byte], by_byte[state, byte]) for byte in np.flatnonzero(by_byte[state] >= 0)]
        if not alive:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        tokens = np.concatenate([some for some, _ in alive])
        states = np.concatenate([np.full(len(some), target, dtype=np.int32) for some, target in alive])
        ended: list[tuple[np.ndarray, np.ndarray]] = []
        offset = 1
        while len(tokens):
            continues = self.lengths[tokens] > offset
            ended.append((tokens[~continues], states[~continues]))
            tokens, states = tokens[continues], states[continues]
            states = by_byte[states, self.bytes[self.offsets[tokens] + offset]]
            tokens, states = tokens[states >= 0], states[states >= 0]
            offset += 1
        tokens, states = (np.concatenate(parts) for parts in zip(*ended, strict=True))
        order = np.argsort(tokens)
        return tokens[order], states[order]


class AutomatonConstraint(Constraint):
    """Constrains one output by an automaton; see `graphdecode.engine.constraint.Constraint`."""

    def __init__(self, automaton: TokenAutomaton, eos_token_ids: Sequence[int]) -> None:
        self._automaton = automaton
        self._eos_token_ids = eos_token_ids
        self.num_words = automaton.masks.shape[1]
        self._state = 0

    @property
    def guide(self) -> Guide:
        """The automaton and its state."""
        return Guide(self._automaton, self._state)

    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Write the mask of the next token; see `Constraint.fill`."""
        words[:] = self._automaton.masks[self._state]
        if self._automaton.accepts[self._state]:
            allow(words, stop_ids)

    def accept(self, token_id: int) -> bool:
        """Take the next token; see `Constraint.accept`."""
        automaton = self._automaton
        state = int(automaton.following[self._state, automaton.classes[token_id]])
        if state < 0:
            if automaton.accepts[self._state] and token_id in self._eos_token_ids:
                return True
            raise ConstraintError(f"token {token_id} is not allowed by its grammar")
        self._state = state
        return bool(automaton.completes[state])


class _Bytes:
    """A vocabulary whose tokens are bytes."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = tuple([bytes([value]) for value in range(256)] + [b"<|end|>"])

    def __call__(self, text: Any) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _class_of(name: str) -> Ranges:
    """Return the characters of llguidance's `\\d`, `\\w` or `\\s`, found by walking through their bytes."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), LLMatcher.grammar_from_regex(f"\\{name}"))
    characters: list[tuple[int, int]] = []

    def walk(prefix: bytes) -> None:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)[:32], bitorder="little")
        for byte in np.flatnonzero(bits).tolist():
            spelled = prefix + bytes([byte])
            lead = spelled[0]
            if len(spelled) == (1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4):  # of UTF-8
                characters.append((ord(spelled.decode()),) * 2)
            else:
                matcher.consume_token(byte)
                walk(spelled)
                matcher.rollback(1)

    walk(b"")
    return merged(tuple(characters))
