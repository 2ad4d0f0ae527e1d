"""Random lives of the prefix-sharing cache, as an engine drives it, checked after every call."""

from collections import Counter

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from random_lives import STEPS, machine_settings, taken

from graphdecode.cache import CacheFullError, PagedKVCacheManager

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_BATCH, MAX_LENGTH, LAYER = 4, 22, 3


class PrefixMachine(RuleBasedStateMachine):
    """The engine's verbs, with shared prefixes, against a model that writes each page as a device would.

    A place of a page holds the whole history of its token: what a wrong share, a lost copy or an early eviction would
    bring back is never equal.
    """

    ids = (0, 7, 8, 10**9)

    @initialize(page_size=st.sampled_from([1, 2, 3]), pages=st.sampled_from([1, 6, 10, 20, 40]))
    def build(self, page_size, pages):
        self.manager = PagedKVCacheManager(
            MAX_BATCH, MAX_LENGTH, pages, page_size, 1, 1, torch.float32, device=DEVICE, prefix_caching=True
        )
        self.manager.allocate_memory(LAYER)
        self.contents = {}  # (page, place) -> tokens up to and with the one there
        self.live = {}  # id -> all its tokens; those cached so far
        self.reserved = {}

    def snapshot(self):
        manager, pool = self.manager, self.manager.pool
        return (
            dict(manager.sequences),
            {i: manager.pages_of(i) for i in manager.sequences},
            [pool.count(page) for page in range(pool.total)],
            (pool.free, pool.used, pool.shared, pool.parked),
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
            self.refuses(self.manager.add, i, tokens)
            return
        cached = self.manager.add(i, tokens)
        assert cached % self.manager.page_size == 0
        assert cached <= len(tokens) - 1
        assert self.manager.sequences[i] == cached
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
        needed = -(-len(tokens) // self.manager.page_size) - len(self.manager.pages_of(i))
        if needed > self.manager.available_pages:
            self.refuses(self.manager.reserve, i, len(tokens))
            return
        assert self.manager.reserve(i, len(tokens)) == (needed > 0)
        pages, size = self.manager.pages_of(i), self.manager.page_size
        for position in range(len(cached), len(tokens)):
            page = pages[position // size]
            assert self.manager.pool.count(page) == 1, "a shared page would be overwritten"
            self.contents[page, position % size] = tuple(tokens[: position + 1])
        self.manager.commit(i, len(tokens), tokens if publish else None)
        self.live[i] = tokens, max(tokens, wanted, key=len)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data):
        i = data.draw(st.sampled_from(list(self.live)), label="id")
        self.manager.free_sequence(i)
        del self.live[i]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data):
        i = data.draw(st.sampled_from(list(self.live)), label="id")
        cached, _ = self.live[i]
        self.cut(i, max(len(cached) - data.draw(st.integers(0, 6), label="tokens"), 0))

    def cut(self, i, length):
        cached, _ = self.live[i]
        old = self.manager.pages_of(i)
        try:
            self.manager.truncate(i, length)
        except CacheFullError:
            assert self.manager.available_pages == 0
            assert self.manager.pool.count(old[length // self.manager.page_size]) > 1
            assert self.manager.pages_of(i) == old
            return
        pages, size = self.manager.pages_of(i), self.manager.page_size
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
        size = self.manager.page_size
        full = len(self.manager.pages_of(parent)) and len(cached) % size and not self.manager.available_pages
        if child in self.live or full:
            self.refuses(self.manager.fork, parent, child)
            return
        self.manager.fork(parent, child)
        pages, old = self.manager.pages_of(child), self.manager.pages_of(parent)
        for place in range(len(cached) % size):
            self.contents[pages[-1], place] = self.contents[old[len(pages) - 1], place]
        self.live[child] = list(cached), wanted
        for i in (parent, child):
            self.cut(i, max(len(cached) - data.draw(st.sampled_from([0, 1, 2, 5]), label="tokens"), 0))

    @rule(data=st.data())
    def bad_calls(self, data):
        i = data.draw(st.sampled_from(self.ids), label="id")
        if i not in self.live:
            for call in (self.manager.reserve, self.manager.commit, self.manager.truncate):
                self.refuses(call, i, 1)
            self.refuses(self.manager.free_sequence, i)
            return
        cached, _ = self.live[i]
        self.refuses(self.manager.reserve, i, MAX_LENGTH + 1)
        self.refuses(self.manager.commit, i, len(cached) - 1)
        self.refuses(self.manager.commit, i, len(self.manager.pages_of(i)) * self.manager.page_size + 1)
        if cached:
            self.refuses(self.manager.commit, i, len(cached), cached[:-1])

    @rule(really=st.integers(0, 15))
    def reset(self, really):
        if not really:
            self.manager.reset()
            self.live.clear()
            self.contents.clear()
            assert self.manager.pool.free == self.manager.pool.total

    @invariant()
    def every_sequence_finds_its_own_tokens(self):
        taken[type(self).__name__] += 1
        if not hasattr(self, "manager"):
            return
        size, pool = self.manager.page_size, self.manager.pool
        owners = Counter()
        assert self.manager.sequences == {i: len(cached) for i, (cached, _) in self.live.items()}
        for i, (cached, _) in self.live.items():
            pages = self.manager.pages_of(i)
            owners.update(pages)
            for position in range(len(cached)):
                assert self.contents[pages[position // size], position % size] == tuple(cached[: position + 1])
        assert all(pool.count(page) == owners[page] for page in range(pool.total))
        assert pool.used == len(owners)
        assert pool.shared == sum(n > 1 for n in owners.values())
        assert pool.free + pool.parked + pool.used == pool.total
        assert self.manager.available_pages == pool.free + pool.parked


TestPrefixes = PrefixMachine.TestCase
TestPrefixes.settings = machine_settings


def test_the_machine_took_all_its_steps():
    """Runs behind it, and says how long its lives were."""
    print(dict(taken))
    assert taken["PrefixMachine"] >= STEPS
