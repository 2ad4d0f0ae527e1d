"""Rolling pages: layers with a window have the newest tokens of each sequence in a ring of pages of its row.

It is the rolling buffer cache of Mistral (Jiang et al., 2023, section 2) in pages: page p of a sequence is page
p % pages of its ring. The ring holds the window and the longest pass: no token is overwritten that a query attends to.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RollingPages:
    """The rings of all rows, the same in each layer that has them."""

    layers: tuple[bool, ...]  # whether the pages of each layer are rings
    rows: int  # rings, one for each sequence
    pages: int  # number of pages of a ring
    page_size: int  # tokens in a page
    window: int  # most keys before its own that a query attends to
    ahead: int  # most tokens that steps in flight may have written past those that the host has read

    @property
    def null_page(self) -> int:
        """The page after those of the rings, for padding."""
        return self.rows * self.pages

    def ring(self, row: int) -> range:
        """Return the pages of a row's ring."""
        return range(row * self.pages, (row + 1) * self.pages)

    def fill(self, page_row: np.ndarray, row: int) -> None:
        """Write a ring into a row of the page table, int32 [pages of a row]; `rows` is the padding row."""
        page_row[:] = self.null_page if row == self.rows else np.resize(self.ring(row), len(page_row))
