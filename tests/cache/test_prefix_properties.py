"""Random lives of the prefix-sharing cache, as an engine drives it, checked after every call."""

from collections import Counter

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from random_lives import STEPS, machine_settings, taken

from graphdecode.cache import CacheFullError, PagedKVCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_LENGTH = 22


class PrefixMachine(RuleBasedStateMachine):
    """The engine's verbs, with shared prefixes, against a model that writes each page as a device would.

    A place of a page holds the whole history of its token: what a wrong share, a lost copy or an early eviction would
    bring back is never equal.
    """

    ids = (0, 7, 8, 10**9)

    @initialize(page_size=st.sampled_from([1, 2, 3]), pages=st.sampled_from([1, 6, 10, 20, 40]))
    def build(self, page_size, pages):
        self.cache = PagedKVCache(
            num_layers=1,
            total_num_pages=pages,
            page_size=page_size,
            max_pages_per_row=-(-MAX_LENGTH // page_size),
            num_kv_heads=1,
            head_dim=1,
            dtype=torch.float32,
            device=DEVICE,
            prefix_caching=True,
        )
        self.contents = {}  # (page, place) -> tokens up to and with the one there
        self.live = {}  # id -> all its tokens; those cached so far
        self.reserved = {}

    def snapshot(self):
        cache, pool = self.cache, self.cache.pool
        return (
            {i: cache.pages_of(i) for i in cache.ledger.pages},
            [pool.count(page) for page in range(pool.total)],
            (pool.free, pool.used, pool.shared, pool.evictable),
        )

    def refuses(self, call, *arguments):
        before = self.snapshot()
        with pytest.raises(ValueError, match="."):
            call(*arguments)
        assert self.snapshot() == before

    @rule(data=st.data(), zeros=st.integers(0, 9), tail=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def add(self, data, zeros, tail):
        tokens = [0] * zeros + tail
        i = data.draw(st.sampled_from(self.ids), label="id")
        if i in self.live:
            self.refuses(self.cache.add, i, tokens)
            return
        cached = self.cache.add(i, tokens)
        assert cached % self.cache.page_size == 0
        assert cached <= len(tokens) - 1
        assert len(self.cache.pages_of(i)) * self.cache.page_size == cached
        self.live[i] = tokens[:cached], tokens

    @precondition(lambda self: self.live)
    @rule(data=st.data(), publish=st.integers(0, 3))
    def compute(self, data, publish):
        i = data.draw(st.sampled_from(list(self.live)), label="id")
        cached, wanted = self.live[i]
        more = data.draw(st.integers(1, 9), label="tokens")
        tokens = wanted[: len(cached) + more]
        fill = data.draw(st.integers(0, 1), label="fill")
        tokens = tokens + [fill] * min(len(cached) + more - len(tokens), MAX_LENGTH - len(tokens))
        needed = -(-len(tokens) // self.cache.page_size) - len(self.cache.pages_of(i))
        if needed > self.cache.available_pages:
            self.refuses(self.cache.reserve, i, len(tokens))
            return
        assert self.cache.reserve(i, len(tokens)) == (needed > 0)
        pages, size = self.cache.pages_of(i), self.cache.page_size
        for position in range(len(cached), len(tokens)):
            page = pages[position // size]
            assert self.cache.pool.count(page) == 1, "a shared page would be overwritten"
            self.contents[page, position % size] = tuple(tokens[: position + 1])
        if publish:
            self.cache.publish(i, len(tokens), tokens)
        self.live[i] = tokens, max(tokens, wanted, key=len)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data):
        i = data.draw(st.sampled_from(list(self.live)), label="id")
        self.cache.free(i)
        del self.live[i]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data):
        i = data.draw(st.sampled_from(list(self.live)), label="id")
        cached, _ = self.live[i]
        self.cut(i, max(len(cached) - data.draw(st.integers(0, 6), label="tokens"), 0))

    def cut(self, i, length):
        cached, _ = self.live[i]
        old = self.cache.pages_of(i)
        try:
            self.cache.truncate(i, length)
        except CacheFullError:
            assert self.cache.available_pages == 0
            assert self.cache.pool.count(old[length // self.cache.page_size]) > 1
            assert self.cache.pages_of(i) == old
            return
        pages, size = self.cache.pages_of(i), self.cache.page_size
        assert len(pages) == -(-length // size)
        if pages and pages[-1] != old[len(pages) - 1]:  # copied
            for place in range(length % size):
                self.contents[pages[-1], place] = self.contents[old[len(pages) - 1], place]
        self.live[i] = cached[:length], cached[:length]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(list(self.live)), label="parent")
        child = data.draw(st.sampled_from(self.ids), label="child")
        cached, wanted = self.live[parent]
        size = self.cache.page_size
        full = len(self.cache.pages_of(parent)) and len(cached) % size and not self.cache.available_pages
        if child in self.live:
            return
        if full:
            self.refuses(self.cache.ledger.fork, parent, child, len(cached))
            return
        self.cache.ledger.fork(parent, child, len(cached))
        pages, old = self.cache.pages_of(child), self.cache.pages_of(parent)
        for place in range(len(cached) % size):
            self.contents[pages[-1], place] = self.contents[old[len(pages) - 1], place]
        self.live[child] = list(cached), wanted
        for i in (parent, child):
            self.cut(i, max(len(cached) - data.draw(st.sampled_from([0, 1, 2, 5]), label="tokens"), 0))

    @rule(data=st.data())
    def bad_calls(self, data):
        i = data.draw(st.sampled_from(self.ids), label="id")
        if i not in self.live:
            for call in (self.cache.reserve, self.cache.truncate):
                self.refuses(call, i, 1)
            self.refuses(self.cache.publish, i, 1, [0])
            self.refuses(self.cache.free, i)
            return
        cached, _ = self.live[i]
        held = len(self.cache.pages_of(i)) * self.cache.page_size
        self.refuses(self.cache.reserve, i, self.cache.max_pages_per_row * self.cache.page_size + 1)
        self.refuses(self.cache.publish, i, -1, cached)
        self.refuses(self.cache.publish, i, held + 1, [0] * (held + 1))
        self.refuses(self.cache.truncate, i, held + 1)
        self.refuses(self.cache.truncate, i, -1)
        if cached:
            self.refuses(self.cache.publish, i, len(cached), cached[:-1])

    @rule(really=st.integers(0, 15))
    def reset(self, really):
        if not really:
            self.cache.reset()
            self.live.clear()
            self.contents.clear()
            assert self.cache.pool.free == self.cache.pool.total

    @invariant()
    def every_sequence_finds_its_own_tokens(self):
        taken[type(self).__name__] += 1
        if not hasattr(self, "cache"):
            return
        size, pool = self.cache.page_size, self.cache.pool
        owners = Counter()
        assert list(self.cache.ledger.pages) == list(self.live)
        for i, (cached, _) in self.live.items():
            pages = self.cache.pages_of(i)
            owners.update(pages)
            for position in range(len(cached)):
                assert self.contents[pages[position // size], position % size] == tuple(cached[: position + 1])
        assert all(pool.count(page) == owners[page] for page in range(pool.total))
        assert pool.used == len(owners)
        assert pool.shared == sum(n > 1 for n in owners.values())
        assert pool.free + pool.evictable + pool.used == pool.total
        assert self.cache.available_pages == pool.free + pool.evictable


TestPrefixes = PrefixMachine.TestCase
TestPrefixes.settings = machine_settings


def test_the_machine_took_all_its_steps():
    """Runs behind it, and says how long its lives were."""
    print(dict(taken))
    assert taken["PrefixMachine"] >= STEPS
