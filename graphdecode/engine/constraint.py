"""Constraints on answers, token by token: the engine asks them for masks, and knows nothing of texts or grammars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from graphdecode.errors import GraphdecodeError
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS


class ConstraintError(GraphdecodeError):
    """A form that cannot be kept any further, or not be read at all."""


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """States, and where each token leads; state 0 is the beginning of an answer."""

    classes: np.ndarray  # int32 [vocab], of each token; those of one class lead to the same state from everywhere
    following: np.ndarray  # int32 [states, classes], the state that a class leads to; -1: none
    masks: np.ndarray  # int32 [states, ceil(vocab / 32)], bit i of word w is set where token 32 w + i may come
    accepts: np.ndarray  # bool [states], where the answer may end
    completes: np.ndarray  # bool [states], where nothing can follow


class Guide(NamedTuple):
    """The automaton of a structured output, and the state in which it stands."""

    automaton: TokenAutomaton
    state: int


class Constraint(ABC):
    """The state of one answer; whoever makes it knows what the tokens spell."""

    num_words: int  # of a mask

    @property
    def guide(self) -> Guide | None:
        """The automaton that a device can follow in place of this; None where the form is not that simple."""
        return None

    @abstractmethod
    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Write which tokens may come next, in int32 [ceil(vocab / 32)]: bit i of word w is for token 32 w + i.

        `stop_ids` end the answer, and may come wherever it may end. A ConstraintError says that it takes too much.
        """

    @classmethod
    def fill_all(
        cls, constraints: Sequence[Self], stop_ids: Sequence[Sequence[int]]
    ) -> list[np.ndarray | ConstraintError]:
        """Return for several answers of one engine what `fill` writes, or why it cannot; good until the next call."""
        found: list[np.ndarray | ConstraintError] = []
        for constraint, stops in zip(constraints, stop_ids, strict=True):
            found.append(words := np.empty(constraint.num_words, dtype=np.int32))
            try:
                constraint.fill(words, stops)
            except ConstraintError as error:
                found[-1] = error
        return found

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Take the token that came; return whether nothing can follow it.

        Raises:
            ConstraintError: it is not one of those that `fill` wrote.
        """


# makes a constraint of the text of a grammar; raises ConstraintError
Constrain: TypeAlias = Callable[[str], Constraint]


class AtLeast(Constraint):
    """Keeps to a constraint, and from its end until there are `min_tokens`, as far as others may come."""

    def __init__(self, constraint: Constraint, min_tokens: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.num_words = -(-vocab_size // MASK_BITS)
        self._constraint, self._lacking, self._eos_token_ids = constraint, min_tokens, eos_token_ids

    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Write which tokens may come next; see `Constraint.fill`."""
        """Write which tokens may come next; see `Constraint.fill`."""
        self._constraint.fill(words, stop_ids)
        if self._lacking > 0:
            ends = np.zeros_like(words)
            allow(ends, [*stop_ids, *self._eos_token_ids])
            if (words & ~ends).any():
                words &= ~ends

    def accept(self, token_id: int) -> bool:
        """Take the token that came; see `Constraint.accept`."""
        self._lacking -= 1
        return self._constraint.accept(token_id)


def allow(words: np.ndarray, token_ids: Sequence[int]) -> None:
    """Set the bits of some tokens in a mask of int32 words."""
    for token in token_ids:
        words.view(np.uint32)[token // MASK_BITS] |= np.uint32(1 << token % MASK_BITS)


def forbid(words: np.ndarray, token_ids: Sequence[int]) -> None:
    """Clear the bits of some tokens in a mask of int32 words."""
    for token in token_ids:
        words.view(np.uint32)[token // MASK_BITS] &= ~np.uint32(1 << token % MASK_BITS)
