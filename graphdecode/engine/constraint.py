"""Constraints on outputs, token by token: the interface of structured outputs to the engine."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from graphdecode.errors import GraphdecodeError
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS


class ConstraintError(GraphdecodeError):
    """A grammar cannot be compiled or followed further."""


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A finite automaton over tokens; state 0 is the beginning of an output."""

    classes: np.ndarray  # int32 [vocab], the class of each token; tokens of one class have the same transitions
    following: np.ndarray  # int32 [states, classes], the next state; -1: none
    masks: np.ndarray  # int32 [states, ceil(vocab / 32)], bit i of word w is set if token 32 w + i is allowed
    accepts: np.ndarray  # bool [states], whether the output may end
    completes: np.ndarray  # bool [states], whether nothing can follow


class Guide(NamedTuple):
    """The automaton of a structured output, and its current state."""

    automaton: TokenAutomaton
    state: int


class Constraint(ABC):
    """The state of one constrained output."""

    num_words: int  # length of a mask

    @property
    def guide(self) -> Guide | None:
        """The equivalent automaton for the device; None if the grammar is not a finite automaton."""
        return None

    @property
    def num_free_tokens(self) -> int:
        """For how many more tokens the mask stays as it is, whatever they are."""
        return 0

    @abstractmethod
    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Write the mask of allowed tokens, int32 [ceil(vocab / 32)]: bit i of word w is for token 32 w + i.

        `stop_ids` are allowed where the output may end. Raises ConstraintError if the mask takes too long.
        """

    @classmethod
    def fill_all(
        cls, constraints: Sequence[Self], stop_ids: Sequence[Sequence[int]]
    ) -> list[np.ndarray | ConstraintError]:
        """Return the masks of several outputs, or their errors; valid until the next call."""
        masks: list[np.ndarray | ConstraintError] = []
        for constraint, stops in zip(constraints, stop_ids, strict=True):
            masks.append(words := np.empty(constraint.num_words, dtype=np.int32))
            try:
                constraint.fill(words, stops)
            except ConstraintError as error:
                masks[-1] = error
        return masks

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by a token; return whether nothing can follow it.

        Raises:
            ConstraintError: the token is not allowed.
        """


Constrain: TypeAlias = Callable[[str], Constraint]  # grammar -> constraint; raises ConstraintError


class AtLeast(Constraint):
    """Also forbids the tokens that end the output before `min_tokens`, unless no others are allowed."""

    def __init__(self, constraint: Constraint, min_tokens: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.num_words = -(-vocab_size // MASK_BITS)
        self._constraint, self._tokens_left, self._eos_token_ids = constraint, min_tokens, eos_token_ids

    @property
    def num_free_tokens(self) -> int:
        """See `Constraint.num_free_tokens`."""
        free = self._constraint.num_free_tokens
        return min(free, self._tokens_left) if self._tokens_left > 0 else free

    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        """See `Constraint.fill`."""
        self._constraint.fill(words, stop_ids)
        if self._tokens_left > 0:
            ends = np.zeros_like(words)
            allow(ends, [*stop_ids, *self._eos_token_ids])
            if (words & ~ends).any():
                words &= ~ends

    def accept(self, token_id: int) -> bool:
        """See `Constraint.accept`."""
        self._tokens_left -= 1
        return self._constraint.accept(token_id)


class ReasoningMarkers(NamedTuple):
    """Token ids that open and close the reasoning with which an output may begin."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool  # whether the prompt has opened it


class AfterReasoning(Constraint):
    """Closes the reasoning after a number of tokens (`budget`); another constraint begins behind it.

    Reasoning is open from the beginning, or begins with the first token, or there is none.
    """

    def __init__(
        self,
        markers: ReasoningMarkers,
        constraint: Constraint | None,
        budget: int | None,
        vocab_size: int,
    ) -> None:
        self.num_words = -(-vocab_size // MASK_BITS)
        self._markers, self._constraint = markers, constraint
        self._tokens_left = sys.maxsize if budget is None else budget  # of the reasoning
        self._is_open, self._is_over = markers.is_open, False
        self._marker = markers.end if self._is_open else markers.start  # the next one
        self._matched = 0  # tokens of it that came last

    @property
    def num_free_tokens(self) -> int:
        """See `Constraint.num_free_tokens`."""
        if self._is_over:
            return sys.maxsize if self._constraint is None else self._constraint.num_free_tokens
        if self._constraint is None:
            return self._tokens_left
        return 1 if self._is_open and self._tokens_left > 0 and self._matched < len(self._marker) - 1 else 0

    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        """See `Constraint.fill`."""
        follows = self._constraint is not None and (self._is_over or not (self._is_open or self._matched))
        if follows:
            assert self._constraint is not None
            self._constraint.fill(words, stop_ids)
        else:
            words.fill(-1)
        if self._is_over:
            return
        next_id = self._marker[self._matched]
        is_forced = self._is_open and self._tokens_left <= 0
        if is_forced or (self._constraint is not None and self._matched and not self._is_open):
            words.fill(0)
        elif self._constraint is not None and self._is_open:
            forbid(words, stop_ids)
        allow(words, [next_id])

    def accept(self, token_id: int) -> bool:
        """See `Constraint.accept`."""
        if self._is_over:
            return self._constraint is not None and self._constraint.accept(token_id)
        if self._is_open:
            self._tokens_left -= 1
        self._matched = _matched(self._marker, self._matched, token_id)
        if self._matched == len(self._marker):
            self._is_over, self._matched, self._marker = self._is_open, 0, self._markers.end
            self._is_open = True
        elif not (self._is_open or self._matched):  # it began without reasoning
            self._is_over = True
            return self.accept(token_id)
        return False


def _matched(marker: tuple[int, ...], matched: int, token_id: int) -> int:
    """Return how many tokens of a marker an output ends with, after `matched` and one more."""
    last = (*marker[:matched], token_id)
    return next(size for size in range(len(last), -1, -1) if marker[:size] == last[len(last) - size :])


def allow(words: np.ndarray, token_ids: Sequence[int]) -> None:
    """Set the bits of some tokens in a mask of int32 words."""
    for token in token_ids:
        words.view(np.uint32)[token // MASK_BITS] |= np.uint32(1 << token % MASK_BITS)


def forbid(words: np.ndarray, token_ids: Sequence[int]) -> None:
    """Clear the bits of some tokens in a mask of int32 words."""
    for token in token_ids:
        words.view(np.uint32)[token // MASK_BITS] &= ~np.uint32(1 << token % MASK_BITS)
