"""Token masks of rows whose grammars the host follows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import numpy as np

from graphdecode.engine.runner import Runner
from graphdecode.engine.scheduler import Sequence

_Constrained = dict[type[Any], list[tuple[int, Sequence]]]  # class of constraint -> rows with their sequences


class GrammarMasks:
    """Fills the masks of the staged rows, before a step or beside its first half.

    Attributes:
        rows: staged rows whose masks the host fills.
        thread_seconds: on a CPU, masks that take less are filled before the step instead of in another thread.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.rows: _Constrained = {}
        self._free: list[Sequence] = []  # staged rows whose masks stay as they are for now
        self.thread_seconds = 1e-3
        self._fill_seconds = 0.0  # time of the last fill

    def stage(self, sequences: list[Sequence], window: int) -> None:
        """Take other rows; automata on the device fill the masks of some, and some are free for `window` tokens."""
        free = {row: each for row, each in enumerate(sequences) if may_be_masked(each) and is_free(each, window)}
        self.rows, self._free = _constrained(sequences, {*self._runner.step.guided_rows, *free}), [*free.values()]

    @property
    def may_change(self) -> bool:
        """Whether `changes` may be true: no row is constrained by the host else."""
        return bool(self.rows or self._free)

    def changes(self, window: int) -> bool:
        """Whether a free row is no longer free for `window` tokens, or a masked row has become free."""
        masked = (sequence for rows in self.rows.values() for _, sequence in rows)
        return any(is_free(each, window) for each in masked) or not all(is_free(each, window) for each in self._free)

    def fill(self) -> None:
        """Fill the masks of all rows, and stage them."""
        began = time.perf_counter()
        masks = _masks(self.rows)
        self._fill_seconds = time.perf_counter() - began
        with self._runner.device_guard():
            self._runner.step.stage_masks(masks)

    def fill_beside(self, queries: int) -> bool:
        """Whether to fill masks between the halves of the step, while the first runs; if not, fill them now."""
        if queries == 1 and (not self._runner.is_cpu or self._fill_seconds > self.thread_seconds):
            return True
        self.fill()
        return False


def may_be_masked(sequence: Sequence) -> bool:
    """Whether the host may have to fill the masks of a sequence's row."""
    try:
        return sequence.constraint is not None and sequence.constraint.guide is None
    except Exception:  # raised once more when its row is staged
        return True


def is_free(sequence: Sequence, window: int) -> bool:
    """Whether the mask of a sequence's row stays as it is for `window` tokens."""
    return sequence.constraint is None or sequence.constraint.num_free_tokens >= window


def fill_sampling_masks(sequences: list[Sequence]) -> None:
    """Fill the masks with which rows are staged; those of new sequences have been filled by `Engine.add`."""
    fresh = [row for row, sequence in enumerate(sequences) if not sequence.num_generated]
    for row, mask in _masks(_constrained(sequences, fresh)).items():
        np.copyto(sequences[row].sampling.token_mask, mask)  # type: ignore[arg-type]


def _constrained(sequences: list[Sequence], without: Collection[int] = ()) -> _Constrained:
    rows: _Constrained = defaultdict(list)
    for row, sequence in enumerate(sequences):
        if sequence.constraint is not None and row not in without:
            rows[type(sequence.constraint)].append((row, sequence))
    return rows


def _masks(constrained: _Constrained) -> dict[int, np.ndarray]:
    """Return the token mask of each row; a constraint that fails ends its row when the step is read."""
    masks: dict[int, np.ndarray] = {}
    for kind, rows in constrained.items():
        filled = _fill_all(kind, [sequence for _, sequence in rows])
        for (row, sequence), mask in zip(rows, filled, strict=True):
            if isinstance(mask, Exception):
                sequence.failure = mask
            else:
                masks[row] = mask
    return masks


def _fill_all(kind: type[Any], sequences: list[Sequence]) -> list[np.ndarray | Exception]:
    """Return the masks of sequences, or what their constraints raise."""
    try:
        return [*kind.fill_all([s.constraint for s in sequences], [s.stop_ids for s in sequences])]
    except Exception as error:
        if len(sequences) == 1:
            return [error]
        # valid until the next call
        alone = (_fill_all(kind, [sequence])[0] for sequence in sequences)
        return [mask if isinstance(mask, Exception) else mask.copy() for mask in alone]
