"""The simulation that matters to people: sequences come and go, and every token attends to just its own past.

Two layers of attention over the cache, against one full causal pass over each sequence, in float64. Keys and values
are rounded to the cache's dtype on both sides, so that nothing but the cache can make a difference.
"""

import random
from collections import OrderedDict

import pytest
import torch

from graphdecode import InferenceParams

HEADS, KV_HEADS, DIM_K, DIM_V, HIDDEN = 4, 2, 6, 4, 10
MAX_BATCH, MAX_LENGTH, NUM_SEQUENCES = 5, 40, 14
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


def attend(q, k, v):
    """Causal attention of the last len(q) tokens to all len(k): bottom-right, in float64."""
    group = HEADS // KV_HEADS
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) / DIM_K**0.5
    rows = torch.arange(len(q))[:, None] + len(k) - len(q)
    logits.masked_fill_(torch.arange(len(k)) > rows, float("-inf"))
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v).flatten(1)


def full_pass(x, layers, dtype):
    """What every token's hidden state is after each layer, without any cache."""
    states = []
    for weights in layers:
        q, k, v = weights.project(x, dtype)
        x = x + attend(q, k, v) @ weights.out
        states.append(x)
    return states


class Simulation:
    """Random arrivals over one `InferenceParams`; every step compares every token of it in every layer."""

    def __init__(self, form, page_size, dtype, device, seed):
        self.random = random.Random(seed)
        self.form, self.dtype, self.device = form, dtype, device
        pages = {}
        if page_size is not None:
            pages = {"page_size": page_size, "total_num_pages": MAX_BATCH * -(-MAX_LENGTH // page_size)}
        self.params = InferenceParams(
            MAX_BATCH,
            MAX_LENGTH,
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
            length = self.random.randint(1, MAX_LENGTH)
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
        entering = min(self.random.randint(0, 2), MAX_BATCH - len(self.done), len(self.waiting))
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
                rows[row] = rows[row] + attend(q[row], *self.read(row, *result[:4])) @ weights.out
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
        found = []
        for cache in (k_cache, v_cache):
            if not self.params.is_paged:
                found.append(cache[row, :length].cpu())
                continue
            table = self.params.cache_manager.page_table[row].tolist()
            size = cache.shape[1]
            found.append(torch.stack([cache[table[p // size], p % size].cpu() for p in range(length)]))
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("page_size", [None, 1, 16, 256], ids=["rows", "pages of 1", "pages of 16", "pages of 256"])
@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
def test_every_token_of_every_step_is_as_in_one_full_causal_pass(form, page_size, dtype, device):
    Simulation(form, page_size, dtype, device, seed=len(form) + (page_size or 0) + dtype.itemsize).run()
