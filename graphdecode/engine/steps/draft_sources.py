"""Where drafts come from: a source declares what it keeps, and writes each row's drafts on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from graphdecode.buffers import Batch, Slot
from graphdecode.kernels.speculation.ngram_draft import ngram_draft
from graphdecode.models import Chunks


class DraftSource(ABC):
    """Guesses the tokens that follow a row's last one; part of the captured step.

    What it writes may be anything: a draft that is wrong costs time and changes no token. A source that needs what the
    target's layers leave, as an EAGLE-3 head does, is given them by a model whose `decode` writes them into a slot of
    the source's own.

    Attributes:
        slots: what it keeps for each row; the step's buffers hold them.
        tensors: what else it writes, by name: caches, workspaces.
        constants: what it only reads: weights.
        is_cheap: drafts cost next to nothing, so that plain steps make the first one, too, and tell whether it would
            have been right. Else plain steps make none, and `prefill` is given the tokens that they fed before drafts
            are wanted again.
    """

    slots: Sequence[Slot] = ()
    tensors: Mapping[str, Tensor] = MappingProxyType({})
    constants: Sequence[Tensor] = ()
    is_cheap: bool = True

    def prefill(self, chunks: Chunks) -> None:  # noqa: B027 (only sources with keys of their own)
        """Take tokens of prompts or answers, as `Model.prefill` does, for a source with keys and values of its own."""

    @abstractmethod
    def look(self, batch: Batch) -> None:
        """Write `num_drafts` and `match_lengths` of the live rows' next step, and the `drafts` that are known by then.

        A row's tokens are `history[row, : pre_step_seqlens[row] + 1]`, the last of them the one to feed next. It runs
        at the end of each step, and once when rows are staged. The batch has the source's slots, too.
        """

    def draft(self, batch: Batch, count: int) -> None:  # noqa: B027 (only sources that look nothing up)
        """Write the first `count` of `drafts`, for a source that makes them when they are wanted.

        It runs at the beginning of each step; of one that feeds no draft, too, with a count of 1, where it is cheap.
        """


class NgramDrafts(DraftSource):
    """What followed the row's last tokens when at least `ngram_min` of them stood in it before; see `ngram_draft`."""

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._ngram_min = ngram_min
        self._ngram_max = ngram_max

    def look(self, batch: Batch) -> None:
        """Look the last tokens up."""
        ngram_draft(
            batch.drafts,
            batch.num_drafts,
            batch.match_lengths,
            batch.history,
            batch.pre_step_seqlens,
            batch.live_rows,
            ngram_min=self._ngram_min,
            ngram_max=self._ngram_max,
        )
