"""The page pool, and the sharing of prefixes over it."""

import timeit

import numpy as np
import pytest
import torch

from graphdecode.cache import CacheFullError, PagedKVCacheManager, PagePool, UnknownSequenceError


def make(pages=8, page_size=4, prefix_caching=True, max_batch_size=8, max_sequence_length=64):
    return PagedKVCacheManager(
        max_batch_size,
        max_sequence_length,
        pages,
        page_size,
        1,
        4,
        torch.float32,
        device="cpu",
        prefix_caching=prefix_caching,
    )


def compute(manager, sequence, tokens):
    """Do what an engine does for a prompt; return the tokens that had to be computed."""
    cached = manager.add(sequence, tokens)
    manager.reserve(sequence, len(tokens))
    manager.commit(sequence, len(tokens), tokens)
    return len(tokens) - cached


def test_pages_come_in_ascending_runs_and_are_counted():
    pool = PagePool(6)
    assert pool.take(4) == [0, 1, 2, 3]
    pool.share([1, 2])
    assert (pool.free, pool.used, pool.shared, pool.count(1), pool.count(5)) == (2, 4, 2, 2, 0)
    pool.give_back([0, 1, 2, 3])
    assert (pool.free, pool.used, pool.shared) == (4, 2, 0)
    assert pool.take(0) == []


@pytest.mark.parametrize(
    ("verb", "argument"),
    [
        ("take", 4),
        ("take", -1),
        ("give_back", [0, 0]),
        ("give_back", [0, 3]),
        ("give_back", [9]),
        ("share", [0, 3]),
        ("share", [-1]),
        ("reclaim", 1),
    ],
)
def test_what_the_pool_cannot_do_is_an_error_that_changes_nothing(verb, argument):
    pool = PagePool(4)
    pool.take(1)
    with pytest.raises(ValueError, match="page"):
        getattr(pool, verb)(argument)
    assert (pool.free, pool.used, pool.shared, [pool.count(p) for p in range(4)]) == (3, 1, 0, [1, 0, 0, 0])


def test_giving_a_page_back_twice_is_an_error():
    pool = PagePool(2)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(ValueError, match="given back 1 times and has 0 owners"):
        pool.give_back(pages)


def test_taking_and_giving_back_do_not_depend_on_the_size_of_the_pool():
    """A pool of a million pages answers as fast as one of a hundred: nothing is searched."""

    def seconds(total):
        pool = PagePool(total)
        pool.take(total // 2)
        return min(timeit.repeat(lambda: pool.give_back(pool.take(1)), number=2000, repeat=5))

    assert seconds(1_000_000) < 20 * seconds(100)


def test_a_common_prefix_is_computed_once():
    """64 requests with a common 512-token prefix."""
    manager = make(pages=512, page_size=16, max_batch_size=64, max_sequence_length=1024)
    prefix = list(range(512))
    computed = [compute(manager, i, prefix + [1000 + i, 2000 + i]) for i in range(64)]
    assert computed == [514] + [2] * 63
    assert manager.pool.used == 512 // 16 + 64
    assert manager.pool.shared == 512 // 16


def test_a_prefix_is_found_after_its_sequence_has_left():
    manager = make()
    compute(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    manager.free_sequence("a")
    assert (manager.pool.used, manager.pool.parked, manager.available_pages) == (0, 2, 8)
    assert manager.add("b", [1, 2, 3, 4, 5, 6, 7, 8, 0]) == 8
    assert manager.pool.parked == 0


def test_at_least_one_token_is_left_to_compute():
    manager = make()
    compute(manager, "a", list(range(8)))
    assert manager.add("b", list(range(8))) == 4


def test_a_page_is_found_only_behind_the_same_tokens():
    manager = make()
    compute(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.add("b", [9, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


def test_the_least_recently_used_prefix_goes_first_and_its_head_last():
    manager = make(pages=6)
    for name, start in (("old", 100), ("new", 200)):
        compute(manager, name, list(range(start, start + 12)))
    manager.free_sequence("old")
    manager.free_sequence("new")
    assert (manager.pool.free, manager.pool.parked) == (0, 6)
    manager.add("taker")
    manager.reserve("taker", 8)  # two pages: the tail of the older one
    assert manager.add("again", [*range(100, 112), 0]) == 4
    assert manager.add("again too", [*range(200, 212), 0]) == 12


def test_pages_in_use_are_never_evicted():
    manager = make(pages=4)
    compute(manager, "a", list(range(8)))
    manager.add("b")
    with pytest.raises(CacheFullError):
        manager.reserve("b", 12)
    assert manager.pages_of("b") == ()
    assert manager.reserve("b", 8)
    assert not manager.reserve("b", 8)


def test_a_truncated_prefix_is_forgotten_before_it_is_overwritten():
    manager = make()
    compute(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    manager.truncate("a", 6)
    manager.commit("a", 8, [1, 2, 3, 4, 5, 6, 0, 0])
    assert manager.add("b", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    assert manager.add("c", [1, 2, 3, 4, 5, 6, 0, 0, 9]) == 8


def test_truncating_a_shared_page_copies_it():
    manager = make()
    manager.allocate_memory(0)
    compute(manager, "a", list(range(8)))
    manager.cache[0][0].copy_(torch.arange(9.0)[:, None, None, None].expand(9, 4, 1, 4))
    manager.fork("a", "b")
    assert manager.pages_of("a") == manager.pages_of("b")
    manager.truncate("b", 7)
    (_, source), (first, copied) = manager.pages_of("a"), manager.pages_of("b")
    assert first == manager.pages_of("a")[0]
    assert copied != source
    assert torch.equal(manager.cache[0][0][copied], torch.full((4, 1, 4), float(source)))


def test_forking_shares_full_pages_and_copies_the_partial_one():
    manager = make()
    manager.allocate_memory(0)
    compute(manager, "a", list(range(6)))
    manager.cache[0][1].normal_()
    manager.fork("a", "b")
    (full, partial), (shared, copied) = manager.pages_of("a"), manager.pages_of("b")
    assert full == shared
    assert partial != copied
    assert torch.equal(manager.cache[0][1][partial], manager.cache[0][1][copied])
    assert manager.sequences["b"] == 6


def test_a_page_row_ends_in_the_trash_page():
    manager = make(max_sequence_length=16)
    manager.add("a")
    manager.reserve("a", 5)
    row = np.full(4, -1, dtype=np.int32)
    manager.fill_page_row("a", row)
    assert row.tolist() == [*manager.pages_of("a"), 8, 8]
    assert manager.trash_page == 8


def test_unknown_and_known_ids_are_errors():
    manager = make()
    manager.add("a")
    for call in (
        lambda: manager.reserve("b", 1),
        lambda: manager.commit("b", 0),
        lambda: manager.free_sequence("b"),
        lambda: manager.fork("b", "c"),
        lambda: manager.pages_of("b"),
        lambda: manager.fill_page_row("b", np.zeros(16, dtype=np.int32)),
    ):
        with pytest.raises(UnknownSequenceError, match="'b'"):
            call()
    with pytest.raises(ValueError, match="already"):
        manager.add("a")


def test_rows_are_limited():
    manager = make(max_batch_size=1)
    manager.add("a")
    with pytest.raises(ValueError, match="max_batch_size is 1"):
        manager.add("b")


def test_reset_forgets_pages_and_prefixes():
    manager = make()
    compute(manager, "a", list(range(9)))
    manager.reset()
    assert (manager.pool.free, len(manager.sequences)) == (8, 0)
    assert manager.add("a", list(range(9))) == 0
