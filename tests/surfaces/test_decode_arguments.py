"""FlashInfer's arguments of today for `plan` and `run`: each means what it means there, is a hint, or is refused."""

import types

import pytest
import torch
from attention_oracle import Options
from paged_rows import PagedRows, tolerance

from graphdecode import (
    BatchDecodeWithPagedKVCacheWrapper,
    BucketLadder,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    GraphManager,
    Slot,
    StepBuffers,
)
from graphdecode.decode import fast_decode_plan, trtllm_batch_decode_with_kv_cache

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 8
SCALE = DIM**-0.5
LENS = [9, 0, 40, 8]


def rows_of(lens, device, dtype=torch.float32, seed=0):
    sizes = {"kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE}
    return PagedRows.random(lens, dtype=dtype, device=device, seed=seed, **sizes)


def queries(rows, device, dtype=torch.float32):
    return torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)


def wrapper_of(device, **options):
    return BatchDecodeWithPagedKVCacheWrapper(torch.zeros(4 << 20, dtype=torch.uint8, device=device), **options)


def planned(rows, wrapper, **options):
    pages = {"indptr": rows.indptr, "indices": rows.indices, "last_page_len": rows.last_page_len}
    sizes = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE}
    wrapper.plan(**pages | sizes | {"data_type": rows.k_cache.dtype} | options)
    return wrapper


def ran(rows, q, wrapper, **options):
    return wrapper.run(q, (rows.k_cache, rows.v_cache), **options)


def assert_near(out, expected, close=1e-5):
    torch.testing.assert_close(out.double().cpu(), expected, atol=close, rtol=close)


def lengths(rows, device):
    return torch.tensor(rows.lens, dtype=torch.int32, device=device)


NEUTRAL_PLANS = {
    "window_right": 0, "o_data_type": None, "block_tables": None, "seq_lens": None, "fixed_split_size": None,
    "disable_split_kv": False, "non_blocking": True,
}  # fmt: skip
NEUTRAL_RUNS = {
    "sinks": None, "enable_pdl": None, "q_len_per_req": None, "kv_cache_sf": None, "lse": None, "out": None,
    "skip_softmax_threshold_scale_factor": None, "window_left": None,
}  # fmt: skip


def test_neutral_values_change_nothing(device):
    rows, q = rows_of(LENS, device), queries(4, device)
    base = ran(rows, q, planned(rows, wrapper_of(device)))
    assert torch.equal(ran(rows, q, planned(rows, wrapper_of(device), **NEUTRAL_PLANS), **NEUTRAL_RUNS), base)
    hints = {"enable_pdl": True, "skip_softmax_threshold_scale_factor": 0.0}
    assert torch.equal(ran(rows, q, planned(rows, wrapper_of(device)), **hints), base)


@pytest.mark.parametrize("options", [{"fixed_split_size": 2}, {"disable_split_kv": True}, {"fixed_split_size": -1}])
def test_splits_that_do_not_depend_on_the_batch_give_the_same_answers(options, device):
    rows, q = rows_of([3000, 0, 40], device), queries(3, device)
    whole = ran(rows, q, planned(rows, wrapper_of(device), **options))
    assert_near(whole, rows.expected(q, 1, Options(SCALE))[0])
    if options != {"fixed_split_size": -1}:
        first = {"indptr": rows.indptr[:2], "last_page_len": rows.last_page_len[:1]}
        assert torch.equal(ran(rows, q[:1], planned(rows, wrapper_of(device), **first, **options))[0], whole[0])


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("o_data_type", ["float32", torch.bfloat16, "float16"])
def test_results_have_the_planned_dtype_without_another_rounding(q_dtype, o_data_type, device):
    kv_dtype = torch.float32 if q_dtype.itemsize == 1 else q_dtype
    rows, q = rows_of(LENS, device, kv_dtype), queries(4, device, q_dtype)
    wrapper = planned(rows, wrapper_of(device), q_data_type=q_dtype, kv_data_type=kv_dtype, o_data_type=o_data_type)
    out, lse = ran(rows, q, wrapper, return_lse=True)
    expected, expected_lse = rows.expected(q.float(), 1, Options(SCALE))
    reference = getattr(torch, o_data_type) if isinstance(o_data_type, str) else o_data_type
    assert out.dtype == reference
    assert_near(out, expected, 1e-5 if reference == torch.float32 else tolerance(reference, reference))
    assert_near(lse, expected_lse, 2e-3)
    arguments = torch.empty_like(out)
    assert ran(rows, q, wrapper, out=arguments) is arguments
    assert torch.equal(arguments, out)
    with pytest.raises(ValueError, match="out"):
        ran(rows, q, wrapper, out=torch.empty_like(out, dtype=torch.float64))


def test_seq_lens_replace_last_page_len_and_block_tables_replace_indices(device):
    rows, q = rows_of(LENS, device), queries(4, device)
    lens, expected = lengths(rows, device), rows.expected(q, 1, Options(SCALE))[0]
    for arguments in (
        {"seq_lens": lens},
        {"seq_lens": lens, "last_page_len": None},
        {"block_tables": rows.table},
        {"block_tables": rows.table, "indices": None},
        {"block_tables": rows.table, "indices": None, "indptr": None, "last_page_len": None, "seq_lens": lens},
    ):
        assert_near(ran(rows, q, planned(rows, wrapper_of(device), **arguments)), expected)


@pytest.mark.parametrize("cap", [5.0, 50.0, 1e3, 1e6])
def test_caps_far_above_the_logits_lose_no_digits(cap, device):
    rows, q = rows_of([40], device), queries(1, device)
    arguments = {"block_tables": rows.table, "seq_lens": lengths(rows, device), "indptr": None, "indices": None}
    wrapper = planned(rows, wrapper_of(device), **arguments, last_page_len=None, logits_soft_cap=cap)
    out = ran(rows, q, wrapper)
    assert_near(out, rows.expected(q, 1, Options(SCALE, soft_cap=cap))[0], 2e-6 if device == "cpu" else 0.1)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
def test_run_accepts_sinks_and_several_queries(q_len, window, device):
    rows, q = rows_of([30, 5, 17], device), queries(3 * q_len, device)
    sinks = torch.linspace(-2, 3, HEADS, device=device)
    wrapper = planned(rows, wrapper_of(device, use_tensor_cores=True))
    out, lse = ran(rows, q, wrapper, sinks=sinks, q_len_per_req=q_len, window_left=window, return_lse=True)
    options = Options(SCALE, sinks=sinks.cpu(), window_left=-1 if window is None else window)
    expected, expected_lse = rows.expected(q, q_len, options)
    assert_near(out, expected)
    assert_near(lse, expected_lse)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"window_right": 1}, "window_right"),
        ({"o_data_type": "float64"}, "o_data_type"),
        ({"seq_lens": torch.tensor([9, 0, 40, 7], dtype=torch.int32)}, "seq_lens"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "seq_lens"),
        ({"seq_lens": torch.zeros(4, dtype=torch.int64)}, "seq_lens"),
        ({"block_tables": torch.zeros(3, 5, dtype=torch.int32)}, "block_tables"),
        ({"indices": None}, "block_tables"),
        ({"last_page_len": None}, "seq_lens"),
        ({"fixed_split_size": 1 << 40}, "fixed_split_size"),
        ({"q_len_per_req": 2, "is_causal": False}, "is_causal"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_by_name_and_the_last_one_stays(options, names):
    rows, q = rows_of(LENS, "cpu"), queries(4, "cpu")
    wrapper = planned(rows, wrapper_of("cpu", use_tensor_cores=True))
    base = ran(rows, q, wrapper)
    with pytest.raises(ValueError, match=names):
        planned(rows, wrapper, **options)
    assert torch.equal(ran(rows, q, wrapper), base)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"kv_cache_sf": torch.ones(1)}, "kv_cache_sf"),
        ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax_threshold_scale_factor"),
        ({"sinks": torch.ones(HEADS + 1)}, "sinks"),
        ({"q_len_per_req": 2}, "q_len_per_req=2 needs use_tensor_cores"),
        ({"q_len_per_req": 0}, "q_len_per_req"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_by_name(options, names):
    rows, q = rows_of(LENS, "cpu"), queries(4, "cpu")
    wrapper = planned(rows, wrapper_of("cpu"))
    with pytest.raises(ValueError, match=names):
        ran(rows, q, wrapper, **options)


def test_a_table_has_no_buffer_of_a_fixed_address(device):
    rows = rows_of(LENS, device)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (5, 16, 4)]
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(4 << 20, dtype=torch.uint8, device=device), *buffers
    )
    with pytest.raises(ValueError, match="block_tables"):
        planned(rows, wrapper, block_tables=rows.table, indices=None)


@pytest.mark.parametrize("options", [{}, {"fixed_split_size": 32}])
def test_workspace_size_is_enough_and_less_is_refused(options, backend):
    rows, q = rows_of([700, 0, 40], backend), queries(3, backend)
    pages = (rows.indptr, rows.indices, rows.last_page_len, HEADS, KV_HEADS, DIM, PAGE)
    floats, integers = wrapper_of(backend).workspace_size(*pages, q_data_type="float32", **options)
    assert integers > 0

    def attended(size):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.zeros(size, dtype=torch.uint8, device=backend))
        return ran(rows, q, planned(rows, wrapper, **options))

    assert_near(attended(max(floats, 1)), rows.expected(q, 1, Options(SCALE))[0])
    if floats:  # fewer splits would do, but for those that are fixed, and for a row each
        with pytest.raises(ValueError, match="float_workspace_buffer"):
            attended(floats - 4 if options else 4 * HEADS * (DIM + 2) * 2)


@pytest.mark.parametrize("wrong", [-1, 99])
@pytest.mark.parametrize("arguments", ["indices", "block_tables", "trtllm"])
def test_page_numbers_outside_the_pool_raise_where_they_are_on_the_host(arguments, wrong):
    rows, q = rows_of(LENS, "cpu"), queries(4, "cpu")
    table, out = rows.table.clone(), torch.zeros(4, HEADS, DIM)
    table[2, 4] = wrong
    if arguments == "trtllm":
        caches = (torch.zeros(1), table, lengths(rows, "cpu"), 40, SCALE)
        with pytest.raises(ValueError, match=r"pages .*0\.\..*block_tables"):
            trtllm_batch_decode_with_kv_cache(q, (rows.k_cache, rows.v_cache), *caches, kv_layout="NHD", out=out)
        assert not out.any()
        return
    numbers = rows.indices.clone()
    numbers[-2] = wrong  # the row before the last one's last
    options = {"indices": numbers} if arguments == "indices" else {"block_tables": table, "indices": None}
    wrapper = planned(rows, wrapper_of("cpu"), **options)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"pages .*0\.\..*{arguments}"):
            ran(rows, q, wrapper, out=out)
    assert not out.any()
    table[2, 4] = rows.table[2, 4]
    table[0, 3:], table[1] = wrong, wrong  # behind their lengths
    assert_near(
        ran(rows, q, planned(rows, wrapper, block_tables=table, indices=None)), rows.expected(q, 1, Options(SCALE))[0]
    )


def test_the_old_names_plan_and_attend(device):
    rows, q = rows_of(LENS, device), queries(4, device)
    wrapper = wrapper_of(device)
    sizes = (HEADS, KV_HEADS, DIM, PAGE)
    wrapper.begin_forward(rows.indptr, rows.indices, rows.last_page_len, *sizes, data_type=torch.float32)
    out, lse = wrapper.forward_return_lse(
        q, (rows.k_cache, rows.v_cache), window_left=5, logits_soft_cap=3.0, k_scale=2.0
    )
    expected, expected_lse = rows.expected(q, 1, Options(2 * SCALE, window_left=5, soft_cap=3.0))
    assert_near(out, expected)
    assert_near(lse, expected_lse)
    assert torch.equal(wrapper.forward(q, (rows.k_cache, rows.v_cache), "NONE", None, 2.0, None, 5, 3.0), out)
    wrapper.end_forward()


def test_a_fast_plan_is_a_function_that_can_be_bound(device):
    rows, q = rows_of(LENS, device), queries(4, device)
    wrapper = wrapper_of(device)
    wrapper.begin_forward = types.MethodType(fast_decode_plan, wrapper)
    arguments = (rows.indptr, rows.indices, rows.last_page_len, HEADS, KV_HEADS, DIM, PAGE)
    wrapper.begin_forward(
        *arguments, data_type=torch.float32, q_data_type=torch.float32, non_blocking=True, fixed_split_size=None,
        disable_split_kv=False, global_override_indptr_cpu=rows.indptr.cpu(),
    )  # fmt: skip
    assert torch.equal(ran(rows, q, wrapper), ran(rows, q, planned(rows, wrapper_of(device))))


def test_sinks_and_lengths_of_a_captured_plan_and_run_may_change(device):
    states = [rows_of(lens, device, seed=number) for number, lens in enumerate([[40, 33, 1], [3, 0, 40], [8, 24, 16]])]
    pages = max(rows.k_cache.shape[0] for rows in states)
    k, v = (torch.zeros(pages, PAGE, KV_HEADS, DIM, device=device) for _ in "kv")
    slots = [
        Slot("q", ("batch", HEADS, DIM), torch.float32, pad=0.0),
        Slot("out", ("batch", HEADS, DIM), torch.float32, pad=0.0),
        Slot("sinks", (HEADS,), torch.float32, pad=0.0),
        Slot("table", ("batch", 5), torch.int32, pad=0),
        Slot("lens", ("batch",), torch.int32, pad=0),
    ]
    buffers, wrapper = StepBuffers(slots, max_batch_size=3, device=device), wrapper_of(device)

    def step(batch):
        wrapper.plan(
            None, None, None, HEADS, KV_HEADS, DIM, PAGE, data_type=torch.float32, block_tables=batch.table,
            seq_lens=batch.lens,
        )  # fmt: skip
        wrapper.run(batch.q, (k, v), out=batch.out, sinks=batch.sinks)

    def load(rows, number):
        (
            buffers.q.copy_(queries(3, device)),
            buffers.sinks.fill_(number - 1.0),
            buffers.lens.copy_(lengths(rows, device)),
        )
        buffers.table[:, : rows.table.shape[1]].copy_(rows.table)
        for cache, part in ((k, rows.k_cache), (v, rows.v_cache)):
            cache[: part.shape[0]].copy_(part)

    load(states[0], 0)
    step(buffers.narrow(3))
    for number, tensor in enumerate(wrapper.workspace):
        buffers.adopt(f"workspace_{number}", tensor)
    graphs = GraphManager(step, buffers, BucketLadder([3], 3), constants=[k, v])
    graphs.capture(progress=False)
    for number, rows in enumerate(states):
        buffers.set_live_rows(3)
        load(rows, number)
        graphs.replay(3)
        options = Options(SCALE, sinks=torch.full((HEADS,), number - 1.0))
        assert_near(buffers.out, rows.expected(buffers.q, 1, options)[0])
    graphs.close()
