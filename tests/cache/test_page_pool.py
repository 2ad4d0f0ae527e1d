"""The page pool."""

import timeit

import pytest

from graphdecode.cache import PagePool


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
        ("evict", 1),
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
