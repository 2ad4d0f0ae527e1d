"""An embedding that stays in blocks of few bits."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from graphdecode.linear.weight_form import RowTable
from graphdecode.models.blocks import Stem, Tokens


@dataclass(frozen=True)
class BlocksStem(Stem):
    """An embedding whose rows are undone as they are gathered; `embedding` has no rows, it says dtype and channels.

    Attributes:
        table: the embedding, perhaps the output layer's own.
    """

    table: RowTable = field(kw_only=True)

    def embed(self, residual: Tensor, tokens: Tokens) -> None:
        """Write the embedded tokens into `residual`."""
        self.table.gather(residual, tokens.ids, tokens.live, self.scale)
