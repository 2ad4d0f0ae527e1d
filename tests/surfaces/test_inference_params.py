"""`InferenceParams` as its users see it: order, tails, formats, sizes, errors, and managers of their own."""

from collections import OrderedDict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphdecode import InferenceParams, KVCacheManager, NonPagedKVCacheManager, PagedKVCacheManager
from graphdecode.cache import UnknownSequenceError

BOTH = pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])


def make(device, paged, **options):
    sizes = {"total_num_pages": 12, "page_size": 4} if paged else {}
    arguments = {"max_batch_size": 4, "max_sequence_length": 16, "num_heads_kv": 2, "head_dim_k": 3} | sizes
    params = InferenceParams(is_paged=paged, device=device, **(arguments | {"dtype": torch.float32} | options))
    params.allocate_memory(1)
    return params


@BOTH
def test_rows_follow_the_step_dict_and_tails_repeat(device, paged):
    params = make(device, paged)
    params.pre_step(OrderedDict([(8, 5), (7, 3)]))  # ids that a set would put the other way round
    params.pre_step(OrderedDict([(100, 2), (7, 1), (8, 4)]))
    assert list(params.sequences.items()) == [(100, 2), (7, 4), (8, 9)]
    assert params.pre_step_seqlens.tolist() == [0, 3, 5, 0]
    assert params.cu_seqlens_q.tolist() == [0, 2, 3, 7, 7]
    assert params.cu_seqlens_kv.tolist() == [0, 2, 6, 15, 15]
    assert params.get_seqlens_pre_step() is params.pre_step_seqlens
    assert params.batch_size == 3
    assert all(t.dtype == torch.int32 for t in (params.pre_step_seqlens, params.cu_seqlens_q, params.cu_seqlens_kv))


@BOTH
def test_buffers_keep_their_addresses(device, paged):
    params = make(device, paged)
    before = {name: t.data_ptr() for name, t in params.tensors().items()}
    for n in range(1, 4):
        params.pre_step(OrderedDict((i * n, n) for i in range(4)))
    params.reset()
    assert {name: t.data_ptr() for name, t in params.tensors().items()} == before
    assert params.cu_seqlens_kv.tolist() == [0] * 5


def test_the_cache_is_zero_filled_and_one_page_is_null(device):
    rows = make(device, False, head_dim_v=5).cache_manager.cache[1]
    pages = make(device, True, head_dim_v=5).cache_manager.cache[1]
    assert [tuple(t.shape) for t in (*rows, *pages)] == [(4, 16, 2, 3), (4, 16, 2, 5), (13, 4, 2, 3), (13, 4, 2, 5)]
    assert not any(t.any() for t in (*rows, *pages))


def test_unused_entries_of_the_page_table_name_the_null_page(device):
    params = make(device, True)
    table = params.cache_manager.page_table
    assert table.tolist() == [[12] * 4] * 4
    params.pre_step(OrderedDict([(1, 5), (2, 1), (3, 1)]))
    assert [row.count(12) for row in table.tolist()] == [2, 3, 3, 4]
    params.pre_step(OrderedDict([(3, 4)]))
    assert [row.count(12) for row in table.tolist()] == [2, 4, 4, 4]
    assert params.cache_manager.pool.used == 2


@BOTH
@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
def test_step_returns_the_documented_shapes(device, paged, form):
    params = make(device, paged, head_dim_v=5)
    params.pre_step(OrderedDict([(1, 2), (2, 1)]))
    lead = {"bshd": (2, 2), "sbhd": (2, 2), "thd": (4,)}[form]
    k, v = torch.randn(*lead, 2, 3, device=device), torch.randn(*lead, 2, 5, device=device)
    keys, values, _, _, longest, out_format = params.step(1, k, v, form)
    rows = {"thd": 4}.get(form, 2)
    assert keys.shape == ((13, 4, 2, 3) if paged else (rows, 16, 2, 3))
    assert values.shape == ((13, 4, 2, 5) if paged else (rows, 16, 2, 5))
    assert (longest, out_format) == (16, form if form == "bshd" else f"{form}_2bshd")


def test_pages_are_allocated_as_sequences_grow(device):
    params = make(device, True, total_num_pages=3)
    params.pre_step(OrderedDict([(1, 4), (2, 4)]))
    assert params.cache_manager.pool.used == 2
    params.pre_step(OrderedDict([(1, 1)]))
    assert params.cache_manager.pool.used == 2


def test_a_paged_manager_tells_its_sequences_and_pages(device, caplog):
    params = make(device, True, total_num_pages=4)
    manager = params.cache_manager
    params.pre_step(OrderedDict([(9, 5), (4, 3)]))
    assert (manager.get_sequence_count(), manager.get_sequence_lengths()) == (2, [5, 3])
    assert (manager.get_page_count(9), manager.get_page_list(9)) == (2, manager.page_table[0, :2].tolist())
    assert manager.get_page_table([9, 4]) is manager.page_table
    swapped, null = manager.get_page_table([4, 9]), manager.null_page
    assert swapped.tolist() == [manager.page_table[1].tolist(), manager.page_table[0].tolist(), [null] * 4, [null] * 4]
    assert manager.has_free_page()
    params.pre_step(OrderedDict([(9, 4), (4, 1)]))
    assert not manager.has_free_page()
    with caplog.at_level("DEBUG"):
        manager.print_cache()
    assert any("sequence 9, 9 tokens" in record.getMessage() for record in caplog.records)
    with pytest.raises(UnknownSequenceError):
        manager.get_page_list(5)
    with pytest.raises(ValueError, match=r"sequences .*4.*got 5"):
        manager.get_page_table([9, 4] * 2 + [9])


def test_truncate_shortens_the_page_table_at_once(device):
    params = make(device, True)
    params.pre_step(OrderedDict([(9, 9)]))
    params.cache_manager.truncate(9, 4)
    table, null = params.cache_manager.get_page_table([9]), params.cache_manager.null_page
    assert table[0].tolist() == [*params.cache_manager.get_page_list(9), null, null, null]


def test_converted_pages_are_contiguous_and_zero_past_each_length(device):
    params = make(device, True)
    k = torch.randn(2, 6, 2, 3, device=device)
    params.pre_step(OrderedDict([(1, 6), (2, 3)]))
    params.cache_manager.cache[1][0].fill_(9.0)
    params.step(1, k, k, "bshd")
    keys, values = params.convert_paged_to_nonpaged(1)
    assert keys.shape == values.shape == (2, 16, 2, 3)
    assert keys.is_contiguous()
    assert torch.equal(keys[0, :6], k[0])
    assert torch.equal(keys[1, :3], k[1, :3])
    assert not keys[0, 6:].any()
    assert not keys[1, 3:].any()
    with pytest.raises(ValueError, match="layer 2"):
        params.convert_paged_to_nonpaged(2)
    with pytest.raises(ValueError, match="is_paged"):
        make(device, False).convert_paged_to_nonpaged(1)


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_size": 0},
        {"max_sequence_length": -1},
        {"num_heads_kv": None},
        {"head_dim_k": 1.5},
        {"head_dim_v": 0},
        {"total_num_pages": None},
        {"page_size": 0},
        {"max_ctx_len": 0},
        {"max_ctx_len": 17},
        {"dtype": None},
        {"qkv_format": "bhsd"},
        {"max_batch_size": 2**16, "max_sequence_length": 2**16},
    ],
)
def test_invalid_sizes_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        make("cpu", True, **options)


@BOTH
def test_errors_name_the_value_and_the_limit(device, paged):
    params = make(device, paged, max_ctx_len=6)
    with pytest.raises(ValueError, match=r"'x' .*1\.\.6.*7"):
        params.pre_step(OrderedDict(x=7))
    params.pre_step(OrderedDict(x=6))
    params.pre_step(OrderedDict(x=6))
    with pytest.raises(ValueError, match="'x' .*17.*max_sequence_length.*16"):
        params.pre_step(OrderedDict(x=5))
    with pytest.raises(ValueError, match="5.*max_batch_size.*4"):
        params.pre_step(OrderedDict((i, 1) for i in range(5)))
    assert params.sequences == {"x": 12}


class CopyCounter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket not in (torch.ops.aten.slice, torch.ops.aten.alias, torch.ops.aten.detach):
            self.operators.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@BOTH
@pytest.mark.parametrize("steps", [[(1, 1), (2, 1)], [(2, 5), (1, 1)], [(5, 1), (2, 2), (6, 1)], []])
def test_pre_step_makes_one_copy_and_nothing_else(paged, steps):
    params = make("cpu", paged)
    params.pre_step(OrderedDict([(1, 4), (2, 3)]))
    with CopyCounter() as counter:
        params.pre_step(OrderedDict(steps))
    assert counter.operators == ["aten.copy_"]


@BOTH
def test_a_finished_batch_leaves_nothing(device, paged):
    params = make(device, paged)
    params.pre_step(OrderedDict([(1, 2)]))
    params.pre_step(OrderedDict())
    assert (params.batch_size, len(params.sequences)) == (0, 0)
    assert params.cu_seqlens_kv.tolist() == [0] * 5


def test_forking_shares_full_pages_and_copies_the_partial_one(device):
    params = make(device, True)
    params.pre_step(OrderedDict(a=6))
    manager = params.cache_manager
    manager.cache[1][1].normal_()
    params.fork("a", "b")
    (full, partial), (shared, copied) = manager.pages_of("a"), manager.pages_of("b")
    assert full == shared
    assert partial != copied
    assert torch.equal(manager.cache[1][1][partial], manager.cache[1][1][copied])
    assert params.sequences["b"] == 6


def test_truncating_a_shared_page_copies_it(device):
    params = make(device, True)
    params.pre_step(OrderedDict(a=8))
    manager = params.cache_manager
    manager.cache[1][0].copy_(torch.arange(13.0)[:, None, None, None].expand(13, 4, 2, 3))
    params.fork("a", "b")
    assert manager.pages_of("a") == manager.pages_of("b")
    params.truncate("b", 7)
    (_, source), (first, copied) = manager.pages_of("a"), manager.pages_of("b")
    assert first == manager.pages_of("a")[0]
    assert copied != source
    assert torch.equal(manager.cache[1][0][copied].cpu(), torch.full((4, 2, 3), float(source)))


@BOTH
def test_fork_and_truncate_refuse_unknown_ids_and_full_batches(device, paged):
    params = make(device, paged, max_batch_size=1)
    params.pre_step(OrderedDict(a=2))
    with pytest.raises(ValueError, match="max_batch_size.*1"):
        params.fork("a", "b")
    with pytest.raises(ValueError, match="already"):
        params.fork("a", "a")
    for call in (lambda: params.fork("b", "c"), lambda: params.truncate("b", 1)):
        with pytest.raises(UnknownSequenceError, match="'b'"):
            call()


class ListCache(KVCacheManager):
    """A manager as a user of the original might write one: no buffers of its own, sequences sorted by id."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.cache, self.sequences = {}, OrderedDict()

    def reset(self):
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number):
        self.cache[layer_number] = ([], [])

    def pre_step(self, step_dict):
        self.sequences = OrderedDict((i, self.sequences.get(i, 0) + step_dict[i]) for i in sorted(step_dict))
        return self.sequences

    def step(self, layer_number, new_k, new_v, cu_new_lens, cu_cached_lens, qkv_format):
        self.cache[layer_number][0].append(new_k)
        self.cache[layer_number][1].append(new_v)
        return new_k, new_v


def test_missing_arguments_raise_by_name():
    with pytest.raises(ValueError, match="num_heads_kv, head_dim_k and dtype .*None, None and None"):
        InferenceParams(4, 16)
    with pytest.raises(ValueError, match="num_heads_kv, head_dim_k and dtype .*2, 3 and None"):
        InferenceParams(4, 16, 2, 3)
    with pytest.raises(ValueError, match="total_num_pages .*None"):
        InferenceParams(4, 16, 2, 3, torch.float32, is_paged=True)
    with pytest.raises(ValueError, match="page_size .*None"):
        InferenceParams(4, 16, 2, 3, torch.float32, is_paged=True, total_num_pages=8)


@BOTH
def test_arguments_are_attributes(device, paged):
    params = make(device, paged)
    assert (params.num_heads_kv, params.head_dim_k, params.head_dim_v, params.dtype) == (2, 3, 3, torch.float32)
    assert (params.max_batch_size, params.max_sequence_length, params.max_ctx_len) == (4, 16, 16)
    assert (params.total_num_pages, params.page_size) == ((12, 4) if paged else (None, None))
    assert make(device, paged, head_dim_v=5, max_ctx_len=7).head_dim_v == 5
    assert make(device, paged, max_ctx_len=7).max_ctx_len == 7


class PublishedManager(KVCacheManager):
    """A contiguous manager as one is written for the original: its parameters, a base class without arguments."""

    def __init__(self, max_batch_size, max_seqlen, num_heads, head_dim_k, dtype, head_dim_v=None):
        super().__init__()
        self.shape = (max_batch_size, max_seqlen, num_heads)
        self.dims, self.dtype = (head_dim_k, head_dim_v), dtype

    def allocate_memory(self, layer_number):
        self.cache[layer_number] = tuple(torch.zeros(*self.shape, d, dtype=self.dtype) for d in self.dims)

    def pre_step(self, step_dict):
        self.before = [self.sequences.get(i, 0) for i in step_dict]
        self.sequences = OrderedDict((i, self.sequences.get(i, 0) + n) for i, n in step_dict.items())
        return self.sequences

    def step(self, layer_number, new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format):
        for cache, new in zip(self.cache[layer_number], (new_k, new_v), strict=True):
            for row, before in enumerate(self.before):
                cache[row, before : before + new.shape[1]] = new[row]
        return self.cache[layer_number]


class PublishedPagedManager(PublishedManager):
    """The paged one's parameters."""

    def __init__(
        self, total_num_pages, page_size, num_heads, head_dim_k, dtype, max_batch_size, max_seqlen, head_dim_v=None
    ):
        super().__init__(max_batch_size, max_seqlen, num_heads, head_dim_k, dtype, head_dim_v)
        self.pages = (total_num_pages, page_size)


def test_a_manager_written_for_the_original_works():
    params, part = (
        make("cpu", False, custom_cache_manager=PublishedManager, head_dim_v=5),
        make("cpu", False, head_dim_v=5),
    )
    generator = torch.Generator().manual_seed(2)
    for step in ([(8, 3), (7, 3)], [(8, 1), (7, 1)]):
        results = []
        for p in (params, part):
            p.pre_step(OrderedDict(step))
        k = torch.randn(2, step[0][1], 2, 3, generator=generator)
        v = torch.randn(2, step[0][1], 2, 5, generator=generator)
        for p in (params, part):
            keys, values, *lengths, longest, form = p.step(1, k, v, "bshd")
            results.append([keys[:2], values[:2], *lengths, p.pre_step_seqlens])
            assert (longest, form) == (16, "bshd")
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    paged = make("cpu", True, custom_cache_manager=PublishedPagedManager).cache_manager
    assert (paged.pages, paged.shape, paged.dims) == ((12, 4), (4, 16, 2), (3, 3))


def test_the_base_of_managers_takes_no_arguments_and_does_nothing():
    base = KVCacheManager()
    assert (base.cache, base.sequences) == ({}, OrderedDict())
    base.sequences["a"] = 3
    base.reset()
    assert not base.sequences
    with pytest.raises(NotImplementedError):
        base.pre_step(OrderedDict(a=1))


def test_a_custom_manager_gets_the_arguments_of_the_built_in_one(device):
    params = make(device, False, custom_cache_manager=ListCache)
    built_in = make(device, False).cache_manager
    assert isinstance(built_in, NonPagedKVCacheManager)
    assert type(built_in)(**params.cache_manager.arguments).max_seqlen == 16
    paged = make(device, True, custom_cache_manager=ListCache)
    assert PagedKVCacheManager(**paged.cache_manager.arguments).page_size == 4

    params.pre_step(OrderedDict([(9, 2), (3, 4)]))
    params.pre_step(OrderedDict([(9, 1), (3, 1)]))
    assert params.pre_step_seqlens.tolist() == [4, 2, 0, 0]  # the manager's order, everywhere
    assert params.cu_seqlens_kv.tolist() == [0, 5, 8, 8, 8]
    new = torch.zeros(2, 1, 2, 3, device=device)
    assert params.step(1, new, new, "sbhd")[0] is new
    assert params.step(1, new, new, "sbhd")[5] == "sbhd_2bshd"
    with pytest.raises(ValueError, match="ListCache.*fork"):
        params.fork(9, 10)
    params.reset()
    assert params.cu_seqlens_kv.tolist() == [0] * 5


@BOTH
def test_repr_has_sizes_and_counts(device, paged):
    params = make(device, paged, head_dim_v=4)
    params.pre_step(OrderedDict([(1, 6), (2, 3)]))
    text = repr(params)
    assert "batch_size=2" in text
    assert "2 of 4 rows, 9 tokens" in text
    assert "head_dim_v=4" in text
    assert ("12 pages: 3 used" in text) == paged
    assert "\n" not in text
