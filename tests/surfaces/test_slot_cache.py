"""The sequence-slot cache, against the same writes done one by one in a plain tensor."""

import contextlib
from dataclasses import dataclass

import pytest
import torch

from graphdecode import BucketLadder, GraphManager, Slot, SlotKVCacheManager, StepBuffers
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.surfaces.slot_cache import slot_scatter_triton, slot_shift

slot_scatter_torch = versions("slot_scatter").torch
slot_shift_torch = versions("slot_shift").torch

LAYERS, BATCH, HEADS, LENGTH, DIM = 2, 4, 2, 12, 5


def make(device, length=LENGTH, **options):
    return SlotKVCacheManager(LAYERS, BATCH, HEADS, length, DIM, torch.float32, device=device, **options)


def new_tokens(rows, n, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(rows, HEADS, n, DIM, generator=generator).to(device) for _ in range(2)] for _ in range(LAYERS)]


def ids(values, device, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_context_encoding_writes_prompts_to_the_named_slots_alone(device, index_dtype):
    cache, prompts = make(device), new_tokens(2, 7, device)
    written = cache.update_cache(True, ids([3, 1], device, index_dtype), None, prompts, seq_len=8)
    for layer in range(LAYERS):
        for which in range(2):
            expected = torch.zeros(BATCH, HEADS, LENGTH, DIM, device=device)
            expected[3, :, :7], expected[1, :, :7] = prompts[layer][which]
            assert torch.equal(written[2 * layer + which], expected)
            assert torch.equal(cache.get_cache(8)[layer][which], expected[:, :, :8])


def test_without_continuous_batching_all_rows_are_filled_from_the_first(device):
    cache, prompts = make(device, continuous_batching=False), new_tokens(BATCH, 5, device)
    cache.update_cache(True, ids([2, 3, 0, 1], device), None, prompts, seq_len=5)
    assert torch.equal(cache.get_cache(5)[1][0], prompts[1][0])


def test_token_generation_scatters_at_its_positions_in_the_named_slots(device):
    cache, new = make(device), new_tokens(3, 2, device)
    positions = [[4, 5], [0, 9], [11, 2]]
    cache.update_cache(False, ids([2, 0, 1], device), ids(positions, device), new, seq_len=LENGTH)
    expected = torch.zeros(BATCH, HEADS, LENGTH, DIM, device=device)
    for row, slot in enumerate([2, 0, 1]):
        for i, position in enumerate(positions[row]):
            expected[slot, :, position] = new[0][1][row, :, i]
    assert torch.equal(cache.get_cache(1, skip_slice=True)[0][1], expected)


def test_indices_that_the_cache_does_not_have_write_nothing(device):
    cache, new = make(device), new_tokens(3, 1, device)
    cache.update_cache(False, ids([9, -1, 1], device), ids([[0], [0], [LENGTH]], device), new, seq_len=LENGTH)
    assert all(not t.any() for t in cache.tensors().values())


def test_scatter_index_has_no_effect(device):
    cache, new = make(device), new_tokens(1, 1, device)
    for sixth in (ids([[6]], device), torch.ones(1, 1, device=device, dtype=torch.bool)):
        cache.update_cache(False, ids([0], device), ids([[3]], device), new, LENGTH, sixth)
        stored = cache.get_kv_by_layer_id(0)[0]
        assert torch.equal(stored[0, :, 3], new[0][0][0, :, 0])
        assert stored.count_nonzero() == HEADS * DIM


@pytest.mark.parametrize("encodes", [True, False])
def test_chunked_prefill_writes_positions_of_one_slot(device, encodes):
    cache, expected = make(device), torch.zeros(BATCH, HEADS, LENGTH, DIM, device=device)
    for first, n in ((0, 5), (5, 4), (9, 1)):
        new, positions = new_tokens(1, n, device, seed=first), torch.arange(first, first + n, device=device)[None]
        cache.update_cache(encodes, ids([2], device), positions, new, LENGTH, is_chunked_prefill=True)
        expected[2, :, first : first + n] = new[1][1][0]
        assert torch.equal(cache.layer(1)[1], expected)


@pytest.mark.parametrize(
    ("rows", "options", "arguments", "names"),
    [
        (2, {}, {"seq_ids": [0, 1]}, "is_chunked_prefill"),
        (1, {}, {"seq_ids": None}, "is_chunked_prefill"),
        (1, {"padding_side": "left"}, {"seq_ids": [0]}, "is_chunked_prefill"),
        (1, {}, {"seq_ids": [0], "position_ids": None}, "position_ids"),
    ],
)
def test_a_chunk_that_does_not_fit_changes_nothing(device, rows, options, arguments, names):
    cache, new = make(device, **options), new_tokens(rows, 3, device)
    seq_ids = None if arguments["seq_ids"] is None else ids(arguments["seq_ids"], device)
    positions = None if "position_ids" in arguments else torch.arange(3, device=device).expand(rows, 3)
    with pytest.raises(ValueError, match=names):
        cache.update_cache(False, seq_ids, positions, new, LENGTH, is_chunked_prefill=True)
    assert all(not stored.any() for stored in cache.tensors().values())


@pytest.mark.parametrize("behind", [(None, True), (True,), (False,)])
def test_a_positional_is_chunked_prefill_is_refused_by_name(device, behind):
    cache, new = make(device), new_tokens(1, 1, device)
    with pytest.raises(ValueError, match="is_chunked_prefill"):
        cache.update_cache(False, ids([0], device), ids([[3]], device), new, LENGTH, *behind)
    assert all(not stored.any() for stored in cache.tensors().values())


def test_a_captured_chunk_is_right_at_later_slots_and_positions(device):
    cache = make(device)
    shapes = [Slot("x", (1, HEADS, 4, DIM), torch.float32, pad=0.0), Slot("at", (1, 4), torch.int64, pad=0)]
    slots = [*shapes, Slot("slot", (1,), torch.int64, pad=0), Slot("rows", ("batch",), torch.int32, pad=0)]
    buffers = StepBuffers(slots, max_batch_size=1, device=device)

    def step(batch):
        pairs = [(batch.x, batch.x)] * LAYERS
        cache.update_cache(True, batch.slot, batch.at, pairs, LENGTH, is_chunked_prefill=True)
        batch.rows.add_(1)

    for name, stored in cache.tensors().items():
        buffers.adopt(name, stored)
    with contextlib.closing(GraphManager(step, buffers, BucketLadder([1], 1))) as graphs:
        graphs.capture(progress=False)
        cache_before = [stored.zero_() for stored in cache.past_key_values]
        expected = torch.zeros_like(cache_before[0])
        for slot, first in ((3, 8), (0, 2)):
            x = new_tokens(1, 4, device, seed=first)[0][0]
            buffers.x.copy_(x), buffers.at.copy_(torch.arange(first, first + 4)[None]), buffers.slot.fill_(slot)
            graphs.replay(1)
            expected[slot, :, first : first + 4] = x[0]
            assert torch.equal(cache.layer(0)[0], expected)


def test_left_padding_keeps_the_newest_tokens_last(device):
    cache, history = make(device, padding_side="left"), new_tokens(2, 5, device, seed=1)
    slots = ids([3, 0], device)
    cache.update_cache(True, slots, None, history, seq_len=5)
    assert torch.equal(cache.get_cache(5)[0][0][slots], history[0][0])
    for step in range(10):  # past the capacity of 12: the oldest drop out
        new = new_tokens(2, 1 + step % 2, device, seed=2 + step)
        cache.update_cache(False, slots, None, new, seq_len=LENGTH)
        for layer in range(LAYERS):
            history[layer] = [torch.cat(pair, dim=2) for pair in zip(history[layer], new[layer], strict=True)]
    views = cache.get_cache(LENGTH)
    for layer in range(LAYERS):
        for which in range(2):
            assert torch.equal(views[layer][which][slots], history[layer][which][:, :, -LENGTH:])
            assert not views[layer][which][[1, 2]].any()


def test_flash_decoding_deals_a_sequence_over_shards(device):
    group = 3
    with pytest.warns(UserWarning, match="max_length.*12"):
        shards = [make(device, length=11, num_cores_per_group=group) for _ in range(group)]
    prompts, slots = new_tokens(2, 7, device), ids([1, 3], device)
    positions = torch.arange(7, device=device).expand(2, 7)
    for rank, shard in enumerate(shards):
        shard.update_cache(True, slots, positions, prompts, 4, active_mask=positions % group == rank)
    new, position = new_tokens(2, 1, device, seed=5), ids([[7], [9]], device)
    for rank, shard in enumerate(shards):
        shard.update_cache(False, slots, position, new, 4, active_mask=(position % group == rank).int())
    expected = torch.zeros(BATCH, HEADS, 12, DIM, device=device)
    expected[slots, :, :7] = prompts[1][1]
    expected[1, :, 7], expected[3, :, 9] = new[1][1][0, :, 0], new[1][1][1, :, 0]
    for rank, shard in enumerate(shards):
        assert shard.get_cache(4)[1][1].shape == (BATCH, HEADS, 4, DIM)
        assert torch.equal(shard.get_cache(4)[1][1], expected[:, :, rank::group])


def test_no_token_of_a_sequence_is_in_the_garbage_slot(device):
    shard = make(device, num_cores_per_group=2)
    full = new_tokens(1, LENGTH, device)
    positions = torch.arange(LENGTH, device=device)[None]
    shard.update_cache(True, ids([0], device), positions, full, 6, active_mask=positions % 2 == 0)
    before = shard.get_cache(6)[0][0].clone()
    shard.update_cache(
        False, ids([0], device), ids([[5]], device), new_tokens(1, 1, device), 6, active_mask=ids([[0]], device)
    )
    assert torch.equal(shard.get_cache(6)[0][0], before)


def test_tiles_are_viewed_as_one_length_without_a_copy(device):
    cache = SlotKVCacheManager(1, 2, HEADS, 256, DIM, torch.float32, tiled=True, device=device)
    new = [[torch.randn(1, HEADS, 1, DIM, device=device) for _ in range(2)]]
    cache.update_cache(False, ids([1], device), ids([[131]], device), new, seq_len=256)
    stored = cache.get_kv_by_layer_id(0)[0]
    assert stored.shape == (2, HEADS, 128, 2, DIM)
    assert torch.equal(stored[1, :, 65, 1], new[0][0][0, :, 0])  # 131 = 65 * 2 + 1
    views = cache.get_cache(200)[0][0]
    assert views.shape == (2, HEADS, 200, DIM)
    assert views.data_ptr() == stored.data_ptr()


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_length_buckets_are_views(device, padding_side):
    cache = make(device, padding_side=padding_side)
    whole = cache.layer(1)[0]
    bucket = cache.get_cache(4)[1][0]
    bucket.fill_(7.0)
    positions = slice(-4, None) if padding_side == "left" else slice(0, 4)
    assert (whole[:, :, positions] == 7.0).all()
    assert whole.sum().item() == 7.0 * bucket.numel()


def test_an_external_buffer_is_written_instead(device):
    cache, new = make(device), new_tokens(1, 3, device)
    buffer = [[torch.zeros(BATCH, HEADS, LENGTH, DIM, device=device) for _ in range(2)] for _ in range(LAYERS)]
    returned = cache.update_cache(True, ids([2], device), None, new, 3, kvcache_buffer=buffer)
    assert torch.equal(buffer[1][1][2, :, :3], new[1][1][0])
    assert returned[3].data_ptr() == buffer[1][1].data_ptr()
    assert all(not t.any() for t in cache.tensors().values())


def test_invalid_calls_raise_and_change_nothing(device):
    cache, valid = make(device), new_tokens(1, 1, device)
    invalid_layer = [valid[0], [valid[1][0], valid[1][1].double()]]
    slot, position = ids([0], device), ids([[0]], device)
    calls = [
        (False, slot, position, invalid_layer, LENGTH),
        (False, slot, position, valid[:1], LENGTH),
        (False, ids([0, 1], device), position, valid, LENGTH),
        (False, slot, ids([0], device), valid, LENGTH),
        (False, slot, None, valid, LENGTH),
        (False, slot, position.float(), valid, LENGTH),
        (False, slot, position, valid, -1),
        (False, slot, position, valid, 0),
        (True, None, None, new_tokens(BATCH + 1, 1, device), LENGTH),
        (True, slot, None, new_tokens(1, LENGTH + 1, device), LENGTH),
    ]
    for arguments in calls:
        with pytest.raises(ValueError, match=r"must|needed"):
            cache.update_cache(*arguments)
    with pytest.raises(ValueError, match="kvcache_buffer"):
        cache.update_cache(False, slot, position, valid, LENGTH, kvcache_buffer=[valid[0], valid[1]])
    with pytest.raises(ValueError, match="seq_len"):
        cache.get_cache(0)
    for index in (1, -2, 2 * LAYERS):
        with pytest.raises(ValueError, match=r"key_layer_idx.*0\.\.2"):
            cache.get_kv_by_layer_id(index)
    with pytest.raises(ValueError, match="layer_number"):
        cache.layer(LAYERS)
    assert all(not t.any() for t in cache.tensors().values())


@pytest.mark.parametrize(
    "options",
    [
        {"padding_side": "top"},
        {"tiled": True},
        {"num_cores_per_group": 2, "padding_side": "left"},
        {"num_cores_per_group": 0},
    ],
)
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="must|excludes"):
        make("cpu", **options)


def test_the_published_flat_index_walks_keys_and_values_of_each_layer(device):
    cache = make(device)
    for number, stored in enumerate(cache.past_key_values):
        stored.fill_(float(number))
    read = []
    for key_layer_idx in range(0, len(cache.past_key_values), 2):  # the published loop
        k_cache, v_cache = cache.get_kv_by_layer_id(key_layer_idx, gather_index=None, slice_index=None)
        read += [k_cache.unique().item(), v_cache.unique().item()]
    assert read == [0.0, 1.0, 2.0, 3.0]
    assert [t.unique().item() for layer in range(LAYERS) for t in cache.layer(layer)] == read
    assert [t.data_ptr() for t in cache.past_key_values] == [t.data_ptr() for t in cache.tensors().values()]


def test_published_properties():
    base = make("cpu", continuous_batching=False, padding_side="left")
    assert base.kv_shape == (BATCH, HEADS, LENGTH, DIM) == tuple(base.past_key_values[0].shape)
    assert (base.is_kv_cache_tiled, base.is_continuous_batching, base.flash_decoding_enabled) == (False,) * 3
    assert base.padding_side == "left"
    shard = make("cpu", num_cores_per_group=2)
    assert shard.flash_decoding_enabled
    assert shard.kv_shape == (BATCH, HEADS, LENGTH // 2 + 1, DIM) == tuple(shard.past_key_values[3].shape)
    tiled = SlotKVCacheManager(1, 2, HEADS, 256, DIM, torch.float32, tiled=True, device="cpu")
    assert tiled.is_kv_cache_tiled
    assert tiled.kv_shape == (2, HEADS, 128, 2, DIM) == tuple(tiled.past_key_values[0].shape)


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_a_bucket_beyond_the_length_clamps_as_a_slice_does(device, padding_side):
    cache, new = make(device, padding_side=padding_side), new_tokens(1, 1, device)
    assert cache.get_cache(LENGTH + 5)[1][0].shape == (BATCH, HEADS, LENGTH, DIM)
    assert cache.get_cache(1, skip_slice=True, anything="else")[0][1].shape == (BATCH, HEADS, LENGTH, DIM)
    cache.update_cache(False, ids([0], device), ids([[3]], device), new, seq_len=LENGTH + 5)
    assert torch.equal(cache.get_cache(LENGTH)[0][0][0, :, -1 if padding_side == "left" else 3], new[0][0][0, :, 0])


def test_seq_len_of_a_shard_counts_the_garbage_slot(device):
    shard = make(device, num_cores_per_group=2)
    new, length = new_tokens(1, 1, device), LENGTH // 2
    shard.update_cache(
        False, ids([1], device), ids([[5]], device), new, seq_len=length + 1, active_mask=ids([[0]], device)
    )
    keys = shard.get_cache(length + 1)[0][0]
    assert keys.shape[2] == length + 1
    assert torch.equal(keys[1, :, length], new[0][0][0, :, 0]), "what is not owned goes to the last place"
    assert not keys[:, :, :length].any()
    assert shard.get_cache(length)[0][0].shape[2] == length
    assert shard.get_cache(2, skip_slice=True)[0][0].shape[2] == length + 1


@dataclass
class ModelConfig:
    num_hidden_layers: int = 3
    num_attention_heads: int = 32
    hidden_size: int = 4096


@dataclass
class NeuronConfig:
    tp_degree: int = 1
    max_batch_size: int = 2
    sequence_length: int = 16
    torch_dtype: torch.dtype = torch.bfloat16
    padding_side: str = "right"
    continuous_batching: bool = True
    flash_decoding_enabled: bool = False
    num_cores_per_group: int = 1


@pytest.mark.parametrize(
    ("attention_heads", "kv_heads", "ranks", "expected"),
    [
        (32, 8, 1, 8),  # one rank holds all
        (32, 8, 2, 4),  # dealt out
        (32, 8, 8, 1),
        (32, 8, 32, 1),  # replicated, one a rank
        (56, 8, 32, 1),
        (32, 6, 4, 8),  # 4 ranks, 6 heads: as many as there are query heads
        (30, 6, 4, 8),  # and these padded to 32
        (32, 32, 4, 8),  # multi-head attention
        (30, 30, 4, 8),
    ],
)
def test_heads_of_a_rank_follow_the_published_sharding(attention_heads, kv_heads, ranks, expected):
    config = ModelConfig(num_attention_heads=attention_heads, hidden_size=attention_heads * 4)
    cache = SlotKVCacheManager.from_config(config, NeuronConfig(tp_degree=ranks), num_kv_head=kv_heads, device="cpu")
    assert cache.kv_shape == (2, expected, 16, 4)
    assert len(cache.past_key_values) == 6
    assert cache.past_key_values[0].dtype == torch.bfloat16


@dataclass
class TodaysNeuronConfig:
    tp_degree: int = 1
    max_batch_size: int = 2
    sequence_length: int = 16
    torch_dtype: torch.dtype = torch.bfloat16
    continuous_batching: bool = True


@pytest.mark.parametrize(("heads", "ranks", "expected"), [(8, 1, 8), (8, 4, 2), (32, 32, 1)])
def test_todays_number_of_heads_is_split_among_the_ranks(heads, ranks, expected):
    cache = SlotKVCacheManager.from_config(ModelConfig(), TodaysNeuronConfig(ranks), heads, device="cpu")
    assert (cache.kv_shape, cache.padding_side) == ((2, expected, 16, 128), "right")


@pytest.mark.parametrize("arguments", [{}, {"actual_num_key_value_heads": 8, "num_kv_head": 8}])
def test_one_number_of_heads_is_needed(arguments):
    with pytest.raises(ValueError, match="actual_num_key_value_heads and num_kv_head"):
        SlotKVCacheManager.from_config(ModelConfig(), TodaysNeuronConfig(), **arguments, device="cpu")


def test_heads_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match="actual_num_key_value_heads.*tp_degree 3.*8"):
        SlotKVCacheManager.from_config(ModelConfig(), TodaysNeuronConfig(3), 8, device="cpu")


def test_from_config_reads_optional_fields(device):
    expected = NeuronConfig(flash_decoding_enabled=True, num_cores_per_group=4, sequence_length=14)
    with pytest.warns(UserWarning, match="max_length.*16"):
        shard = SlotKVCacheManager.from_config(ModelConfig(), expected, num_kv_head=8, device=device)
    assert shard.kv_shape == (2, 8, 5, 128)
    off = NeuronConfig(num_cores_per_group=4, padding_side="left", continuous_batching=False)
    base = SlotKVCacheManager.from_config(ModelConfig(), off, num_kv_head=8, device=device)
    assert (base.kv_shape, base.padding_side) == ((2, 8, 16, 128), "left")
    assert not base.is_continuous_batching
    wide = ModelConfig()
    wide.head_dim = 80  # a model's own word, where it gives one
    assert SlotKVCacheManager.from_config(wide, NeuronConfig(), num_kv_head=8, device=device).head_dim == 80


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (4096, (128, 256, 512, 1024, 2048, 4096)),
        (600, (128, 256, 600)),  # 512 is too near
        (513, (128, 256, 513)),
        (128, (128,)),
        (40, (40,)),
    ],
)
def test_the_ladder_of_lengths_is_the_published_one(length, sizes):
    ladder = SlotKVCacheManager(1, 1, 1, length, 1, torch.float32, device="cpu").length_ladder()
    assert ladder.sizes == sizes
    assert [ladder.bucket_for(n) for n in sizes] == list(sizes)


def test_graphs_of_length_buckets_equal_a_graph_of_the_full_length(device):
    cache = make(device, length=32)
    slots = [Slot("q", ("batch", HEADS, DIM), torch.float32), Slot("out", ("batch", HEADS, DIM), torch.float32)]
    slots += [
        Slot("positions", ("batch", 1), torch.int64),
        Slot("new", ("batch", 2 * LAYERS, HEADS, 1, DIM), torch.float32),
    ]
    buffers = StepBuffers(slots, max_batch_size=BATCH, device=device)
    for name, stored in cache.tensors().items():
        buffers.adopt(name, stored)

    def step_for(bucket):
        def step(batch):
            new = batch.new.unbind(1)
            pairs = [new[i : i + 2] for i in range(0, 2 * LAYERS, 2)]
            rows = torch.arange(batch.q.shape[0], device=batch.q.device)
            cache.update_cache(False, rows, batch.positions, pairs, bucket)
            keys, values = (t[: batch.q.shape[0]] for t in cache.get_cache(bucket)[1])
            scores = torch.einsum("bhd,bhld->bhl", batch.q, keys)
            views = torch.arange(keys.shape[2], device=batch.q.device) <= batch.positions[:, :, None]
            weights = torch.where(views, scores, -torch.inf).softmax(-1)
            batch.out.copy_(torch.einsum("bhl,bhld->bhd", weights, values))

        return step

    ladder = cache.length_ladder(shortest=4)
    assert ladder.sizes == (4, 8, 16, 32)
    graphs = {n: GraphManager(step_for(n), buffers, BucketLadder([2], BATCH)) for n in ladder}
    for graph in graphs.values():
        graph.capture(progress=False)
    generator = torch.Generator().manual_seed(3)
    for position in range(32):
        buffers.q.copy_(torch.randn(BATCH, HEADS, DIM, generator=generator))
        buffers.new.copy_(torch.randn(BATCH, 2 * LAYERS, HEADS, 1, DIM, generator=generator))
        buffers.positions.fill_(position)
        graphs[32].replay(BATCH)
        whole = buffers.out.clone()
        graphs[ladder.bucket_for(position + 1)].replay(BATCH)
        torch.testing.assert_close(buffers.out, whole)
    for graph in graphs.values():
        graph.close()


def test_repr_has_sizes_and_counts():
    assert repr(make("cpu")).startswith("SlotKVCacheManager(2 layers of [4, 2, 12, 5], float32, padding_side='right'")


@pytest.mark.parametrize("case", ["positions", "owned", "offset"])
def test_scatter_versions_write_the_same(device, case):
    generator = torch.Generator().manual_seed(1)
    new = torch.randn(3, 2, 4, 5, generator=generator).transpose(2, 3).contiguous().transpose(2, 3)  # strided
    slots, positions, owned, shards, offset = ids([2, 7, 0], "cpu"), None, None, 1, 0
    if case == "positions":
        positions = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(3)])  # 6.. are outside
    elif case == "owned":
        positions = torch.arange(4).expand(3, 4) + 2
        owned, shards = positions % 2 == 0, 2
    else:
        offset = 2
    results = []
    for version in (slot_scatter_torch, slot_scatter_triton):
        if version is slot_scatter_torch and device != "cpu":
            pytest.skip("the torch version runs on a CPU")
        cache = torch.zeros(3, 2, 6, 5, device=device)
        tensors = [t if t is None else t.to(device) for t in (new, slots, positions, owned)]
        version(cache, *tensors, shards, offset)
        results.append(cache[:, :, :5] if case == "owned" else cache)  # what garbage holds is nobody's promise
    assert results[0].any()
    assert torch.equal(*results)


@pytest.mark.parametrize("length", [6, 130])
def test_a_shift_skips_invalid_slots(device, length):
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(3, 2, length, 5, generator=generator)
    new = torch.randn(2, 2, 3, 5, generator=generator)
    expected = start.clone()
    expected[2] = torch.cat([start[2, :, 3:], new[0]], dim=1)
    for version in (slot_shift_torch, slot_shift):
        cache = start.clone().to(device)
        version(cache, new.to(device), ids([2, 5], device))
        assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_one_captured_update_is_right_for_any_later_slots_and_positions(device, padding_side):
    caches = [make(device, padding_side=padding_side) for _ in range(2)]
    buffers = StepBuffers(
        [
            Slot("seq_ids", ("batch",), torch.int64, pad=-1),
            Slot("positions", ("batch", 1), torch.int64, pad=-1),
            Slot("new", ("batch", HEADS, 1, DIM), torch.float32),
        ],
        max_batch_size=BATCH,
        device=device,
    )
    for name, tensor in caches[0].tensors().items():
        buffers.adopt(name, tensor)

    def step(batch):
        caches[0].update_cache(False, batch.seq_ids, batch.positions, [[batch.new, batch.new * 2]] * LAYERS, LENGTH)

    graphs = GraphManager(step, buffers, (1, 2, BATCH))
    graphs.capture(progress=False)
    assert all(not t.any() for t in caches[0].tensors().values()), "pad rows name no slot, and write nothing"
    generator = torch.Generator().manual_seed(9)
    for i in range(20):
        n = 1 + i % BATCH
        slots = torch.randperm(BATCH, generator=generator)[:n]
        positions = torch.randint(LENGTH, (n, 1), generator=generator)
        new = torch.randn(n, HEADS, 1, DIM, generator=generator)
        buffers.seq_ids[:n], buffers.positions[:n], buffers.new[:n] = slots, positions, new
        graphs.replay(n)
        slots, positions, new = slots.to(device), positions.to(device), new.to(device)
        caches[1].update_cache(False, slots, positions, [[new, new * 2]] * LAYERS, LENGTH)
        for name, tensor in caches[1].tensors().items():
            assert torch.equal(tensor, caches[0].tensors()[name]), f"step {i}, {name}"
    graphs.close()


def test_slot_operators_are_registered_rightly(device):
    cache, new = torch.zeros(3, 2, 6, 5, device=device), torch.randn(2, 2, 1, 5, device=device)
    slots, positions = ids([2, 0], device), ids([[1], [3]], device)
    torch.library.opcheck(torch.ops.graphdecode.slot_scatter.default, (cache, new, slots, positions, None, 1, 0))
    torch.library.opcheck(torch.ops.graphdecode.slot_shift.default, (cache, new, slots))
