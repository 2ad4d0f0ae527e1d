"""What holds an answer to a form, token by token: the engine asks it, and knows nothing of texts or grammars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self, TypeAlias

import numpy as np

from graphdecode.engine.token_automaton import TokenAutomaton
from graphdecode.errors import GraphdecodeError
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS


class ConstraintError(GraphdecodeError):
    """A form that cannot be kept any further, or not be read at all."""


class Guide(NamedTuple):
    """An automaton over tokens that holds an answer to its form, and the state in which it stands."""

    automaton: TokenAutomaton
    state: int


class Constraint(Protocol):
    """The state of one answer; whoever makes it knows what the tokens spell."""

    @property
    def guide(self) -> Guide | None:
        """What a device can follow in place of this; None where the form is not that simple."""

    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Write which tokens may come next, one bit a token.

        Args:
            words: int32 [ceil(vocab / 32)]; bit i of word w is for token 32 w + i.
            stop_ids: tokens that end the answer, and may come wherever it may end.

        Raises:
            ConstraintError: finding that out takes more than it may.
        """

    @classmethod
    def fill_all(
        cls, constraints: Sequence[Self], stop_ids: Sequence[Sequence[int]]
    ) -> Sequence[np.ndarray | ConstraintError]:
        """Return for several answers of one engine what `fill` writes, or why it cannot; good until the next call.

        Whoever steps calls it; `fill` may be called meanwhile by threads that hand requests in.
        """

    def accept(self, token_id: int) -> bool:
        """Take the token that came; return whether nothing can follow it.

        Raises:
            ConstraintError: it is not one of those that `fill` wrote.
        """


# makes a constraint of the text of a grammar; raises ConstraintError
Constrain: TypeAlias = Callable[[str], Constraint]


class FilledOneByOne(ABC):
    """A constraint whose masks have nothing to gain from being filled together."""

    @property
    @abstractmethod
    def num_words(self) -> int:
        """Of a mask."""

    @abstractmethod
    def fill(self, words: np.ndarray, stop_ids: Sequence[int]) -> None:
        """Write which tokens may come next; see `Constraint.fill`."""

    @classmethod
    def fill_all(
        cls, constraints: Sequence[Self], stop_ids: Sequence[Sequence[int]]
    ) -> list[np.ndarray | ConstraintError]:
        """Return for several answers what `fill` writes, or why it cannot; see `Constraint.fill_all`."""
        found: list[np.ndarray | ConstraintError] = []
        for constraint, stops in zip(constraints, stop_ids, strict=True):
            words = np.empty(constraint.num_words, dtype=np.int32)
            try:
                constraint.fill(words, stops)
            except ConstraintError as error:
                found.append(error)
            else:
                found.append(words)
        return found


def allow(words: np.ndarray, token_ids: Sequence[int]) -> None:
    """Let some tokens come, too.

    Args:
        words: int32, a mask.
        token_ids: which.
    """
    bits = words.view(np.uint32)
    for token in token_ids:
        bits[token // MASK_BITS] |= np.uint32(1 << token % MASK_BITS)
