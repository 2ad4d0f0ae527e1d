"""One capture, then hundreds of steps of changing membership by replay alone; and the layer of the examples.

Law 2: the step is a function of device memory. Law 5: replay is eager, bit for bit. Law 4: pad tails are inert.
"""

import random
from collections import OrderedDict

import pytest
import torch
from layer_oracle import attended

from graphdecode import GraphManager, InferenceParams, Slot, StepBuffers
from graphdecode.attention import cached_attention

MAX_BATCH, MAX_LENGTH, WIDTH, HEADS, KV_HEADS, DIM, LAYERS = 4, 48, 3, 4, 2, 8, 2
BOTH = pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])


class CachedLayers:
    """A step of two attention layers over one cache, with the buffers and graphs around it."""

    def __init__(self, paged, device, backend):
        pages = {"total_num_pages": 40, "page_size": 4} if paged else {}
        self.params = InferenceParams(
            MAX_BATCH, MAX_LENGTH, KV_HEADS, DIM, torch.float32, is_paged=paged, device=device, **pages
        )
        for layer in range(LAYERS):
            self.params.allocate_memory(layer)
        self.table = self.params.cache_manager.page_table if paged else None
        shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "out": HEADS}
        self.buffers = StepBuffers(
            [Slot(name, ("batch", WIDTH, heads, DIM), torch.float32) for name, heads in shapes.items()],
            max_batch_size=MAX_BATCH,
            device=device,
        )
        for name, tensor in self.params.tensors().items():
            self.buffers.adopt(name, tensor)
        self.graphs = GraphManager(self.step, self.buffers, (1, 2, 4), backend=backend)
        self.graphs.capture(progress=False)
        self.graphs.freeze()

    def step(self, batch):
        out = batch.q
        for layer in range(LAYERS):
            keys, values, cu_q, cu_kv, _, form = self.params.step(
                layer, batch.k * (layer + 1), batch.v + out[:, :, :2], "bshd"
            )
            out = out + cached_attention(out, keys, values, cu_q, cu_kv, qkv_format=form, page_table=self.table)
        batch.out.copy_(out)

    def run(self, steps, inputs):
        self.params.pre_step(steps)
        n = len(steps)
        for name, tensor in zip("qkv", inputs, strict=True):
            getattr(self.buffers, name)[:n].copy_(tensor)
        self.graphs.buffers.set_live_rows(n)
        self.buffers.poison(n)
        self.graphs.replay(n)
        return [self.buffers.out[row, :width].clone() for row, width in enumerate(steps.values())]


def random_life(seed, num_steps):
    """Yield (verb, arguments): steps of random members in random rows, with forks and truncations between them."""
    choose = random.Random(seed)
    lengths = OrderedDict()
    next_id = 0
    for _ in range(num_steps):
        if lengths and len(lengths) < MAX_BATCH and choose.random() < 0.15:
            parent, next_id = choose.choice(list(lengths)), next_id + 7
            lengths[next_id] = lengths[parent]
            yield "fork", (parent, next_id)
        if lengths and choose.random() < 0.15:
            sequence = choose.choice(list(lengths))
            lengths[sequence] = max(lengths[sequence] - choose.randint(1, 6), 0)
            yield "truncate", (sequence, lengths[sequence])
        ids = [i for i in lengths if lengths[i] + WIDTH <= MAX_LENGTH and choose.random() < 0.93]
        if choose.random() < 0.3:
            choose.shuffle(ids)
        while len(ids) < MAX_BATCH and (not ids or choose.random() < 0.2):
            next_id += 7
            ids.insert(choose.randint(0, len(ids)), next_id)
        steps = OrderedDict((i, choose.choice([1, 1, 1, 2, WIDTH])) for i in ids)
        lengths = OrderedDict((i, lengths.get(i, 0) + n) for i, n in steps.items())
        yield "step", steps


@BOTH
def test_one_capture_is_right_for_300_steps_of_changing_membership(paged, native_device):
    device = native_device
    captured, eager = CachedLayers(paged, device, "auto"), CachedLayers(paged, device, "eager")
    generator = torch.Generator().manual_seed(3)
    chosen, memberships = 0, set()
    for verb, arguments in random_life(seed=5, num_steps=300):
        if verb != "step":
            getattr(captured.params, verb)(*arguments)
            getattr(eager.params, verb)(*arguments)
            continue
        n = len(arguments)
        inputs = [torch.randn(n, WIDTH, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        for row, (a, b) in enumerate(zip(captured.run(arguments, inputs), eager.run(arguments, inputs), strict=True)):
            assert torch.equal(a, b), f"step {chosen}, row {row} of {arguments}"
            assert a.isfinite().all()
        chosen += 1
        memberships.add(tuple(arguments))
    assert chosen == 300
    assert len(memberships) > 50
    assert sum(report.replays for report in captured.graphs.report().buckets) == 300
    captured.graphs.close()


@BOTH
def test_replayed_steps_agree_with_float64_attention_over_each_sequence(paged, device):
    layers = CachedLayers(paged, device, "auto")
    generator = torch.Generator().manual_seed(4)
    history = {}
    for verb, arguments in random_life(seed=6, num_steps=60):
        if verb == "fork":
            layers.params.fork(*arguments)
            history[arguments[1]] = [list(tokens) for tokens in history[arguments[0]]]
            continue
        if verb == "truncate":
            layers.params.truncate(*arguments)
            for tokens in history[arguments[0]]:
                del tokens[arguments[1] :]
            continue
        n = len(arguments)
        inputs = [torch.randn(n, WIDTH, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        results = layers.run(arguments, inputs)
        history = {i: history.get(i, [[] for _ in range(2 * LAYERS)]) for i in arguments}
        for row, (i, width) in enumerate(arguments.items()):
            q, k, v = (t[row, :width].double() for t in inputs)
            out = q
            for layer in range(LAYERS):
                keys, values = history[i][2 * layer : 2 * layer + 2]
                keys += list(k * (layer + 1))
                values += list(v + out[:, :KV_HEADS])
                out = out + attended(out, torch.stack(keys), torch.stack(values))
            torch.testing.assert_close(results[row].double().cpu(), out, atol=2e-5, rtol=2e-5)


def test_the_layer_of_the_examples(device):
    params = InferenceParams(
        4, 64, 2, 64, torch.float32, is_paged=True, total_num_pages=12, page_size=16, device=device
    )
    params.allocate_memory(1)
    for step_dict in (OrderedDict([(7, 5), (42, 3)]), OrderedDict([(7, 1), (42, 1)]), OrderedDict([(42, 1), (9, 4)])):
        params.pre_step(step_dict)
        width = max(step_dict.values())
        q = torch.randn(len(step_dict), width, 8, 64, device=device)
        k, v = torch.randn(2, len(step_dict), width, 2, 64, device=device)
        k_cache, v_cache, cu_seqlens_q, cu_seqlens_kv, _, form = params.step(1, k, v, "bshd")
        out = cached_attention(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q,
            cu_seqlens_kv,
            qkv_format=form,
            page_table=params.cache_manager.page_table,
        )
        assert out.shape == q.shape
    assert params.cache_manager.pool.used == 2
    assert list(params.sequences) == [42, 9]
