"""The page pool: reference counts of pages, and which are free."""

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Sequence

from .errors import CacheFullError


class PagePool:
    """Reference counts of pages 0..total_num_pages-1; taking and giving back a page is O(1).

    A page is free, used (one owner or more), or evictable: without an owner, but with cached contents. `share` makes
    evictable pages used again, `evict` frees the oldest ones.
    """

    def __init__(self, total_num_pages: int) -> None:
        if total_num_pages < 1:
            raise ValueError(f"total_num_pages must be >= 1, got {total_num_pages!r}")
        self.total = total_num_pages
        self.reset()

    def reset(self) -> None:
        """Make every page free."""
        self._counts = [0] * self.total
        self._free = list(range(self.total - 1, -1, -1))  # a stack, from which ascending runs are taken
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self.shared = 0  # pages with two owners or more

    @property
    def free(self) -> int:
        """Pages that `take` can return."""
        return len(self._free)

    @property
    def evictable(self) -> int:
        """Pages without an owner whose contents are cached."""
        return len(self._evictable)

    @property
    def used(self) -> int:
        """Pages with one owner or more."""
        return self.total - len(self._free) - len(self._evictable)

    def count(self, page: int) -> int:
        """Return how many owners a page has, or raise ValueError if there is no such page."""
        self._check(page)
        return self._counts[page]

    def take(self, n: int) -> list[int]:
        """Take `n` free pages, each of which has one owner then.

        Raises:
            CacheFullError: fewer than `n` pages are free.
            ValueError: `n` is negative.
        """
        if n < 0:
            raise ValueError(f"the number of pages to take must be >= 0, got {n}")
        if n > len(self._free):
            raise CacheFullError(f"{n} pages are needed, {len(self._free)} of {self.total} are free")
        if n == 0:
            return []
        pages = self._free[: -n - 1 : -1]
        del self._free[-n:]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one owner to each of these pages, used or evictable.

        Raises:
            ValueError: a page is free or does not exist; nothing has changed.
        """
        pages = list(pages)
        for page in pages:
            self._check(page)
            if not self._counts[page] and page not in self._evictable:
                raise ValueError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._evictable.pop(page, None)
            self._counts[page] += 1
            self.shared += self._counts[page] == 2

    def give_back(self, pages: Sequence[int], keep: Container[int] = ()) -> None:
        """Remove one owner from each of these pages; those without any are evictable if in `keep`, else free.

        The last page is evicted first: prefixes are found from their first page on.

        Raises:
            ValueError: a page does not exist or is given back more often than it is owned; nothing has changed.
        """
        for page, times in Counter(pages).items():
            self._check(page)
            if times > self._counts[page]:
                raise ValueError(f"page {page} is given back {times} times and has {self._counts[page]} owners")
        for page in reversed(pages):
            self._counts[page] -= 1
            self.shared -= self._counts[page] == 1
            if self._counts[page]:
                continue
            if page in keep:
                self._evictable[page] = None
            else:
                self._free.append(page)

    def evict(self, n: int) -> list[int]:
        """Free the `n` pages that have been evictable for longest, and return them.

        Raises:
            CacheFullError: fewer than `n` pages are evictable; nothing has changed.
        """
        if n > len(self._evictable):
            raise CacheFullError(f"{n} pages are needed, {len(self._evictable)} are evictable")
        pages = [self._evictable.popitem(last=False)[0] for _ in range(n)]
        self._free.extend(pages)
        return pages

    def _check(self, page: int) -> None:
        if not 0 <= page < self.total:
            raise ValueError(f"page must be in 0..{self.total - 1}, got {page!r}")

    def __repr__(self) -> str:
        return (
            f"PagePool({self.total} pages: {self.used} used, {self.shared} of them shared, "
            f"{self.evictable} evictable, {self.free} free)"
        )
