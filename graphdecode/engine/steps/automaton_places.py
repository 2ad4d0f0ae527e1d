"""Where the automata that rows follow lie in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from graphdecode.buffers import Slot, StepBuffers
from graphdecode.config import BucketConfig
from graphdecode.engine.constraint import TokenAutomaton
from graphdecode.kernels.sampling.follow_automata import ACCEPTS, COMPLETES
from graphdecode.kernels.sampling.sampling_slots import MASK_BITS

_MOST_CLASSES = 1024  # of tokens that one automaton tells apart


def state_bytes(vocab_size: int) -> int:
    """Return what one state takes in the tables."""
    return 4 * (_MOST_CLASSES + -(-vocab_size // MASK_BITS) + 1)


class Place(NamedTuple):
    """Where an automaton lies: its number, and the line of its first state."""

    number: int
    line: int


class AutomatonPlaces:
    """The books of the tables that `follow_automata` reads; what no row follows gives way."""

    def __init__(self, config: BucketConfig, vocab_size: int) -> None:
        self._automata, self._lines = config.max_automata, config.max_automaton_states
        self._vocab_size = vocab_size
        self._places: dict[TokenAutomaton, Place] = {}

    @property
    def slots(self) -> list[Slot]:
        """The tables."""
        return [
            Slot("automaton_classes", (self._automata, self._vocab_size), torch.int32),
            Slot("automaton_next", (self._lines, _MOST_CLASSES), torch.int32, pad=-1),
            Slot("automaton_masks", (self._lines, -(-self._vocab_size // MASK_BITS)), torch.int32),
            Slot("automaton_ends", (self._lines,), torch.int32),
        ]

    def place(self, wanted: Sequence[TokenAutomaton], buffers: StepBuffers) -> dict[TokenAutomaton, Place]:
        """Return where some automata lie; new ones are written, the first before the others, where there is room."""
        distinct = list(dict.fromkeys(wanted))
        for automaton in distinct:
            num_states, num_classes = automaton.following.shape
            if automaton in self._places or num_classes > _MOST_CLASSES:
                continue
            found = self._room(num_states)
            if found is None:
                self._places = {kept: place for kept, place in self._places.items() if kept in distinct}
                found = self._room(num_states)
            if found is not None:
                self._places[automaton] = found
                self._write(automaton, found, buffers)
        return {automaton: self._places[automaton] for automaton in distinct if automaton in self._places}

    def _room(self, num_states: int) -> Place | None:
        """Return the first free place of some lines."""
        used = {place.number for place in self._places.values()}
        number = next((number for number in range(self._automata) if number not in used), None)
        line = 0
        for automaton, place in sorted(self._places.items(), key=lambda item: item[1].line):
            if line + num_states <= place.line:
                break
            line = place.line + len(automaton.following)
        return None if number is None or line + num_states > self._lines else Place(number, line)

    @staticmethod
    def _write(automaton: TokenAutomaton, place: Place, buffers: StepBuffers) -> None:
        following = np.where(automaton.following < 0, -1, automaton.following + place.line).astype(np.int32)
        ends = (ACCEPTS * automaton.accepts + COMPLETES * automaton.completes).astype(np.int32)
        buffers.write("automaton_classes", place.number, automaton.classes[None])
        buffers.write("automaton_next", place.line, following)
        buffers.write("automaton_masks", place.line, automaton.masks)
        buffers.write("automaton_ends", place.line, ends)
