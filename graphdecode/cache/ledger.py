"""The page ledger, on the host: the pages of each sequence, and the index of cached prefixes.

Methods that raise have changed nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from .errors import CacheFullError
from .pool import PagePool

_ROOT = b""
_DIGEST_BYTES = 16


def prefix_root(adapter: int | None, cache_salt: str | None) -> bytes:
    """Return what the digests of a sequence's prefixes begin with: its adapter's number, and its salt.

    It is longer than a digest, so that no salt is taken for one of another sequence's pages.
    """
    if adapter is None and cache_salt is None:
        return _ROOT
    salt = "" if cache_salt is None else f"/{cache_salt}"
    return blake2b(f"{adapter}{salt}".encode("utf-8", "surrogatepass"), digest_size=2 * _DIGEST_BYTES).digest()


class Checkpoints(NamedTuple):
    """Room for copies of recurrent states at the ends of pages."""

    capacity: int  # states that are kept at the same time, >= 1
    interval: int  # pages from one border to the next; states are kept at borders only


class PrefixIndex:
    """Pages by the digest of their tokens, chained with the digest of the page before.

    Two pages of one digest have the same contents: their tokens and all tokens before them are the same.

    Args:
        page_size: tokens in a page.
        checkpoints: of recurrent states; a prefix is found up to one of them. None: there are no such states.
    """

    def __init__(self, page_size: int, checkpoints: Checkpoints | None = None) -> None:
        self.page_size, self._checkpoints = page_size, checkpoints
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._checkpoint_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._free_checkpoints = [] if checkpoints is None else list(range(checkpoints.capacity))

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: object) -> bool:
        return page in self._digest_of

    def digests(self, token_ids: Sequence[int], start: int, stop: int, parent: bytes = _ROOT) -> Iterator[bytes]:
        """Yield the digests of a sequence's full pages `start` to `stop`; `parent` is that of page `start - 1`."""
        size = self.page_size
        for page in range(start, stop):
            tokens = np.asarray(token_ids[page * size : (page + 1) * size], dtype=np.int64)
            parent = blake2b(parent + tokens.tobytes(), digest_size=_DIGEST_BYTES).digest()
            yield parent

    def find(self, token_ids: Sequence[int], max_pages: int, root: bytes = _ROOT) -> tuple[list[int], list[bytes]]:
        """Return the pages of the longest cached prefix of these tokens below a root, and their digests."""
        pages: list[int] = []
        matched: list[bytes] = []
        for digest in self.digests(token_ids, 0, max_pages, root):
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
            matched.append(digest)
        if self._checkpoints is not None:
            borders = range(len(matched) - len(matched) % self._checkpoints.interval, 0, -self._checkpoints.interval)
            end = next((border for border in borders if matched[border - 1] in self._checkpoint_of), 0)
            pages, matched = pages[:end], matched[:end]
        return pages, matched

    @property
    def num_checkpoints(self) -> int:
        """Number of checkpoints in use."""
        return len(self._checkpoint_of)

    def checkpoint_of(self, digest: bytes) -> int:
        """Return the checkpoint of a prefix that `find` has returned, and note its use."""
        self._checkpoint_of.move_to_end(digest)
        return self._checkpoint_of[digest]

    def new_checkpoint(self, digest: bytes, superseded: bytes | None = None) -> int | None:
        """Return a checkpoint for the state behind an indexed page; None if it has one.

        If none is free, that of the page `superseded` is taken, else the one used least recently.
        """
        if digest in self._checkpoint_of or digest not in self._page_of:
            return None
        if self._free_checkpoints:
            checkpoint = self._free_checkpoints.pop()
        elif superseded is not None and superseded in self._checkpoint_of:
            checkpoint = self._checkpoint_of.pop(superseded)
        else:
            checkpoint = self._checkpoint_of.popitem(last=False)[1]
        self._checkpoint_of[digest] = checkpoint
        return checkpoint

    def put(self, digest: bytes, page: int) -> None:
        """Index a page, unless its contents or the page itself are indexed already."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def forget(self, page: int) -> None:
        """Remove a page whose contents are about to change, if it is indexed, and the checkpoint behind it."""
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]
            if digest in self._checkpoint_of:
                self._free_checkpoints.append(self._checkpoint_of.pop(digest))


class PageLedger:
    """The pages of every sequence, in order, over one pool and, with prefix caching, one index.

    A page that a sequence may still write to (its partial last page and those past it) has no other owner and is not
    in the index. Full pages may have many owners.

    With `prefix_caching`, full pages are indexed by their tokens. `checkpoints`: see `PrefixIndex`.
    """

    def __init__(
        self, total_num_pages: int, page_size: int, *, prefix_caching: bool, checkpoints: Checkpoints | None = None
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be >= 1, got {page_size!r}")
        self.pool = PagePool(total_num_pages)
        self.page_size, self._checkpoints = page_size, checkpoints
        self.prefixes = PrefixIndex(page_size, checkpoints) if prefix_caching else None
        self.pages: dict[Hashable, list[int]] = {}
        self._digests: dict[Hashable, list[bytes]] = {}  # digests of the leading full pages whose tokens are known
        self._roots: dict[Hashable, bytes] = {}  # parent of the first digest

    @property
    def available(self) -> int:
        """Free and evictable pages."""
        return self.pool.free + self.pool.evictable

    def pages_for(self, length: int) -> int:
        """Return how many pages hold `length` tokens."""
        return -(-length // self.page_size)

    def clear(self) -> None:
        """Forget all sequences and prefixes."""
        self.pool.reset()
        if self.prefixes is not None:
            self.prefixes = PrefixIndex(self.page_size, self._checkpoints)
        self.pages.clear()
        self._digests.clear()
        self._roots.clear()

    def open(self, sequence_id: Hashable, token_ids: Sequence[int] | None = None, root: bytes = _ROOT) -> int:
        """Add a sequence with the pages of its longest cached prefix below a root; return their tokens, never all."""
        pages: list[int] = []
        digests: list[bytes] = []
        if token_ids is not None and self.prefixes is not None:
            pages, digests = self.prefixes.find(token_ids, max(len(token_ids) - 1, 0) // self.page_size, root)
            self.pool.share(pages)
        self.pages[sequence_id] = pages
        self._digests[sequence_id], self._roots[sequence_id] = digests, root
        return len(pages) * self.page_size

    def digests_of(self, sequence_id: Hashable) -> Sequence[bytes]:
        """Return the digests of a sequence's leading full pages whose tokens are known."""
        return self._digests[sequence_id]

    def close(self, sequence_id: Hashable) -> None:
        """Remove a sequence; its pages that are in the index become evictable."""
        self._give_back(self.pages.pop(sequence_id))
        del self._digests[sequence_id], self._roots[sequence_id]

    def hide(self, sequence_id: Hashable) -> None:
        """Remove a sequence's pages from the index."""
        if self.prefixes is not None:
            for page in self.pages[sequence_id]:
                self.prefixes.forget(page)

    def grow(self, sequence_id: Hashable, length: int) -> bool:
        """Allocate a sequence's pages for `length` tokens, or raise CacheFullError; return whether any were missing."""
        missing = self.pages_for(length) - len(self.pages[sequence_id])
        if missing <= 0:
            return False
        self.pages[sequence_id].extend(self._take(missing))
        return True

    def exchange(self, leaving: Iterable[Hashable], lengths: Iterable[tuple[Hashable, int]]) -> None:
        """Close `leaving`, open the sequences of `lengths` that are new, and allocate pages for these lengths.

        Raises:
            CacheFullError: there are not enough pages, even with those of `leaving`.
        """
        leaving = list(leaving)
        needs = [(i, self.pages_for(length) - len(self.pages.get(i, ()))) for i, length in lengths]
        needed = sum(max(missing, 0) for _, missing in needs)
        if needed > self.available:
            leaving_owners = Counter(page for i in leaving for page in self.pages[i])
            freed = sum(times == self.pool.count(page) for page, times in leaving_owners.items())
            if needed > self.available + freed:
                raise CacheFullError(
                    f"{needed} more pages are needed, {self.available + freed} of {self.pool.total} are available"
                )
        for i in leaving:
            self.close(i)
        for i, missing in needs:
            if i not in self.pages:
                self.open(i)
            if missing > 0:
                self.pages[i].extend(self._take(missing))

    def publish(self, sequence_id: Hashable, length: int, token_ids: Sequence[int]) -> None:
        """Index the full pages of the first `length` tokens, whose keys and values have been computed."""
        if self.prefixes is None:
            return
        digests = self._digests[sequence_id]
        start, stop = len(digests), length // self.page_size
        if start >= stop:
            return
        pages = self.pages[sequence_id][start:stop]
        new = list(self.prefixes.digests(token_ids, start, stop, digests[-1] if digests else self._roots[sequence_id]))
        for page, digest in zip(pages, new, strict=True):
            self.prefixes.put(digest, page)
        digests.extend(new)

    def fork(self, parent: Hashable, child: Hashable, length: int) -> tuple[int, int] | None:
        """Add `child` with the parent's full pages, shared, and a page for a copy of the partial one.

        Returns:
            (source page, destination page) of the copy to make, or None.

        Raises:
            CacheFullError: there is no page for the partial one.
        """
        full, partial = divmod(length, self.page_size)
        tail = self._take(1) if partial else []
        pages = self.pages[parent][:full]
        self.pool.share(pages)
        self.pages[child] = pages + tail
        self._digests[child], self._roots[child] = self._digests[parent][:full], self._roots[parent]
        return (self.pages[parent][full], tail[0]) if partial else None

    def truncate(self, sequence_id: Hashable, length: int) -> tuple[int, int] | None:
        """Free the pages past `length` tokens.

        A last page that becomes partial will be written to: it is copied if it is shared, else removed from the index.

        Returns:
            (source page, destination page) of the copy to make, or None.

        Raises:
            CacheFullError: there is no page for the copy.
        """
        pages = self.pages[sequence_id]
        keep = self.pages_for(length)
        tail = pages[keep:]
        partial = bool(length % self.page_size)
        must_copy = partial and self.pool.count(pages[keep - 1]) > 1
        if must_copy and not self.available and not any(self.pool.count(page) == 1 for page in tail):
            raise CacheFullError("no page is free for a copy of the shared page that becomes partial")
        self._give_back(tail)
        pages = self.pages[sequence_id] = pages[:keep]  # a new list: steps compare lists by identity
        del self._digests[sequence_id][length // self.page_size :]
        if not partial:
            return None
        if not must_copy:
            if self.prefixes is not None:
                self.prefixes.forget(pages[-1])
            return None
        source = pages[-1]
        pages[-1] = self._take(1)[0]
        self._give_back([source])
        return source, pages[-1]

    def _give_back(self, pages: list[int]) -> None:
        self.pool.give_back(pages, keep=self.prefixes if self.prefixes is not None else ())

    def _take(self, n: int) -> list[int]:
        if n > self.available:
            raise CacheFullError(f"{n} more pages are needed, {self.available} of {self.pool.total} are available")
        if n > self.pool.free and self.prefixes is not None:
            for page in self.pool.evict(n - self.pool.free):
                self.prefixes.forget(page)
        return self.pool.take(n)
