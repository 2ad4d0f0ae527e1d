"""Where drafts come from: a source declares what it keeps, and writes each row's drafts on the device."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from graphdecode.buffers import Batch, Slot
from graphdecode.kernels.speculation.ngram_draft import ngram_draft


class DraftSource(Protocol):
    """Guesses the tokens that follow a row's last one; part of the captured step.

    What it writes may be anything: a draft that is wrong costs time and changes no token.
    """

    @property
    def slots(self) -> list[Slot]:
        """What it keeps for each row; the step's buffers hold them."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What else it writes, by name: caches, workspaces."""

    def draft(self, batch: Batch) -> None:
        """Write `drafts`, `num_drafts` and `match_lengths` of the live rows.

        A row's tokens are `history[row, : pre_step_seqlens[row] + 1]`, the last of them the one to feed next. It runs
        at the end of each step, and once when rows are staged.

        Args:
            batch: all slots of the step, the source's among them.
        """


class NgramDrafts:
    """What followed the row's last tokens when they stood in it before; see `ngram_draft`.

    Args:
        ngram_min: tokens that must agree.
        ngram_max: tokens that are compared.
    """

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._ngram_min = ngram_min
        self._ngram_max = ngram_max

    @property
    def slots(self) -> list[Slot]:
        """Nothing but what every speculative step keeps."""
        return []

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def draft(self, batch: Batch) -> None:
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
