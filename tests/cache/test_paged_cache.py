"""The paged cache that an engine drives: pages by sequence, and the sharing of prefixes."""

import random
import time
import timeit

import numpy as np
import pytest
import torch
from faults import Fault, with_attributes
from repeated import holds

from graphdecode.cache import (
    CacheFullError,
    Checkpoints,
    PagedKVCache,
    PagePool,
    Recurrent,
    RollingPages,
    UnknownSequenceError,
    fill_page_row,
)
from graphdecode.cache.ledger import PageLedger, PrefixIndex
from graphdecode.cache.state_rows import StateRows


def make(pages=8, page_size=4, prefix_caching=True, max_pages_per_row=16, num_layers=1):
    return PagedKVCache(
        num_layers=num_layers,
        total_num_pages=pages,
        page_size=page_size,
        max_pages_per_row=max_pages_per_row,
        num_kv_heads=1,
        head_dim=4,
        dtype=torch.float32,
        device="cpu",
        prefix_caching=prefix_caching,
    )


def compute(cache, sequence, tokens):
    """Do what an engine does for a prompt; return the tokens that had to be computed."""
    cached = cache.add(sequence, tokens)
    cache.reserve(sequence, len(tokens))
    cache.publish(sequence, len(tokens), tokens)
    return len(tokens) - cached


def test_a_common_prefix_is_computed_once():
    """64 requests with a common 512-token prefix."""
    cache = make(pages=512, page_size=16, max_pages_per_row=64)
    prefix = list(range(512))
    computed = [compute(cache, i, prefix + [1000 + i, 2000 + i]) for i in range(64)]
    assert computed == [514] + [2] * 63
    assert cache.pool.used == 512 // 16 + 64
    assert cache.pool.shared == 512 // 16


def test_a_prefix_is_found_after_its_sequence_has_left():
    cache = make()
    compute(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.free("a")
    assert (cache.pool.used, cache.pool.evictable, cache.available_pages) == (0, 2, 8)
    assert cache.add("b", [1, 2, 3, 4, 5, 6, 7, 8, 0]) == 8
    assert cache.pool.evictable == 0


def test_the_least_recently_used_prefix_goes_first_and_its_head_last():
    cache = make(pages=6)
    for name, start in (("old", 100), ("new", 200)):
        compute(cache, name, list(range(start, start + 12)))
    cache.free("old")
    cache.free("new")
    assert (cache.pool.free, cache.pool.evictable) == (0, 6)
    cache.add("taker", [])
    cache.reserve("taker", 8)  # two pages: the tail of the older one
    assert cache.add("again", [*range(100, 112), 0]) == 4
    assert cache.add("again too", [*range(200, 212), 0]) == 12


def test_a_truncated_prefix_leaves_the_index():
    cache = make()
    compute(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    cache.truncate("a", 6)
    cache.publish("a", 8, [1, 2, 3, 4, 5, 6, 0, 0])
    assert cache.add("b", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    assert cache.add("c", [1, 2, 3, 4, 5, 6, 0, 0, 9]) == 8


def test_truncating_a_shared_page_copies_it_in_all_layers():
    cache = make(num_layers=2)
    compute(cache, "a", list(range(8)))
    for number, tensor in enumerate(tensor for layer in cache.layers for tensor in layer):
        tensor.copy_(10.0 * number + torch.arange(9.0)[:, None, None, None].expand(9, 4, 1, 4))
    assert cache.add("b", list(range(9))) == 8
    assert cache.pages_of("a") == cache.pages_of("b")
    cache.truncate("b", 7)
    (_, source), (first, copied) = cache.pages_of("a"), cache.pages_of("b")
    assert first == cache.pages_of("a")[0]
    assert copied != source
    for number, tensor in enumerate(tensor for layer in cache.layers for tensor in layer):
        assert torch.equal(tensor[copied], torch.full((4, 1, 4), 10.0 * number + source))


def test_layers_are_zero_filled_and_one_page_more_is_null():
    cache = make(num_layers=3)
    assert [tuple(t.shape) for layer in cache.layers for t in layer] == [(9, 4, 1, 4)] * 6
    assert not any(t.any() for layer in cache.layers for t in layer)
    assert len({t.data_ptr() for layer in cache.layers for t in layer}) == 6


def test_without_prefix_caching_nothing_is_found():
    cache = make(prefix_caching=False)
    compute(cache, "a", list(range(9)))
    assert cache.add("b", list(range(9))) == 0
    cache.free("a")
    assert (cache.pool.free, cache.pool.evictable) == (8, 0)


def test_publishing_hashes_new_full_pages_alone():
    cache = make()
    tokens = Watched(range(32))
    cache.add("a", tokens[:0])
    cache.reserve("a", 32)
    cache.publish("a", 13, tokens)
    assert tokens.slices == [slice(0, 4), slice(4, 8), slice(8, 12)]
    cache.publish("a", 15, tokens)
    cache.publish("a", 12, tokens)
    assert len(tokens.slices) == 3
    cache.publish("a", 16, tokens)
    assert tokens.slices[3:] == [slice(12, 16)]


class Watched(list):
    """A list of token ids that remembers which slices were read."""

    def __init__(self, values):
        super().__init__(values)
        self.slices = []

    def __getitem__(self, place):
        if isinstance(place, slice) and place.stop:
            self.slices.append(slice(place.start, place.stop))
        return super().__getitem__(place)


def test_a_page_row_ends_in_the_null_page():
    cache = make(max_pages_per_row=4)
    cache.add("a", [])
    cache.reserve("a", 5)
    row = np.full(4, -1, dtype=np.int32)
    fill_page_row(row, cache.pages_of("a"), cache.null_page)
    assert row.tolist() == [*cache.pages_of("a"), 8, 8]
    assert cache.null_page == 8


def test_unknown_and_known_ids_are_errors():
    cache = make()
    cache.add("a", [])
    for call in (
        lambda: cache.reserve("b", 1),
        lambda: cache.publish("b", 0, []),
        lambda: cache.truncate("b", 0),
        lambda: cache.free("b"),
        lambda: cache.pages_of("b"),
    ):
        with pytest.raises(UnknownSequenceError, match="'b'"):
            call()
    with pytest.raises(ValueError, match="'a'"):
        cache.add("a", [])


def test_lengths_past_a_row_or_its_pages_are_errors():
    cache = make(max_pages_per_row=4)
    cache.add("a", [])
    with pytest.raises(ValueError, match=r"'a' .*0\.\.16 .*17"):
        cache.reserve("a", 17)
    cache.reserve("a", 8)
    for call in (
        lambda: cache.truncate("a", 9),
        lambda: cache.truncate("a", -1),
        lambda: cache.publish("a", 9, [0] * 9),
    ):
        with pytest.raises(ValueError, match=r"'a' .*0\.\.8 "):
            call()
    with pytest.raises(ValueError, match="token_ids .*8 .*7"):
        cache.publish("a", 8, [0] * 7)


@pytest.mark.parametrize("size", ["num_layers", "page_size", "max_pages_per_row"])
def test_invalid_sizes_are_refused_by_name(size):
    with pytest.raises(ValueError, match=rf"{size} .*0"):
        make(**{size: 0})


def test_repr_is_one_line():
    cache = make(num_layers=2)
    compute(cache, "a", list(range(9)))
    assert "1 sequences, PagePool(8 pages: 3 used" in repr(cache)
    assert "2 layers of [9, 4, 1, 4] float32" in repr(cache)
    assert "\n" not in repr(cache)


def test_reset_forgets_pages_and_prefixes():
    cache = make()
    compute(cache, "a", list(range(9)))
    cache.reset()
    assert (cache.pool.free, len(cache.ledger.pages)) == (8, 0)
    assert cache.add("a", list(range(9))) == 0


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


def test_surplus_pages_stay_with_their_sequence(ledger: PageLedger) -> None:
    before = {name: list(pages) for name, pages in ledger.pages.items()}
    ledger.exchange([], [("a", 1), ("b", 2 * PAGE)])
    assert ledger.pages == before
    ledger.exchange([], [("a", 1), ("c", 2 * PAGE)])
    assert (ledger.pages["a"], ledger.available) == (before["a"], 0)


def test_surplus_pages_of_a_sequence_are_not_available(ledger: PageLedger) -> None:
    before = {name: list(pages) for name, pages in ledger.pages.items()}
    with pytest.raises(CacheFullError, match="2 .*1 of 6"):
        ledger.exchange([], [("a", 1), ("c", 3 * PAGE)])
    assert ledger.pages == before


def test_pages_of_leaving_sequences_serve_new_ones(ledger: PageLedger) -> None:
    ledger.exchange(["a"], [("d", 3 * PAGE)])
    assert {name: len(pages) for name, pages in ledger.pages.items()} == {"b": 2, "c": 1, "d": 3}
    with pytest.raises(CacheFullError, match="4 .*3 of 6"):
        ledger.exchange(["d"], [("e", 4 * PAGE)])
    assert len(ledger.pages["d"]) == 3


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
def test_invalid_calls_of_the_pool_change_nothing(verb, argument):
    pool = PagePool(4)
    pool.take(1)
    with pytest.raises(ValueError, match="page"):
        getattr(pool, verb)(argument)
    assert (pool.free, pool.used, pool.shared, [pool.count(p) for p in range(4)]) == (3, 1, 0, [1, 0, 0, 0])


def test_taking_and_returning_pages_is_o_1():
    """A pool of a million pages answers as fast as one of a hundred: nothing is searched."""

    def seconds(total):
        pool = PagePool(total)
        pool.take(total // 2)
        work, clock = (lambda: pool.give_back(pool.take(1))), time.process_time
        return min(timeit.repeat(work, timer=clock, number=5000, repeat=5))

    assert holds(lambda _: seconds(1_000_000) < 20 * seconds(100))


def rings(rows: int = 3, pages: int = 7, window: int = 9, ahead: int = 2) -> RollingPages:
    return RollingPages((True, False), rows, pages, PAGE, window, ahead)


def cache_of(rolling: RollingPages, total_num_pages: int = 60) -> PagedKVCache:
    return PagedKVCache(
        num_layers=2, total_num_pages=total_num_pages, page_size=PAGE, max_pages_per_row=40, num_kv_heads=1, head_dim=2,
        dtype=torch.float32, device="cpu", prefix_caching=True, state_rows=rolling.rows, rolling=rolling,
    )  # fmt: skip


def test_a_page_row_repeats_its_ring_and_a_padding_row_has_the_null_page() -> None:
    rolling, row = rings(), np.zeros(10, np.int32)
    rolling.fill(row, 1)
    assert row.tolist() == [*range(7, 14), 7, 8, 9]
    rolling.fill(row, rolling.rows)
    assert set(row.tolist()) == {rolling.null_page} == {21}


def test_rolling_layers_have_the_pages_of_all_rings() -> None:
    cache = cache_of(rings())
    assert [layer.keys.shape[0] for layer in cache.layers] == [3 * 7 + 1, 61]
    assert [layer.is_rolling for layer in cache.layers] == [True, False]


def test_a_sequence_without_a_ring_is_refused_and_changes_nothing() -> None:
    cache = cache_of(rings())
    for name in range(3):
        cache.add(name, None)
    with pytest.raises(CacheFullError, match="3 rows"):
        cache.add(3, None)
    cache.free(1)
    assert cache.add(3, None) == 0
    assert sorted(map(cache.state_row_of, (0, 2, 3))) == [0, 1, 2]


def test_a_hidden_ring_is_not_reused() -> None:
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
def test_every_token_in_a_window_is_of_its_own_sequence(seed: int) -> None:
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


def test_rows_without_rings_keep_no_digests() -> None:
    rows = StateRows(2, None)
    assert rows.take("a", [b"x"]) == 0
    rows.release("a", [b"x"])
    assert rows.take("b", [b"x"]) == 0


def cache_with_checkpoints(count: int, interval: int, total_num_pages: int = 60) -> PagedKVCache:
    return PagedKVCache(
        num_layers=3, total_num_pages=total_num_pages, page_size=PAGE, max_pages_per_row=40, num_kv_heads=1, head_dim=2,
        dtype=torch.float32, device="cpu", prefix_caching=True, state_rows=3, checkpoints=Checkpoints(count, interval),
        recurrent=[None, Recurrent((("state", (2,)),)), Recurrent((("state", (1,)),), beside_keys=True)],
    )  # fmt: skip


def advance(cache: PagedKVCache, name: object, tokens: list[int], start: int) -> int:
    """Compute a sequence as chunks that end at checkpoints; its state counts its tokens. Return its length."""
    cache.restore_state(name)
    cache.reserve(name, len(tokens))
    while start < len(tokens):
        end = min((start // cache.checkpoint_tokens + 1) * cache.checkpoint_tokens, len(tokens))
        for layer, tensor in enumerate(cache.layers[at].tensors["state"] for at in (1, 2)):
            tensor[cache.state_row_of(name)] = 1000 * layer + end
        cache.save_state(name, end, tokens[:end])
        start = end
    return start


def test_a_prefix_is_found_up_to_a_checkpoint_whose_state_its_row_gets() -> None:
    cache, tokens = cache_with_checkpoints(2, interval=2), list(range(7 * PAGE))
    assert [layer.tensors["state"].shape[0] for layer in cache.layers[1:]] == [3 + 1 + 2] * 2
    assert cache.add("first", tokens) == 0
    advance(cache, "first", tokens, 0)  # leaves those behind pages 4 and 6; that behind 2 made room
    assert cache.add("second", [*tokens[: 5 * PAGE], 99]) == 4 * PAGE
    cache.restore_state("second")
    row = cache.state_row_of("second")
    assert [layer.tensors["state"][row].unique().tolist() for layer in cache.layers[1:]] == [[16], [1016]]
    assert cache.add("third", tokens[: 3 * PAGE]) == 0
    cache.free("second")
    other = [50 + token for token in tokens[: 2 * PAGE]]
    assert cache.add("fourth", other) == 0
    advance(cache, "fourth", other, 0)  # takes the place of the one that was used least recently, behind page 6
    for name in ("third", "first"):
        cache.free(name)
    assert cache.add("fifth", [*tokens, 99]) == 4 * PAGE


def test_a_checkpoint_goes_with_its_page() -> None:
    cache, tokens = cache_with_checkpoints(4, interval=1, total_num_pages=4), list(range(4 * PAGE))
    cache.add("first", tokens)
    advance(cache, "first", tokens, 0)
    cache.free("first")
    cache.add("second", None)
    cache.reserve("second", 2 * PAGE)  # the last pages are evicted first
    assert cache.add("third", tokens) == 2 * PAGE
    cache.hide("third")
    cache.free("third")
    assert cache.add("fourth", tokens) == 0
    assert cache.ledger.prefixes is not None
    assert cache.ledger.prefixes.num_checkpoints == 0


def live_with_checkpoints(seed: int) -> int:
    """Check that each row starts from the state of its own tokens; return how many tokens were found."""
    rng = random.Random(seed)
    cache = cache_with_checkpoints(rng.randrange(1, 6), rng.randrange(1, 4), rng.choice([45, 60, 120]))
    code: dict[tuple[int, ...], int] = {}
    states = cache.layers[1].tensors["state"]
    known: list[list[int]] = [[]]
    reused = 0
    for name in range(120):
        beginning, own = rng.choice(known), [rng.randrange(2) for _ in range(rng.randrange(1, 50))]
        tokens = [*beginning[: rng.randrange(len(beginning) + 1)], *own][:100]
        cached = cache.add(name, tokens)
        reused += cached
        cache.restore_state(name)
        row = cache.state_row_of(name)
        assert not cached or states[row, 0] == code[tuple(tokens[:cached])], (seed, name, cached)
        cache.reserve(name, len(tokens))
        while cached < len(tokens):
            border = (cached // cache.checkpoint_tokens + 1) * cache.checkpoint_tokens
            cached = min(border, len(tokens), cached + rng.randrange(1, 20))
            states[row] = code.setdefault(tuple(tokens[:cached]), len(code))
            cache.save_state(name, cached, tokens)
        known = [*known[-6:], tokens]
        if rng.random() < 0.1:
            cache.hide(name)
        for live in list(cache.ledger.pages):
            if len(cache.ledger.pages) == 3 or rng.random() < 0.3 or cache.available_pages < 30:
                cache.free(live)
    return reused


@pytest.mark.parametrize("seed", range(10))
def test_a_row_starts_from_the_state_of_its_own_tokens(seed: int) -> None:
    assert live_with_checkpoints(seed) > 0


DIGESTS = (PageLedger, "digests_of")
FAULTS = {
    "a state is saved behind the page before": Fault(
        *DIGESTS, lambda right, *given: [b"", *right(*given)[:-1]], during=(PagedKVCache, "save_state")
    ),
    "a state is saved between checkpoints": Fault(PagedKVCache, "save_state", with_attributes(checkpoint_tokens=1)),
    "the state of the first page is restored": Fault(
        *DIGESTS, lambda right, *given: right(*given)[::-1], during=(PagedKVCache, "restore_state")
    ),
    "a prefix is found past its checkpoint": Fault(PrefixIndex, "find", with_attributes(_checkpoints=None)),
    "all states are saved in one row": Fault(
        PrefixIndex, "new_checkpoint", lambda right, *given: None if right(*given) is None else 0
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_checkpoints_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault].plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        list(map(live_with_checkpoints, range(10)))
