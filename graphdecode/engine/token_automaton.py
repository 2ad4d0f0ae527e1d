"""An automaton over tokens: what a form that is simple enough allows, as tables that a device can follow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """States, and where each token leads; state 0 is the beginning of an answer.

    Attributes:
        classes: int32 [vocab], of each token; those of one class lead to the same state from everywhere.
        following: int32 [states, classes], the state that a class leads to; -1: it cannot come, or ends the text.
        masks: int32 [states, ceil(vocab / 32)], bit i of word w is set where token 32 w + i may come.
        accepts: bool [states], where the answer may end.
        completes: bool [states], where nothing can follow.
    """

    classes: np.ndarray
    following: np.ndarray
    masks: np.ndarray
    accepts: np.ndarray
    completes: np.ndarray

    @property
    def num_states(self) -> int:
        """How many states there are."""
        return len(self.following)

    @property
    def num_classes(self) -> int:
        """How many classes of tokens there are."""
        return self.following.shape[1]
