"""Decode attention without a plan: FlashInfer's functions over page tables and lengths, against float64."""

import contextlib
import math

import pytest
import torch
from attention_oracle import Options
from paged_rows import PagedRows, tolerance

from graphdecode import BucketLadder, GraphManager, Slot, StepBuffers
from graphdecode.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 8
SCALE = DIM**-0.5
LENS = [9, 0, 40, 8]


def rows_of(lens, device, dtype=torch.float32, layout="HND", seed=0, **shape):
    sizes = {"kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE} | shape
    return PagedRows.random(lens, dtype=dtype, layout=layout, device=device, seed=seed, **sizes)


def queries(rows, device, dtype=torch.float32, seed=1):
    return torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def lengths(rows, device, dtype=torch.int32):
    return torch.tensor(rows.lens, dtype=torch.int32, device=device).view(dtype)


def attended(rows, q, function=trtllm_batch_decode_with_kv_cache, layout="HND", **options):
    """Call the function as its callers do."""
    caches = tuple(each.transpose(1, 2) if layout == "HND" else each for each in (rows.k_cache, rows.v_cache))
    most = rows.table.shape[1] * rows.k_cache.shape[1]
    arguments = {"bmm1_scale": SCALE, "kv_layout": layout, "seq_lens": lengths(rows, q.device)} | options
    return function(q, caches, torch.zeros(1, device=q.device), rows.table, max_seq_len=most, **arguments)


def assert_near(out, expected, close=1e-5):
    torch.testing.assert_close(out.double().cpu(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("function", [trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_attend_to_the_pages_that_their_tables_name(function, layout, dtype, device):
    rows = rows_of(LENS, device, dtype, layout)
    q = queries(4, device, dtype)
    out = attended(rows, q, function, layout)
    assert out.dtype == dtype
    assert_near(out, rows.expected(q, 1, Options(SCALE))[0], tolerance(dtype, dtype))
    assert not out[1].any()


def test_layouts_are_by_default_those_of_the_originals(device):
    rows, q = rows_of(LENS, device), queries(4, device)
    for function, layout in ((trtllm_batch_decode_with_kv_cache, "HND"), (xqa_batch_decode_with_kv_cache, "NHD")):
        caches = [each.transpose(1, 2) if layout == "HND" else each for each in (rows.k_cache, rows.v_cache)]
        joined = torch.stack(caches, dim=1)
        out = function(q, joined, torch.zeros(1, device=device), rows.table, lengths(rows, device), 40, SCALE, 1.0)
        assert_near(out, rows.expected(q, 1, Options(SCALE))[0])


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("window", [-1, 0, 11])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_windows_sinks_scales_and_several_queries_follow_the_formula(q_len, window, as_tensors, device):
    rows = rows_of([30, 5, 17], device)
    q, sinks = queries(3 * q_len, device), torch.linspace(-2, 3, HEADS, device=device)
    scales = [torch.tensor(each, device=device) if as_tensors else each for each in (0.2, 1.7)]
    out, lse = attended(
        rows, q, bmm1_scale=scales[0], bmm2_scale=scales[1], window_left=window, sinks=[sinks], q_len_per_req=q_len,
        return_lse=True,
    )  # fmt: skip
    options = Options(0.2, v_scale=1.7, window_left=window, sinks=sinks.cpu())
    expected, expected_lse = rows.expected(q, q_len, options)
    assert_near(out, expected)
    assert_near(lse, expected_lse)
    if as_tensors:
        log2 = torch.tensor(0.2 * math.log2(math.e), device=device)
        again = attended(
            rows, q, bmm1_scale=torch.tensor(9.0, device=device), bmm1_scale_log2=log2, bmm2_scale=scales[1],
            window_left=window, sinks=sinks, q_len_per_req=q_len,
        )  # fmt: skip
        assert_near(again, expected)


def test_values_may_be_the_keys_and_out_is_written(device):
    rows = rows_of(LENS, device, torch.float16)
    rows.values = rows.keys
    q, out = queries(4, device, torch.float16), torch.empty(4, HEADS, DIM, device=device)
    lse = torch.empty(4, HEADS, device=device)
    joined = rows.k_cache.transpose(1, 2).unsqueeze(1)
    windowed = trtllm_batch_decode_with_kv_cache(
        q, joined, torch.zeros(1, device=device), rows.table, lengths(rows, device, torch.uint32), 40, SCALE, out=out,
        out_dtype="float32", lse=lse,
    )  # fmt: skip
    expected, expected_lse = rows.expected(q, 1, Options(SCALE))
    assert windowed is out
    assert_near(out, expected, 1e-3)
    assert_near(lse, expected_lse, 1e-3)


def test_eight_bit_queries_and_keys_are_used_without_rounding(device):
    rows = rows_of(LENS, device, torch.float8_e4m3fn)
    q = queries(4, device, torch.float8_e4m3fn)
    out = attended(rows, q, out_dtype=torch.bfloat16)
    assert_near(out, rows.expected(q.float(), 1, Options(SCALE))[0], 1e-2)


def test_a_captured_call_is_right_at_later_tables_lengths_and_scales(device):
    states = [rows_of(lens, device, seed=number) for number, lens in enumerate([[40, 33, 1], [3, 0, 40], [8, 24, 16]])]
    pages = max(rows.k_cache.shape[0] for rows in states)
    k, v = (torch.zeros(pages, PAGE, KV_HEADS, DIM, device=device) for _ in "kv")
    slots = [
        Slot("q", ("batch", HEADS, DIM), torch.float32, pad=0.0),
        Slot("out", ("batch", HEADS, DIM), torch.float32, pad=0.0),
        Slot("table", ("batch", 5), torch.int32, pad=0),
        Slot("lens", ("batch",), torch.int32, pad=0),
        Slot("scale", (1,), torch.float32, pad=0.0),
    ]
    buffers = StepBuffers(slots, max_batch_size=3, device=device)
    space = torch.zeros(1, device=device)

    def step(batch):
        trtllm_batch_decode_with_kv_cache(
            batch.q, (k, v), space, batch.table, batch.lens, 40, batch.scale, kv_layout="NHD", out=batch.out
        )

    graphs = GraphManager(step, buffers, BucketLadder([3], 3), constants=[k, v, space])
    with contextlib.closing(graphs):
        graphs.capture(progress=False)
        for number, rows in enumerate(states):
            buffers.set_live_rows(3)
            scale = 0.1 * (1 + number)
            buffers.q.copy_(queries(3, device, seed=number)), buffers.scale.fill_(scale)
            buffers.table[:, : rows.table.shape[1]].copy_(rows.table), buffers.lens.copy_(lengths(rows, device))
            for cache, part in ((k, rows.k_cache), (v, rows.v_cache)):
                cache[: part.shape[0]].copy_(part)
            graphs.replay(3)
            replayed = buffers.out.clone()
            assert_near(replayed, rows.expected(buffers.q, 1, Options(scale))[0])
            graphs.run_eager(3)
            assert torch.equal(buffers.out, replayed)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"mask": torch.ones(1)}, "mask"),
        ({"cum_seq_lens_q": torch.zeros(5)}, "cum_seq_lens_q"),
        ({"skip_softmax_threshold_scale_factor": 2.0}, "skip_softmax_threshold_scale_factor"),
        ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx"),
        ({"enable_block_sparse_attention": True}, "enable_block_sparse_attention"),
        ({"o_scale": 2.0}, "o_scale"),
        ({"cp_world": 2}, "cp_world"),
        ({"causal_seqlens_kv_global": torch.zeros(4)}, "causal_seqlens_kv_global"),
        ({"o_sf_scale": 1.0}, "o_sf_scale"),
        ({"out_dtype": "nvfp4"}, "out_dtype"),
        ({"backend": "mine"}, "backend"),
        ({"kv_layout": "DNH"}, "kv_layout"),
        ({"window_left": -2}, "window_left"),
        ({"q_len_per_req": 3}, "q_len_per_req=3"),
        ({"sinks": torch.zeros(HEADS + 1)}, "sinks"),
        ({"bmm1_scale": torch.ones(2)}, "bmm1_scale"),
        ({"bmm2_scale": math.nan}, "bmm2_scale"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "seq_lens"),
        ({"out": torch.empty(4, HEADS, DIM + 1)}, "out"),
        ({"lse": torch.empty(4, HEADS, dtype=torch.float64)}, "lse"),
    ],
)
def test_invalid_and_unsupported_arguments_raise_by_name(wrong, names):
    rows, q = rows_of(LENS, "cpu"), queries(4, "cpu")
    with pytest.raises(ValueError, match=names):
        attended(rows, q, **wrong)


def test_the_longest_row_may_be_longer_than_tables_but_no_row_is_on_the_host():
    rows, q = rows_of(LENS, "cpu"), queries(4, "cpu")
    caches = (rows.k_cache.transpose(1, 2), rows.v_cache.transpose(1, 2))
    arguments, out = (torch.zeros(1), rows.table[:, :2].contiguous()), torch.zeros_like(q)
    cut = torch.tensor([min(length, 2 * PAGE) for length in LENS], dtype=torch.int32)
    result = trtllm_batch_decode_with_kv_cache(q, caches, *arguments, cut, 4096, SCALE)
    assert torch.equal(result, trtllm_batch_decode_with_kv_cache(q, caches, *arguments, cut, 16, SCALE))
    for wrong in (lengths(rows, "cpu"), -cut):
        with pytest.raises(ValueError, match=f"seq_lens .*0..{2 * PAGE}"):
            trtllm_batch_decode_with_kv_cache(q, caches, *arguments, wrong, 4096, SCALE, out=out)
    assert not out.any()


@pytest.mark.parametrize("scale", [1.0, torch.tensor(9.0)])
def test_a_scale_of_powers_of_two_takes_precedence_over_numbers_and_tensors(scale):
    rows, q = rows_of(LENS, "cpu"), queries(4, "cpu")
    log2 = torch.tensor([0.2 * math.log2(math.e)])
    assert_near(attended(rows, q, bmm1_scale=scale, bmm1_scale_log2=log2), rows.expected(q, 1, Options(0.2))[0])


def test_hints_change_nothing():
    rows, q = rows_of(LENS, "cpu"), queries(4, "cpu")
    hints = {"enable_pdl": True, "backend": "trtllm-gen", "bf16q_fp8kv_transform_mode": "k_only", "o_scale": None}
    assert torch.equal(attended(rows, q, **hints, skip_softmax_threshold_scale_factor=0.0), attended(rows, q))
