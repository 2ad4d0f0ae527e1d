"""Random lives of the caches against plain Python models, checked after every call."""

from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from random_lives import STEPS, machine_settings, taken

from graphdecode import CacheFullError, InferenceParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_BATCH, MAX_LENGTH, LAYER = 4, 22, 3
FORMATS = ("bshd", "sbhd", "thd")
IDS = st.sampled_from([0, 7, 8, 15, 10**9, -3, "a name", (1, 2)])


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
        assert manager.pool.free == model.total - len(owners)

    @invariant()
    def the_page_table_names_the_batch_and_else_the_trash_page(self):
        if not self.paged or not hasattr(self, "params") or not self.written:
            return
        table = self.manager.page_table.tolist()
        assert all(row == [self.model.total] * self.manager.max_pages_per_row for row in table[len(self.row_tokens) :])


class PagedCacheMachine(CacheMachine):
    """The same life over pages."""

    paged = True


TestContiguousCache = CacheMachine.TestCase
TestContiguousCache.settings = machine_settings
TestPagedCache = PagedCacheMachine.TestCase
TestPagedCache.settings = machine_settings


def test_the_machines_took_all_their_steps():
    """Runs behind them, and says how long their lives were."""
    print(dict(taken))
    assert min(taken["CacheMachine"], taken["PagedCacheMachine"]) >= STEPS
