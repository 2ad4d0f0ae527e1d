"""An embedding that stays in blocks of few bits."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from graphdecode.kernels.linear.quantised_linear import QuantisedPanels
from graphdecode.kernels.model.quantised_embedding import quantised_embedding
from graphdecode.models.blocks import Stem, Tokens


@dataclass(frozen=True)
class BlocksStem(Stem):
    """An embedding whose rows are undone as they are gathered; `embedding` has no rows, it says dtype and channels.

    Attributes:
        table: the embedding, perhaps the output layer's own.
        vocab_size: its rows.
    """

    table: QuantisedPanels = field(kw_only=True)
    vocab_size: int = field(kw_only=True)

    def embed(self, residual: Tensor, tokens: Tokens) -> None:
        """Write the embedded tokens into `residual`."""
        quantised_embedding(residual, tokens.ids, self.table, tokens.live, self.vocab_size, self.scale)
