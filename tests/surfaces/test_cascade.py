"""Attention over keys in levels, FlashInfer's cascade, against float64 over each query's keys one after another."""

import contextlib
import math

import pytest
import torch
from attention_oracle import Options, attend
from paged_rows import PagedRows, tolerance

from graphdecode import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BucketLadder,
    GraphManager,
    MultiLevelCascadeAttentionWrapper,
    Slot,
    StepBuffers,
)

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 8
TREE = [([5], [33]), ([2, 0, 3], [9, 4, 20]), ([1, 1, 1, 1, 1], [3, 17, 0, 8, 1])]  # of each level queries and keys


def workspace(device):
    return torch.zeros(8 << 20, dtype=torch.uint8, device=device)


def queries(count, device="cpu", dtype=torch.float32, seed=0):
    return torch.randn(count, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def starts(counts):
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


class Levels:
    """The levels of a cascade in one pool of pages, and the lists that a plan takes."""

    def __init__(self, levels, device, dtype=torch.float32, layout="NHD", seed=0):
        self.queries = [counts for counts, _ in levels]
        self.lens = [lens for _, lens in levels]
        lens = [each for level in self.lens for each in level]
        shape = {"kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE}
        self.rows = PagedRows.random(lens, dtype=dtype, layout=layout, device=device, seed=seed, **shape)
        self.cache = (self.rows.k_cache, self.rows.v_cache)
        self.lists = [[], [], [], []]
        first = 0
        for counts, part in levels:
            at = slice(first, first + len(part))
            pages = self.rows.indptr[first : first + len(part) + 1]
            indices = self.rows.indices[pages[0] : pages[-1]]
            of_level = (starts(counts).to(device), pages - pages[0], indices, self.rows.last_page_len[at])
            for tensors, tensor in zip(self.lists, of_level, strict=True):
                tensors.append(tensor)
            first += len(part)

    def planned(self, wrapper, dtype=torch.float32, **options):
        arguments = {"q_data_type": dtype, "kv_data_type": self.rows.k_cache.dtype} | options
        wrapper.plan(*self.lists, HEADS, KV_HEADS, DIM, PAGE, **arguments)
        return wrapper

    def expected(self, q, options, *, causal=False):
        """Each query over its row of every level, one level after another."""
        results = []
        for query in range(q.shape[0]):
            parts, first = [], 0
            for counts, lens in zip(self.queries, self.lens, strict=True):
                ends = starts(counts).tolist()[1:]
                row = next(i for i, end in enumerate(ends) if query < end)
                parts.append((first + row, ends[row] - 1 - query))
                first += len(lens)
            keys, values = (torch.cat([part[row] for row, _ in parts]) for part in (self.rows.keys, self.rows.values))
            newer, count = parts[-1][1], len(keys)
            if causal:
                count -= newer
                newer = 0
            results.append(attend_from(q[query : query + 1], keys[:count], values[:count], newer, options))
        return torch.cat(results)


def attend_from(q, keys, values, newer, options):
    """Attention of a query that stands `newer` places before the last key, and sees that as well."""
    if not newer or options.mode == "NONE":
        return attend(q, keys, values, options)[0]
    # the oracle's query stands last: as many keys as it must not stand behind are turned to where they would be then
    from attention_oracle import rope, slope

    at = len(keys) - 1 - newer
    if options.mode == "ROPE_LLAMA":
        base = Options(options.sm_scale, soft_cap=options.soft_cap)
        turned = rope(q.double().cpu(), [at], options)
        return attend(turned, rope(keys.double().cpu(), list(range(len(keys))), options), values, base)[0]
    logits = (keys.double()[:, torch.arange(HEADS) // (HEADS // KV_HEADS)] * q.double().cpu()).sum(-1)
    logits = logits * options.sm_scale
    if options.soft_cap:
        logits = options.soft_cap * torch.tanh(logits / options.soft_cap)
    slopes = torch.tensor([slope(head, HEADS) for head in range(HEADS)], dtype=torch.float64)
    logits = logits + slopes * (torch.arange(len(keys)) - at)[:, None]
    part = values.double()[:, torch.arange(HEADS) // (HEADS // KV_HEADS)]
    return (torch.softmax(logits, 0)[..., None] * part).sum(0, keepdim=True)


def assert_near(out, expected, close=1e-4):
    torch.testing.assert_close(out.double().cpu(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_query_sees_its_row_of_every_level(count, dtype, layout, device):
    levels = Levels(TREE[3 - count :], device, dtype, layout)
    q = queries(5, device, dtype)
    wrapper = levels.planned(MultiLevelCascadeAttentionWrapper(count, workspace(device), layout), dtype)
    caches = tuple(each.transpose(1, 2) if layout == "HND" else each for each in levels.cache)
    out = wrapper.run(q, caches)
    assert out.dtype == dtype
    assert_near(out, levels.expected(q, Options(DIM**-0.5)), tolerance(dtype, dtype))
    assert torch.equal(wrapper.forward(q, torch.stack(caches, 1)), out)


@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA", "ALIBI"])
@pytest.mark.parametrize("causal", [False, True])
def test_options_apply_over_all_levels(mode, causal, backend):
    levels = Levels([([6], [70]), ([2, 3, 1], [5, 19, 4])], backend)
    q = queries(6, backend)
    wrapper = MultiLevelCascadeAttentionWrapper(2, workspace(backend))
    arguments = {"sm_scale": 0.2, "logits_soft_cap": 3.0, "rope_scale": 2.0, "rope_theta": 5e3, "causal": causal}
    levels.planned(wrapper, pos_encoding_mode=mode, **arguments)
    options = Options(0.2, soft_cap=3.0, mode=mode, rope_scale=2.0, rope_theta=5e3)
    assert_near(wrapper.run(q, levels.cache), levels.expected(q, options, causal=causal), 1e-3)


@pytest.mark.parametrize("lens", [[30, 9, 12], [2, 1, 3]])
def test_a_window_of_one_level_is_that_of_the_sequence(lens, backend):
    levels = Levels([([2, 1, 3], lens)], backend)
    q = queries(6, backend)
    wrapper = levels.planned(MultiLevelCascadeAttentionWrapper(1, workspace(backend)), window_left=4, causal=True)
    assert_near(wrapper.run(q, levels.cache), levels.expected(q, Options(DIM**-0.5, window_left=4), causal=True))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16])
def test_queries_and_keys_may_have_different_dtypes(dtype, kv_dtype, device):
    levels, q = Levels(TREE, device, kv_dtype), queries(5, device, dtype)
    out = levels.planned(MultiLevelCascadeAttentionWrapper(3, workspace(device)), dtype).run(q, levels.cache)
    close = 1e-3 if dtype == torch.float16 else 0.13
    assert out.dtype == dtype
    assert_near(out.float(), levels.expected(q.float(), Options(DIM**-0.5)), close)


def graph_buffers(rows, pages, device):
    sizes = [[each + 1 for each in rows], [each + 1 for each in rows], pages, rows]
    return [[torch.zeros(size, dtype=torch.int32, device=device) for size in of_kind] for of_kind in sizes]


LATER = [
    [([1], [5]), ([1], [3])],
    [([4], [60]), ([1, 1, 1, 1], [9, 0, 40, 8])],
    [([2], [8]), ([1, 1], [1, 16])],
    [([3], [0]), ([1, 2], [4, 21])],
]


def test_in_buffers_any_rows_up_to_their_capacity_may_be_planned(device):
    buffers = graph_buffers([1, 4], [10, 12], device)
    wrapper = MultiLevelCascadeAttentionWrapper(2, workspace(device), "NHD", True, *buffers)
    assert wrapper.is_cuda_graph_enabled
    q = queries(4, device)
    for number, case in enumerate(LATER):
        levels = Levels(case, device, seed=number)
        levels.planned(wrapper, causal=True)
        count = sum(case[0][0])
        padded = q.index_fill(0, torch.arange(count, 4, device=device), math.nan)
        out = wrapper.run(padded, levels.cache)
        assert_near(out[:count], levels.expected(q[:count], Options(DIM**-0.5), causal=True))
        assert not out[count:].any()
        assert buffers[3][1][: len(case[1][1])].tolist() == levels.lists[3][1].tolist()


@pytest.mark.parametrize("captures_plan", [False, True])
def test_a_captured_plan_is_right_at_later_rows_and_lengths(captures_plan, device):
    states = [Levels(case, device, seed=number) for number, case in enumerate(LATER)]
    pool = max(levels.cache[0].shape[0] for levels in states)
    cache = tuple(torch.zeros(pool, PAGE, KV_HEADS, DIM, device=device) for _ in "kv")
    saved = graph_buffers([1, 4], [10, 12], device)
    part = graph_buffers([1, 4], [10, 12], device)
    wrapper = MultiLevelCascadeAttentionWrapper(2, workspace(device), "NHD", True, *part)
    slots = [Slot(name, ("batch", HEADS, DIM), torch.float32) for name in ("q", "out")]
    buffers = StepBuffers(slots, max_batch_size=4, device=device)
    sizes = (HEADS, KV_HEADS, DIM, PAGE)

    def load(levels):
        for kind, tensors in enumerate(levels.lists):
            for buffer, tensor in zip(saved[kind], tensors, strict=True):
                buffer[: tensor.shape[0]].copy_(tensor)
                buffer[tensor.shape[0] :].fill_(tensor[-1].item() if kind < 2 else 0)
        for pages, arguments in zip(cache, levels.cache, strict=True):
            pages[: arguments.shape[0]].copy_(arguments)
        buffers.q.copy_(queries(4, device, seed=7))
        if not captures_plan:
            wrapper.plan(*levels.lists, *sizes, causal=True, q_data_type="float32")

    def step(batch):
        if captures_plan:
            wrapper.plan(*saved, *sizes, causal=True, q_data_type="float32")
        batch.out.copy_(wrapper.run(batch.q, cache))

    load(states[1])
    step(buffers.narrow(4))
    for number, tensor in enumerate([*wrapper.workspace, *(each for tensors in part for each in tensors)]):
        buffers.adopt(f"cascade_{number}", tensor)
    constants = [*(each for tensors in saved for each in tensors), *cache]
    graphs = GraphManager(step, buffers, BucketLadder([4], 4), constants=constants)
    with contextlib.closing(graphs):
        graphs.capture(progress=False)
        for levels in states:
            buffers.set_live_rows(4)
            load(levels)
            graphs.replay(4)
            count = sum(levels.queries[0])
            assert_near(buffers.out[:count], levels.expected(buffers.q[:count], Options(DIM**-0.5), causal=True))
            assert not buffers.out[count:].any()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_older_wrapper_has_its_prefix_beside_the_pages(layout, device):
    rows = PagedRows.random(
        [9, 0, 21], page_size=PAGE, kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float16, layout=layout, device=device
    )
    q = queries(3, device, torch.float16)
    draw = torch.Generator().manual_seed(3)
    k, v = (torch.randn(40, KV_HEADS, DIM, generator=draw).half().to(device) for _ in "kv")
    wrapper = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
    arguments = (rows.indptr, rows.indices, rows.last_page_len, HEADS, KV_HEADS, DIM, PAGE)
    wrapper.begin_forward(*arguments, data_type="float16")
    caches = tuple(each.transpose(1, 2) if layout == "HND" else each for each in (rows.k_cache, rows.v_cache))
    shared = tuple(each.transpose(0, 1) if layout == "HND" else each for each in (k, v))
    out = wrapper.forward(q, *shared, caches)
    for row in range(3):
        keys = (torch.cat([k.cpu().float(), part]) for part in (rows.keys[row],))
        values = torch.cat([v.cpu().float(), rows.values[row]])
        expected = attend(q[row : row + 1], *keys, values, Options(DIM**-0.5))[0]
        assert_near(out[row : row + 1], expected, 1e-3)
    with pytest.raises(ValueError, match="k_shared"):
        wrapper.forward(q, k[..., :32], v, caches)
    wrapper.reset_workspace_buffer(workspace(device), None)
    with pytest.raises(RuntimeError, match="begin_forward"):
        wrapper.forward(q, *shared, caches)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"window_left": 4}, "window_left must be -1 with 2 levels.*4"),
        ({"sm_scale": math.nan}, "sm_scale"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
        ({"pos_encoding_mode": "YARN"}, "pos_encoding_mode"),
        ({"rope_theta": 0.0, "pos_encoding_mode": "ROPE_LLAMA"}, "rope_theta"),
        ({"q_data_type": "int8"}, "q_data_type"),
        ({"qo_indptr_arr": [torch.tensor([0, 2], dtype=torch.int32)]}, "qo_indptr_arr must be a list of 2"),
        ({"qo_indptr_arr": [[0, 2], [0, 1, 2]]}, r"qo_indptr_arr\[0\]"),
        ({"qo_indptr_arr": [torch.tensor([0, 2]), starts([1, 1])]}, r"qo_indptr_arr\[0\]"),
        ({"qo_indptr_arr": [starts([3]), starts([1, 1])]}, "qo_indptr.*2"),
        ({"qo_indptr_arr": [starts([2]), starts([3, -1])]}, "qo_indptr must rise"),
        ({"paged_kv_indptr_arr": [starts([1]), starts([1, 1, 1])]}, r"paged_kv_indptr_arr\[1\].*4 and 2"),
        ({"paged_kv_indptr_arr": [starts([9]), starts([1, 1])]}, "indptr must rise"),
        ({"paged_kv_last_page_len": [starts([8])[1:], starts([9, -8])[1:]]}, "last_page_len.*8.*9"),
        ({"paged_kv_indices_arr": [torch.zeros(2, 2, dtype=torch.int32)] * 2}, r"paged_kv_indices_arr\[0\]"),
    ],
)  # fmt: skip
def test_invalid_arguments_raise_by_name_before_any_change(wrong, names):
    levels = Levels([([2], [8]), ([1, 1], [5, 3])], "cpu")
    wrapper, q = MultiLevelCascadeAttentionWrapper(2, workspace("cpu")), queries(2)
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(q, levels.cache)
    before = levels.planned(wrapper).run(q, levels.cache)
    named = dict(
        zip(
            ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len"),
            levels.lists,
            strict=True,
        )
    )
    sizes = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE}
    with pytest.raises(ValueError, match=names):
        wrapper.plan(**{**named, **sizes, "q_data_type": "float32"} | wrong)
    assert torch.equal(wrapper.run(q, levels.cache), before)


def test_queries_buffers_and_workspaces_that_do_not_fit_are_refused():
    levels = Levels([([2], [8]), ([1, 1], [5, 3])], "cpu")
    wrapper = levels.planned(MultiLevelCascadeAttentionWrapper(2, workspace("cpu")))
    for wrong, names in (
        (queries(3), "the 2 queries that were planned, got 3"),
        (queries(2)[:, :4], "q must be"),
        (queries(2, dtype=torch.float16), "float16"),
    ):
        with pytest.raises(ValueError, match=names):
            wrapper.run(wrong, levels.cache)
    with pytest.raises(ValueError, match="num_levels"):
        MultiLevelCascadeAttentionWrapper(0, workspace("cpu"))
    with pytest.raises(ValueError, match="kv_layout"):
        MultiLevelCascadeAttentionWrapper(2, workspace("cpu"), "DNH")
    with pytest.raises(ValueError, match="qo_indptr_buf_arr"):
        MultiLevelCascadeAttentionWrapper(2, workspace("cpu"), "NHD", True)
    small = MultiLevelCascadeAttentionWrapper(2, workspace("cpu"), "NHD", True, *graph_buffers([1, 1], [9, 9], "cpu"))
    with pytest.raises(ValueError, match="level 1 .* 1 .* 2"):
        levels.planned(small)
    small = MultiLevelCascadeAttentionWrapper(2, workspace("cpu"), "NHD", True, *graph_buffers([1, 2], [9, 1], "cpu"))
    with pytest.raises(ValueError, match=r"paged_kv_indices_buf_arr\[1\] .*1.*2"):
        levels.planned(small)
    with pytest.raises(ValueError, match="int_workspace_buffers .*2"):
        wrapper.reset_workspace_buffer(workspace("cpu"), [workspace("cpu")])
    wrapper.reset_workspace_buffer(workspace("cpu"), [workspace("cpu")] * 2)
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(queries(2), levels.cache)
    several = Levels([([2], [8])], "cpu")
    with pytest.raises(ValueError, match="window_left=3.*causal"):
        several.planned(MultiLevelCascadeAttentionWrapper(1, workspace("cpu")), window_left=3).run(
            queries(2), several.cache
        )
