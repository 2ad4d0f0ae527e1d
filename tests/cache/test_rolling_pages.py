"""Rings of pages: what a query sees is there, in any life of rows that come, go, and take each other's rings over."""

import random

import numpy as np
import pytest
import torch

from graphdecode.cache import CacheFullError, PagedKVCache, RollingPages
from graphdecode.cache.rolling import StateRows

PAGE = 4


def rings(rows: int = 3, pages: int = 7, window: int = 9, ahead: int = 2) -> RollingPages:
    return RollingPages((True, False), rows, pages, PAGE, window, ahead)


def cache_of(rolling: RollingPages, total_num_pages: int = 60) -> PagedKVCache:
    return PagedKVCache(
        num_layers=2, total_num_pages=total_num_pages, page_size=PAGE, max_pages_per_row=40, num_kv_heads=1, head_dim=2,
        dtype=torch.float32, device="cpu", prefix_caching=True, state_rows=rolling.rows, rolling=rolling,
    )  # fmt: skip


def test_a_page_row_names_the_ring_again_and_again_and_nobodys_names_the_trash_page() -> None:
    rolling, row = rings(), np.zeros(10, np.int32)
    rolling.fill(row, 1)
    assert row.tolist() == [*range(7, 14), 7, 8, 9]
    rolling.fill(row, rolling.rows)
    assert set(row.tolist()) == {rolling.trash_page} == {21}


def test_layers_that_roll_have_the_pages_of_all_rings() -> None:
    cache = cache_of(rings())
    assert [layer.keys.shape[0] for layer in cache.layers] == [3 * 7 + 1, 61]
    assert [layer.is_rolling for layer in cache.layers] == [True, False]


def test_a_sequence_without_a_ring_is_refused_and_changes_nothing() -> None:
    cache = cache_of(rings())
    for name in range(3):
        cache.add(name, None)
    with pytest.raises(CacheFullError, match="all 3 rows of states are in use"):
        cache.add(3, None)
    cache.free(1)
    assert cache.add(3, None) == 0
    assert sorted(map(cache.state_row_of, (0, 2, 3))) == [0, 1, 2]


def test_a_hidden_ring_is_taken_over_by_nobody() -> None:
    for hides in (False, True):
        cache, tokens = cache_of(rings()), list(range(20))
        cache.add("first", tokens)
        cache.reserve("first", 20)
        cache.publish("first", 20, tokens)
        if hides:
            cache.hide("first")
        cache.free("first")
        assert cache.add("second", tokens) == (0 if hides else 16)


@pytest.mark.parametrize("seed", range(40))
def test_every_token_that_a_query_sees_is_its_own_lines(seed: int) -> None:
    """Each write leaves its line of tokens in its place; each read of a window finds the line of the reader there."""
    rng = random.Random(seed)
    longest, window, ahead = rng.randrange(1, 13), rng.randrange(0, 20), rng.randrange(0, 6)
    pages = -(-(window + longest + 1) // PAGE) + rng.randrange(0, 5)
    rolling = rings(rng.randrange(1, 5), pages, window, ahead)
    cache, table = cache_of(rolling, rng.choice([45, 80, 160])), np.zeros(40, np.int32)
    held: dict[tuple[int, int], tuple[int, ...]] = {}  # page and place -> the tokens up to the one that is there
    lives: dict[int, tuple[list[int], int]] = {}  # tokens, and how many are computed
    told = [[rng.randrange(2) for _ in range(rng.randrange(1, 60))] for _ in range(3)]  # beginnings
    taken_over = 0

    def place(position: int) -> tuple[int, int]:
        return int(table[position // PAGE]), position % PAGE

    for name in range(250):
        if rng.random() < 0.4 and len(lives) < rolling.rows:
            beginning = rng.choice(told)
            tokens = beginning[: rng.randrange(1, len(beginning) + 1)] + [rng.randrange(2) for _ in range(100)]
            tokens = tokens[: rng.randrange(2, 110)]
            known = cache.add(name, tokens)
            taken_over += known > 0
            try:
                cache.reserve(name, len(tokens))
                lives[name] = (tokens, known)
            except CacheFullError:
                cache.free(name)
        for live in rng.sample(list(lives), min(len(lives), 2)):
            tokens, computed = lives[live]
            end = min(computed + rng.randrange(1, longest + 1), len(tokens))
            rolling.fill(table, cache.state_row_of(live))
            for position in range(computed, end):
                held[place(position)] = tuple(tokens[: position + 1])
            for query in range(computed, end):
                for seen in range(max(query - window, 0), query + 1):
                    assert held[place(seen)] == tuple(tokens[: seen + 1]), (seed, live, query, seen)
            if end == len(tokens):  # steps that were under way when it ended
                for position in range(end, min(end + ahead, 159)):
                    held[place(position)] = ()
            lives[live] = (tokens, end)
            cache.publish(live, end, tokens)
            if end == len(tokens) or rng.random() < 0.05:
                told = [*told[-4:], tokens[:end]]
                del lives[live]
                cache.free(live)
    assert taken_over > 0


def test_rows_without_rings_remember_nothing() -> None:
    rows = StateRows(2, None)
    assert rows.take("a", [b"x"]) == 0
    rows.give_back("a", [b"x"])
    assert rows.take("b", [b"x"]) == 0
