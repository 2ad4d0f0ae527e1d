"""`PageLedger.exchange`: some leave, some enter, and everybody has the pages for a length, or nothing has changed."""

import pytest

from graphdecode.cache import CacheFullError
from graphdecode.cache.ledger import PageLedger

PAGE = 4  # tokens


@pytest.fixture
def ledger() -> PageLedger:
    """Three sequences of six pages, one of which is free: a has two, b two, c one."""
    ledger = PageLedger(6, PAGE, prefix_caching=False)
    for name, pages in (("a", 2), ("b", 2), ("c", 1)):
        ledger.open(name)
        ledger.grow(name, pages * PAGE)
    return ledger


def test_a_sequence_of_no_tokens_enters_without_pages(ledger: PageLedger) -> None:
    ledger.exchange([], [("d", 0)])
    assert ledger.pages["d"] == []


def test_who_has_more_pages_than_its_length_takes_keeps_them(ledger: PageLedger) -> None:
    before = {name: list(pages) for name, pages in ledger.pages.items()}
    ledger.exchange([], [("a", 1), ("b", 2 * PAGE)])
    assert ledger.pages == before
    ledger.exchange([], [("a", 1), ("c", 2 * PAGE)])
    assert (ledger.pages["a"], ledger.available) == (before["a"], 0)


def test_what_some_have_too_many_is_no_room_for_others(ledger: PageLedger) -> None:
    before = {name: list(pages) for name, pages in ledger.pages.items()}
    with pytest.raises(CacheFullError, match="2 more pages are needed, 1 of 6 are available"):
        ledger.exchange([], [("a", 1), ("c", 3 * PAGE)])
    assert ledger.pages == before


def test_pages_of_who_leaves_are_there_for_who_enters(ledger: PageLedger) -> None:
    ledger.exchange(["a"], [("d", 3 * PAGE)])
    assert {name: len(pages) for name, pages in ledger.pages.items()} == {"b": 2, "c": 1, "d": 3}
    with pytest.raises(CacheFullError, match="4 more pages are needed, 3 of 6 are available"):
        ledger.exchange(["d"], [("e", 4 * PAGE)])
    assert len(ledger.pages["d"]) == 3
