"""Random lives of the caches against plain Python models, checked after every call."""

import random
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from layer_oracle import attended
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
        """A rejected branch: the last page that remains is shared, and about to be written."""
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
        step, pre_step, existing = self.params.step, self.params.pre_step, [(i, 1) for i in self.tokens if i != join]
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
            *((pre_step, OrderedDict([*existing, (join, wrong)])) for wrong in (0, -1, 1.5, "2", None, 2**40, 2**70)),
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
    def the_page_table_names_the_batch_and_else_the_null_page(self):
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


HEADS, KV_HEADS, DIM_K, DIM_V, HIDDEN = 4, 2, 6, 4, 10
ROWS, LENGTH, NUM_SEQUENCES = 5, 40, 14
TOLERANCE = 1e-9


class Weights:
    """One layer's projections."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)

        def make(rows, columns):
            return torch.randn(rows, columns, dtype=torch.float64, generator=generator) / rows**0.5

        self.q, self.out = make(HIDDEN, HEADS * DIM_K), make(HEADS * DIM_V, HIDDEN)
        self.k, self.v = make(HIDDEN, KV_HEADS * DIM_K), make(HIDDEN, KV_HEADS * DIM_V)

    def project(self, x, dtype):
        """Return q [t, heads, d] in float64, and k, v rounded to the cache's dtype."""
        q = (x @ self.q).view(-1, HEADS, DIM_K)
        k, v = (x @ self.k).view(-1, KV_HEADS, DIM_K), (x @ self.v).view(-1, KV_HEADS, DIM_V)
        return q, k.to(dtype), v.to(dtype)


def full_pass(x, layers, dtype):
    """Every token's hidden state after each layer, without any cache."""
    states = []
    for weights in layers:
        q, k, v = weights.project(x, dtype)
        x = x + attended(q, k.double(), v.double()).flatten(1) @ weights.out
        states.append(x)
    return states


class Simulation:
    """Random arrivals over one `InferenceParams`; every step compares every token of it in every layer."""

    def __init__(self, form, page_size, dtype, device, seed):
        self.random = random.Random(seed)
        self.form, self.dtype, self.device = form, dtype, device
        pages = {}
        if page_size is not None:
            pages = {"page_size": page_size, "total_num_pages": ROWS * -(-LENGTH // page_size)}
        self.params = InferenceParams(
            ROWS,
            LENGTH,
            KV_HEADS,
            DIM_K,
            dtype,
            DIM_V,
            is_paged=page_size is not None,
            qkv_format=form,
            device=device,
            **pages,
        )
        self.layers = [Weights(seed + 1), Weights(seed + 2)]
        for layer in range(len(self.layers)):
            self.params.allocate_memory(layer)
        generator = torch.Generator().manual_seed(seed)
        ids = [7, 8, 10**12, -1, 15, 16, 2**31, 23, 24, 31, 32, 39, 40, 1000003]  # far apart, and equal mod 8
        self.waiting = self.random.sample(ids, NUM_SEQUENCES)
        self.inputs, self.expected = {}, {}
        for i in self.waiting:
            length = self.random.randint(1, LENGTH)
            self.inputs[i] = torch.randn(length, HIDDEN, dtype=torch.float64, generator=generator)
            self.expected[i] = full_pass(self.inputs[i], self.layers, dtype)
        self.done = {}  # id -> tokens that have been through
        self.compared = 0

    def run(self):
        """Step until all sequences have been through."""
        while self.waiting or self.done:
            self.step()
        assert self.compared == len(self.layers) * sum(map(len, self.inputs.values()))

    def step(self):
        steps = self.next_step()
        self.params.pre_step(steps)
        if steps:
            self.check(steps)
        self.done = {i: self.done.get(i, 0) + n for i, n in steps.items()}
        self.done = {i: n for i, n in self.done.items() if n < len(self.inputs[i])}

    def next_step(self):
        """Choose who takes part, in which rows, and with how many tokens: contexts, chunks of them, and one by one."""
        entering = min(self.random.randint(0, 2), ROWS - len(self.done), len(self.waiting))
        order = [*self.done, *self.waiting[:entering]]
        del self.waiting[:entering]
        if self.random.random() < 0.5:
            self.random.shuffle(order)
        steps = OrderedDict()
        for i in order:
            many = i not in self.done or self.random.random() < 0.1
            steps[i] = min(self.random.randint(1, 25) if many else 1, len(self.inputs[i]) - self.done.get(i, 0))
        return steps

    def check(self, steps):
        rows = [self.inputs[i][self.done.get(i, 0) :][:n] for i, n in steps.items()]
        for layer, weights in enumerate(self.layers):
            q, k, v = zip(*(weights.project(x, self.dtype) for x in rows), strict=True)
            pad = self.random.randint(0, 2)
            result = self.params.step(layer, self.pack(k, pad), self.pack(v, pad), self.form)
            for row, (i, n) in enumerate(steps.items()):
                existing = (tensor.double() for tensor in self.read(row, *result[:4]))
                rows[row] = rows[row] + attended(q[row], *existing).flatten(1) @ weights.out
                expected = self.expected[i][layer][self.done.get(i, 0) :][:n]
                error = (rows[row] - expected).abs().max().item()
                assert error < TOLERANCE, f"sequence {i!r}, layer {layer}, row {row}: {error}"
                self.compared += n

    def pack(self, rows, pad):
        """Bring the rows' tokens into the format, NaN where there is no token."""
        if self.form == "thd":
            tail = torch.full((pad, *rows[0].shape[1:]), float("nan"), dtype=self.dtype)
            return torch.cat([*rows, tail]).to(self.device)
        padded = torch.full((len(rows), max(map(len, rows)) + pad, *rows[0].shape[1:]), float("nan"), dtype=self.dtype)
        for row, tokens in enumerate(rows):
            padded[row, : len(tokens)] = tokens
        return (padded.transpose(0, 1).contiguous() if self.form == "sbhd" else padded).to(self.device)

    def read(self, row, k_cache, v_cache, cu_seqlens_q, cu_seqlens_kv):
        """Return a row's keys and values as attention would find them: by what `step` returned, and nothing else."""
        length = (cu_seqlens_kv[row + 1] - cu_seqlens_kv[row]).item()
        assert length == self.params.pre_step_seqlens[row].item() + (cu_seqlens_q[row + 1] - cu_seqlens_q[row]).item()
        result = []
        for cache in (k_cache, v_cache):
            if not self.params.is_paged:
                result.append(cache[row, :length].cpu())
                continue
            table = self.params.cache_manager.page_table[row].tolist()
            size = cache.shape[1]
            result.append(torch.stack([cache[table[p // size], p % size].cpu() for p in range(length)]))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("page_size", [None, 1, 16, 256], ids=["rows", "pages of 1", "pages of 16", "pages of 256"])
@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
def test_every_token_of_every_step_is_as_in_one_full_causal_pass(form, page_size, dtype, native_device):
    device = native_device
    Simulation(form, page_size, dtype, device, seed=len(form) + (page_size or 0) + dtype.itemsize).run()
