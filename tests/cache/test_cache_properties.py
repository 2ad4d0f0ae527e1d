"""Random lives of the caches against plain Python models, checked after every call.

`GRAPHDECODE_CACHE_STEPS` says how many steps each machine takes at least.
"""

import os
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphdecode.cache import CacheFullError, InferenceParams, PagedKVCacheManager

STEPS = int(os.environ.get("GRAPHDECODE_CACHE_STEPS", "10000"))
STEPS_PER_LIFE = 50
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_BATCH, MAX_LENGTH, LAYER = 4, 22, 3
FORMATS = ("bshd", "sbhd", "thd")
IDS = st.sampled_from([0, 7, 8, 15, 10**9, -3, "a name", (1, 2)])

machine_settings = settings(
    max_examples=STEPS // 35 + 1,  # some lives end early
    stateful_step_count=STEPS_PER_LIFE,
    deadline=None,
    derandomize="GRAPHDECODE_CACHE_STEPS" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)


taken = Counter()  # steps of each machine


class PageModel:
    """Who owns which page, without free lists: pages are fresh numbers, and a page without an owner is gone."""

    def __init__(self, total, size):
        self.total, self.size = total, size
        self.pages = {}
        self.last = 0

    def owners(self):
        return Counter(page for pages in self.pages.values() for page in pages)

    def fresh(self):
        self.last += 1
        return self.last

    def after_step(self, lengths):
        """The pages when these sequences have these lengths and no other exists, or None if they do not fit."""
        pages = {i: list(self.pages.get(i, ())) for i in lengths}
        for i, length in lengths.items():
            while len(pages[i]) * self.size < length:
                pages[i].append(self.fresh())
        return pages if len({p for owned in pages.values() for p in owned}) <= self.total else None

    def after_fork(self, parent, length):
        full = length // self.size
        child = self.pages[parent][:full] + [self.fresh()] * bool(length % self.size)
        return child if len(self.owners()) + bool(length % self.size) <= self.total else None

    def after_truncate(self, sequence, length):
        pages = self.pages[sequence][: -(-length // self.size)]
        others = Counter(page for i, owned in self.pages.items() if i != sequence for page in owned)
        if length % self.size and others[pages[-1]]:
            pages[-1] = self.fresh()
        return pages if len({*others, *pages}) <= self.total else None


class CacheMachine(RuleBasedStateMachine):
    """`InferenceParams` against lists of tokens: token t has key t and value -t; None is one that was never written."""

    paged = False

    def __init__(self):
        super().__init__()
        self.tokens = OrderedDict()
        self.last_token = 0
        self.row_tokens = []  # (tokens before the last step, step length) of each row
        self.written = True

    @initialize(page_size=st.sampled_from([1, 3, 4, 16]), pages=st.sampled_from([1, 5, 9, 14, 30, 60]))
    def build(self, page_size, pages):
        sizes = {"total_num_pages": pages, "page_size": page_size} if self.paged else {}
        self.params = InferenceParams(
            MAX_BATCH, MAX_LENGTH, 1, 1, torch.float32, head_dim_v=2, is_paged=self.paged, device=DEVICE, **sizes
        )
        self.params.allocate_memory(LAYER)
        self.manager = self.params.cache_manager
        self.model = PageModel(pages, page_size)

    def snapshot(self):
        manager = self.manager
        host = [list(manager.sequences.items()), self.params.batch_size]
        if self.paged:
            pool = manager.pool
            host += [{i: manager.pages_of(i) for i in manager.sequences}, [pool.count(p) for p in range(pool.total)]]
            host += [pool.free, pool.used, pool.shared]
        return host, {name: t.clone() for name, t in self.params.tensors().items()}

    def refuses(self, call, *arguments, error=ValueError):
        """Law 7: the call raises, and neither host nor device state has changed."""
        host, device = self.snapshot()
        with pytest.raises(error):
            call(*arguments)
        host_now, device_now = self.snapshot()
        assert host_now == host
        for name, tensor in device.items():
            assert torch.equal(tensor, device_now[name]), name

    @rule(data=st.data())
    def step(self, data):
        order = data.draw(st.permutations(list(self.tokens)), label="order")
        leaving = data.draw(st.sampled_from([0, 0, 0, 1, 2, MAX_BATCH]), label="leaving")
        staying = order[leaving:]
        new = [i for i in data.draw(st.lists(IDS, max_size=2, unique=True), label="new") if i not in staying]
        ids = [*staying, *new]
        if data.draw(st.booleans(), label="new first"):
            ids = [*new, *staying]
        lengths = data.draw(
            st.lists(st.sampled_from([1, 1, 1, 2, 3, 5]), min_size=len(ids), max_size=len(ids)), label="lengths"
        )
        self.advance(OrderedDict(zip(ids, lengths, strict=True)), data)

    @rule(data=st.data())
    def decode(self, data):
        self.advance(OrderedDict.fromkeys(self.tokens, 1), data)

    def advance(self, steps, data):
        before = {i: len(self.tokens.get(i, ())) for i in steps}
        after = {i: before[i] + n for i, n in steps.items()}
        if len(steps) > MAX_BATCH or any(n > MAX_LENGTH for n in after.values()):
            self.refuses(self.params.pre_step, steps)
            return
        pages = self.model.after_step(after) if self.paged else {}
        if pages is None:
            self.refuses(self.params.pre_step, steps, error=CacheFullError)
            return
        uploads = self.manager.metadata.num_uploads
        self.params.pre_step(steps)
        assert self.manager.metadata.num_uploads == uploads + 1
        self.model.pages = pages
        self.tokens = OrderedDict((i, list(self.tokens.get(i, ())) + [None] * n) for i, n in steps.items())
        self.row_tokens = [(before[i], n) for i, n in steps.items()]
        self.written = False
        if not data.draw(st.integers(0, 9), label="the step fails"):
            return
        for i, n in steps.items():
            self.tokens[i][-n:] = range(self.last_token + 1, self.last_token + n + 1)
            self.last_token += n
        form = data.draw(st.sampled_from(FORMATS), label="format")
        pad = data.draw(st.integers(0, 2), label="pad")
        k, v = self.new_tokens(steps, form, pad)
        self.check_step(self.params.step(LAYER, k, v, form), form, k)
        if data.draw(st.booleans(), label="again"):
            self.params.step(LAYER, k, v, form)
        self.written = True
        self.check_rows()

    def new_tokens(self, steps, form, pad):
        """Keys and values of the step, with NaN wherever there is no token."""
        rows = [self.tokens[i][-n:] for i, n in steps.items()]
        if form == "thd":
            flat = [t for row in rows for t in row]
            k = torch.tensor(flat + [float("nan")] * pad, dtype=torch.float32)
        else:
            width = max(map(len, rows), default=1) + pad
            k = torch.full((min(len(rows) + pad, MAX_BATCH), width), float("nan"))
            for i, row in enumerate(rows):
                k[i, : len(row)] = torch.tensor(row, dtype=torch.float32)
            k = k.T if form == "sbhd" else k
        k = k[..., None, None].to(DEVICE)
        return k, -k.expand(*k.shape[:-1], 2)

    def check_step(self, result, form, k):
        keys, values, cu_q, cu_kv, max_length, out_format = result
        assert out_format == {"bshd": "bshd", "sbhd": "sbhd_2bshd", "thd": "thd_2bshd"}[form]
        assert max_length == MAX_LENGTH
        assert (cu_q.data_ptr(), cu_kv.data_ptr()) == (
            self.params.cu_seqlens_q.data_ptr(),
            self.params.cu_seqlens_kv.data_ptr(),
        )
        rows = {"bshd": k.shape[0], "sbhd": k.shape[1 % k.dim()], "thd": MAX_BATCH}[form]
        slots = (
            (self.model.total + 1, self.model.size) if self.paged else (rows, MAX_LENGTH)
        )  # fixed, whatever is in the batch
        assert keys.shape == (*slots, 1, 1)
        assert values.shape == (*slots, 1, 2)
        assert not keys.numel() or keys.data_ptr() == self.manager.cache[LAYER][0].data_ptr()

    def check_rows(self):
        """Every token that was ever written is where attention will look for it."""
        keys, values = self.manager.cache[LAYER]
        if self.paged:
            keys, values = self.params.convert_paged_to_nonpaged(LAYER)
            assert keys.shape == (len(self.tokens), MAX_LENGTH, 1, 1)
        keys, values = keys[..., 0, 0].tolist(), values[..., 0, :].tolist()
        for row, tokens in enumerate(self.tokens.values()):
            for position, token in enumerate(tokens):
                if token is not None:
                    assert keys[row][position] == token
                    assert values[row][position] == [-token, -token]
            if self.paged:
                assert not any(keys[row][len(tokens) :])

    @precondition(lambda self: self.written)
    @rule(data=st.data(), child=IDS)
    def fork(self, data, child):
        if not self.tokens:
            self.refuses(self.params.fork, "nobody", child)
            return
        parent = data.draw(st.sampled_from(list(self.tokens)), label="parent")
        if child in self.tokens or len(self.tokens) >= MAX_BATCH:
            self.refuses(self.params.fork, parent, child)
            return
        if self.paged:
            pages = self.model.after_fork(parent, len(self.tokens[parent]))
            if pages is None:
                self.refuses(self.params.fork, parent, child, error=CacheFullError)
                return
            self.model.pages[child] = pages
        self.params.fork(parent, child)
        self.tokens[child] = list(self.tokens[parent])

    @rule(data=st.data())
    def truncate(self, data):
        if not self.tokens:
            self.refuses(self.params.truncate, "nobody", 0)
            return
        sequence = data.draw(st.sampled_from(list(self.tokens)), label="sequence")
        self.cut(sequence, max(len(self.tokens[sequence]) - data.draw(st.integers(0, 6), label="tokens"), 0))

    @precondition(lambda self: self.written and self.tokens)
    @rule(data=st.data(), child=IDS)
    def fork_and_cut(self, data, child):
        """What a rejected branch does: the last page that remains is shared, and about to be written."""
        if child in self.tokens:
            return
        self.fork(data, child)
        for sequence in list(self.tokens)[-1 - data.draw(st.integers(0, 1), label="both") :]:
            self.cut(sequence, max(len(self.tokens[sequence]) - data.draw(st.integers(0, 9), label="tokens"), 0))
        self.decode(data)

    def cut(self, sequence, length):
        if self.paged:
            pages = self.model.after_truncate(sequence, length)
            if pages is None:
                self.refuses(self.params.truncate, sequence, length, error=CacheFullError)
                return
            self.model.pages[sequence] = pages
        self.params.truncate(sequence, length)
        del self.tokens[sequence][length:]

    @rule(really=st.integers(0, 7))
    def reset(self, really):
        if not really:
            self.params.reset()
            self.tokens.clear()
            self.model.pages.clear()
            self.row_tokens, self.written = [], True

    @rule(data=st.data(), join=IDS)
    def bad_call(self, data, join):
        width = max([n for _, n in self.row_tokens], default=1)
        k = torch.ones(MAX_BATCH, width, 1, 1, device=DEVICE)
        v = torch.ones(MAX_BATCH, width, 1, 2, device=DEVICE)
        step, pre_step, known = self.params.step, self.params.pre_step, [(i, 1) for i in self.tokens if i != join]
        calls = [
            (step, LAYER + 1, k, v, "bshd"),
            (step, LAYER, k, v, "bhsd"),
            (step, LAYER, k.double(), v, "bshd"),
            (step, LAYER, k, v[..., :1], "bshd"),
            (step, LAYER, k, v[:, :0], "bshd"),
            (step, LAYER, k, v, "thd"),
            (step, LAYER, torch.cat([k, k]), torch.cat([v, v]), "bshd"),
            (self.params.truncate, "nobody", 0),
            (self.params.fork, "nobody", "anybody"),
            (pre_step, OrderedDict((1000 + i, 1) for i in range(MAX_BATCH + 1))),
            *((pre_step, OrderedDict([*known, (join, wrong)])) for wrong in (0, -1, 1.5, "2", None, 2**40, 2**70)),
        ]
        self.refuses(*calls[data.draw(st.integers(0, len(calls) - 1), label="call")])

    @invariant()
    def lengths_agree_with_one_another(self):
        """Law 6, and the tails that the surface promises."""
        taken[type(self).__name__] += 1
        if not hasattr(self, "params"):
            return
        assert list(self.params.sequences.items()) == [(i, len(t)) for i, t in self.tokens.items()]
        befores = [before for before, _ in self.row_tokens]
        steps = [step for _, step in self.row_tokens]
        tail = MAX_BATCH - len(steps)
        cu_q, cu_kv = [0], [0]
        for before, step in zip(befores + [0] * tail, steps + [0] * tail, strict=True):
            cu_q.append(cu_q[-1] + step)
            cu_kv.append(cu_kv[-1] + before + step)
        assert self.params.get_seqlens_pre_step().tolist() == befores + [0] * tail
        assert self.params.cu_seqlens_q.tolist() == cu_q
        assert self.params.cu_seqlens_kv.tolist() == cu_kv

    @invariant()
    def pages_agree_with_their_owners(self):
        """No page is leaked or owned without being counted; a page that will be written to has one owner."""
        if not self.paged or not hasattr(self, "params"):
            return
        manager, model = self.manager, self.model
        owners, modelled = Counter(), model.owners()
        for i, pages in model.pages.items():
            owned = manager.pages_of(i)
            assert len(set(owned)) == len(owned) == len(pages)
            owners.update(owned)
            if len(self.tokens[i]) % model.size:
                assert manager.pool.count(owned[-1]) == 1
        assert all(manager.pool.count(page) == owners[page] for page in range(model.total))
        assert manager.pool.used == len(owners) == len(modelled)
        assert manager.pool.shared == sum(n > 1 for n in modelled.values())
        assert manager.pool.free == model.total - len(owners) == manager.available_pages

    @invariant()
    def the_page_table_names_the_batch_and_else_the_trash_page(self):
        if not self.paged or not hasattr(self, "params") or not self.written:
            return
        table = self.manager.page_table.tolist()
        assert all(row == [self.model.total] * self.manager.max_pages_per_row for row in table[len(self.row_tokens) :])


class PagedCacheMachine(CacheMachine):
    """The same life over pages."""

    paged = True


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


TestContiguousCache = CacheMachine.TestCase
TestContiguousCache.settings = machine_settings
TestPagedCache = PagedCacheMachine.TestCase
TestPagedCache.settings = machine_settings
TestPrefixes = PrefixMachine.TestCase
TestPrefixes.settings = machine_settings


def test_the_machines_took_all_their_steps():
    """Runs behind them, and says how long their lives were."""
    print(dict(taken))
    assert set(taken) == {"CacheMachine", "PagedCacheMachine", "PrefixMachine"}
    assert min(taken.values()) >= STEPS
