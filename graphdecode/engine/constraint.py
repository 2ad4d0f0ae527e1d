"""What holds an answer to a form, token by token: the engine asks it, and knows nothing of texts or grammars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self, TypeAlias

import numpy as np

from graphdecode.engine.token_automaton import TokenAutomaton
from graphdecode.errors import GraphdecodeError


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
        """Return for several answers of one engine what `fill` writes, or why it cannot; good until the next call."""

    def accept(self, token_id: int) -> bool:
        """Take the token that came; return whether nothing can follow it.

        Raises:
            ConstraintError: it is not one of those that `fill` wrote.
        """


# makes a constraint of the text of a grammar; raises ConstraintError
Constrain: TypeAlias = Callable[[str], Constraint]
