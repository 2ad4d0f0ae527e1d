"""Constraints on outputs, token by token: the interface of structured outputs to the engine."""

from __future__ import annotations

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


def allow(words: np.ndarray, token_ids: Sequence[int]) -> None:
    """Set the bits of some tokens in a mask of int32 words."""
    for token in token_ids:
        words.view(np.uint32)[token // MASK_BITS] |= np.uint32(1 << token % MASK_BITS)


def forbid(words: np.ndarray, token_ids: Sequence[int]) -> None:
    """Clear the bits of some tokens in a mask of int32 words."""
    for token in token_ids:
        words.view(np.uint32)[token // MASK_BITS] &= ~np.uint32(1 << token % MASK_BITS)
