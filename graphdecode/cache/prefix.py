"""The prefix index: full pages found again by the tokens in them and everything before them."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

_ROOT = b""
_DIGEST_BYTES = 16


class PrefixIndex:
    """Pages by the digest of their tokens, chained with the digest of the page before.

    A page's keys and values depend on its tokens and on all tokens before it, and so does its digest: two pages of
    one digest hold the same contents. Knows nothing of who owns a page.

    Args:
        page_size: tokens in a page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: object) -> bool:
        return page in self._digest_of

    def digests(self, token_ids: Sequence[int], start: int, stop: int, parent: bytes = _ROOT) -> Iterator[bytes]:
        """Yield the digests of the full pages `start` to `stop` of a sequence; `parent` is that of page `start - 1`."""
        size = self.page_size
        for page in range(start, stop):
            tokens = np.asarray(token_ids[page * size : (page + 1) * size], dtype=np.int64)
            parent = blake2b(parent + tokens.tobytes(), digest_size=_DIGEST_BYTES).digest()
            yield parent

    def find(self, token_ids: Sequence[int], max_pages: int) -> tuple[list[int], list[bytes]]:
        """Return the pages that hold the longest known prefix of these tokens, and their digests."""
        pages: list[int] = []
        found: list[bytes] = []
        for digest in self.digests(token_ids, 0, max_pages):
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
            found.append(digest)
        return pages, found

    def put(self, digest: bytes, page: int) -> None:
        """Make a page findable, unless another one of the same contents is, or it is itself under another digest."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def forget(self, page: int) -> None:
        """Make a page unfindable, if it was findable: its contents are about to change."""
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]
