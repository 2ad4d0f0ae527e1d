"""Rolling pages: layers with a window have the newest tokens of each sequence in a ring of pages of its row.

It is the rolling buffer cache of Mistral (Jiang et al., 2023, section 2) in pages: page p of a sequence is page
p % pages of its ring. The ring holds the window and the longest pass: no token is overwritten that a query attends to.
"""

from collections.abc import Hashable, Sequence
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


class StateRows:
    """Rows of recurrent states and of rings of pages, one for each sequence.

    The ring of a sequence that was removed is a prefix cache: a sequence with the same prefix takes its row, if the
    window before the end of the prefix has not been overwritten.

    Args:
        count: rows.
        rolling: the rings; None: there are none.
    """

    def __init__(self, count: int, rolling: RollingPages | None) -> None:
        self.count, self.rolling = count, rolling
        self._free = list(range(count))  # the oldest first
        self._row_of: dict[Hashable, int] = {}
        self._digests: dict[int, list[bytes]] = {}  # free row -> digests of its last sequence's full pages
        self._written = [0] * count  # for each row, an upper bound of the tokens of its contents

    @property
    def free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    def row_of(self, sequence_id: Hashable) -> int:
        """Return a sequence's row; `count` if it has none."""
        return self._row_of.get(sequence_id, self.count)

    def take(self, sequence_id: Hashable, digests: Sequence[bytes]) -> int:
        """Assign a free row to a sequence, and return the length in pages of the prefix that its ring has.

        Args:
            digests: those of the leading full pages that other layers have cached.
        """
        row, pages = self._free[0], 0
        for candidate in self._free:
            cached = self._cached_pages(candidate, digests)
            if cached > pages:
                row, pages = candidate, cached
        self._free.remove(row)
        self._row_of[sequence_id] = row
        self._digests.pop(row, None)
        if not pages:
            self._written[row] = 0
        return pages

    def give_back(self, sequence_id: Hashable, digests: Sequence[bytes]) -> None:
        """Free a sequence's row; `digests` are those of its full pages, all of which have been computed."""
        row, rolling = self._row_of.pop(sequence_id), self.rolling
        if rolling is not None and digests:
            self._digests[row] = list(digests)
            self._written[row] = max(self._written[row], (len(digests) + 1) * rolling.page_size + rolling.ahead)
            self._free.append(row)
        else:
            self._free.insert(0, row)

    def _cached_pages(self, row: int, digests: Sequence[bytes]) -> int:
        known, rolling = self._digests.get(row), self.rolling
        if known is None or rolling is None:
            return 0
        pairs = enumerate(zip(known, digests, strict=False))
        common = next((page for page, (a, b) in pairs if a != b), min(len(known), len(digests)))
        first_visible = max(common * rolling.page_size - rolling.window, 0)
        overwritten = self._written[row] - rolling.pages * rolling.page_size
        return common if overwritten <= first_visible else 0
