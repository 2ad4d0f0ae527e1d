"""Rows of recurrent states and rings: which sequence has which, and which freed ring still has whose prefix."""

from collections.abc import Hashable, Sequence

from .rolling import RollingPages


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

    def release(self, sequence_id: Hashable, digests: Sequence[bytes]) -> None:
        """Free a sequence's row; `digests` are those of its full pages, all of which have been computed."""
        row, rolling = self._row_of.pop(sequence_id), self.rolling
        if rolling is not None and digests:
            self._digests[row] = list(digests)
            self._written[row] = max(self._written[row], (len(digests) + 1) * rolling.page_size + rolling.ahead)
            self._free.append(row)
        else:
            self._free.insert(0, row)

    def _cached_pages(self, row: int, digests: Sequence[bytes]) -> int:
        written_digests, rolling = self._digests.get(row), self.rolling
        if written_digests is None or rolling is None:
            return 0
        pairs = enumerate(zip(written_digests, digests, strict=False))
        common = next((page for page, (a, b) in pairs if a != b), min(len(written_digests), len(digests)))
        first_visible = max(common * rolling.page_size - rolling.window, 0)
        overwritten = self._written[row] - rolling.pages * rolling.page_size
        return common if overwritten <= first_visible else 0
