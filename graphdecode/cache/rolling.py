"""Rolling pages: layers with a window keep the newest tokens of each sequence in a ring of pages that is its row's own.

It is the rolling buffer cache of Mistral (Jiang et al., 2023, section 2) in pages: page p of a sequence is page
p modulo the ring's length of its ring, so a page that is out of sight is written anew, and nothing has to be given
back. The ring holds the window and the longest pass: no token that a query sees is overwritten before it is read.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RollingPages:
    """The rings of all rows, which take the same pages in each layer that has them.

    Attributes:
        layers: for each layer, whether its pages roll.
        rows: rings, one for each sequence.
        pages: of a ring.
        page_size: tokens in a page.
        window: keys before its own that a query sees at most.
        ahead: tokens at most that steps may have written past those that a sequence is known to have.
    """

    layers: tuple[bool, ...]
    rows: int
    pages: int
    page_size: int
    window: int
    ahead: int

    @property
    def trash_page(self) -> int:
        """The page that nobody owns; it stands behind those of the rings."""
        return self.rows * self.pages

    def ring(self, row: int) -> range:
        """Return the pages of a row's ring."""
        return range(row * self.pages, (row + 1) * self.pages)

    def fill(self, page_row: np.ndarray, row: int) -> None:
        """Write a ring into a row of the page table, int32 [pages of a row]; `rows` is the row of nobody."""
        page_row[:] = self.trash_page if row == self.rows else np.resize(self.ring(row), len(page_row))


class StateRows:
    """Rows of what layers keep at a fixed place for each sequence: recurrent states, and rings of pages.

    The ring of a sequence that has left is remembered: one that begins alike takes it over, and goes on behind the
    tokens that both have, where their window has not been overwritten. Without rings nothing is remembered.

    Args:
        count: rows.
        rolling: the rings; None: there are none.
    """

    def __init__(self, count: int, rolling: RollingPages | None) -> None:
        self.count, self.rolling = count, rolling
        self._free = list(range(count))  # the one that has been free for longest first
        self._row_of: dict[Hashable, int] = {}
        self._digests: dict[int, list[bytes]] = {}  # of the full pages of whoever had a free row
        self._written = [0] * count  # tokens of its present contents that each row has taken at most

    @property
    def free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    def row_of(self, sequence_id: Hashable) -> int:
        """Return a sequence's row; `count` where it has none."""
        return self._row_of.get(sequence_id, self.count)

    def take(self, sequence_id: Hashable, digests: Sequence[bytes]) -> int:
        """Give a sequence a free row, and return how many pages of `digests` it holds the window behind.

        Args:
            sequence_id: of the sequence.
            digests: of its leading full pages, as far as the pages of other layers are known.
        """
        row, pages = self._free[0], 0
        for candidate in self._free:
            held = self._held_pages(candidate, digests)
            if held > pages:
                row, pages = candidate, held
        self._free.remove(row)
        self._row_of[sequence_id] = row
        self._digests.pop(row, None)
        if not pages:
            self._written[row] = 0
        return pages

    def give_back(self, sequence_id: Hashable, digests: Sequence[bytes]) -> None:
        """Take a sequence's row from it; `digests` are those of its full pages, all of which were computed."""
        row, rolling = self._row_of.pop(sequence_id), self.rolling
        if rolling is not None and digests:
            self._digests[row] = list(digests)
            self._written[row] = max(self._written[row], (len(digests) + 1) * rolling.page_size + rolling.ahead)
            self._free.append(row)
        else:
            self._free.insert(0, row)

    def _held_pages(self, row: int, digests: Sequence[bytes]) -> int:
        known, rolling = self._digests.get(row), self.rolling
        if known is None or rolling is None:
            return 0
        alike = 0  # a digest is that of all tokens before its page, too
        while alike < min(len(known), len(digests)) and known[alike] == digests[alike]:
            alike += 1
        first_seen = max(alike * rolling.page_size - rolling.window, 0)
        overwritten = self._written[row] - rolling.pages * rolling.page_size
        return alike if overwritten <= first_seen else 0
