"""The decode wrappers: FlashInfer's surface, and what ours does beyond it."""

import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from attention_oracle import Options
from paged_rows import PagedRows, tolerance

from graphdecode import (
    BatchDecodeWithPagedKVCacheWrapper,
    BucketConfig,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    GraphManager,
    InferenceParams,
    Slot,
    SlotKVCacheManager,
    StepBuffers,
    append_paged_kv_cache,
    merge_states,
    single_decode_with_kv_cache,
)

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 8


def workspace(device):
    return torch.empty(4 * 1024 * 1024, dtype=torch.uint8, device=device)


def queries(rows, dtype=torch.float32, device="cpu", seed=0, heads=HEADS, dim=DIM):
    return torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_near(out, expected):
    """fp32 against float64."""
    torch.testing.assert_close(out.double().cpu(), expected, atol=1e-5, rtol=1e-4)


def random_rows(lens, device, dtype=torch.float32, seed=0, page_size=PAGE, **shape):
    shape = {"kv_heads": KV_HEADS, "head_dim": DIM, **shape}
    return PagedRows.random(lens, page_size=page_size, dtype=dtype, device=device, seed=seed, **shape)


def planned(rows, device, wrapper=None, dtype=torch.float32, **options):
    wrapper = wrapper or BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(rows.indptr, rows.indices, rows.last_page_len, HEADS, KV_HEADS, DIM, PAGE, data_type=dtype, **options)
    return wrapper


def graph_buffers(max_rows, max_pages, device):
    return [torch.zeros(size, dtype=torch.int32, device=device) for size in (max_rows + 1, max_pages, max_rows)]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_run_accepts_two_layouts_as_a_tuple_or_one_tensor(kv_layout, joined, dtype, device):
    rows = random_rows([9, 0, 40, 8], device, dtype)
    q = queries(4, dtype, device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    planned(rows, device, wrapper, dtype)
    caches = [rows.k_cache, rows.v_cache]
    if kv_layout == "HND":
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
    out, lse = wrapper.run(q, torch.stack(caches, dim=1) if joined else tuple(caches), return_lse=True)
    expected, expected_lse = rows.expected(q, 1, Options(DIM**-0.5))
    close = tolerance(dtype, dtype)
    torch.testing.assert_close(out.double().cpu(), expected, atol=close, rtol=close)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=close, rtol=close)


@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA", "ALIBI"])
@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_options_of_plan_and_run_follow_the_formula(mode, q_len, kv_dtype, device):
    rows = random_rows([30, 4, 0, 17], device, kv_dtype)
    q = queries(4 * q_len, torch.float32, device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=q_len > 1)
    wrapper.plan(
        rows.indptr, rows.indices, rows.last_page_len, HEADS, KV_HEADS, DIM, PAGE,
        pos_encoding_mode=mode, window_left=12, logits_soft_cap=4.0, q_data_type=torch.float32, kv_data_type=kv_dtype,
        sm_scale=0.3, rope_scale=2.0, rope_theta=5e3, q_len_per_req=q_len,
    )  # fmt: skip
    out, lse = wrapper.run_return_lse(q, (rows.k_cache, rows.v_cache), q_scale=0.5, k_scale=2.0, v_scale=3.0)
    expected, expected_lse = rows.expected(q, q_len, Options(0.3, 3.0, 12, 4.0, mode, 2.0, 5e3))
    torch.testing.assert_close(out.double().cpu(), expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=1e-3, rtol=1e-3)


def test_window_can_be_overridden_for_one_layer(device):
    rows = random_rows([30, 5], device)
    q = queries(2, device=device)
    out = planned(rows, device, window_left=3).run(q, (rows.k_cache, rows.v_cache), window_left=20)
    assert_near(out, rows.expected(q, 1, Options(DIM**-0.5, window_left=20))[0])


def test_run_writes_out_and_lse(device):
    rows = random_rows([30, 5], device)
    q = queries(2, device=device)
    out, lse = torch.empty_like(q), torch.empty(2, HEADS, device=device)
    result = planned(rows, device).run(q, (rows.k_cache, rows.v_cache), out=out, lse=lse, return_lse=True)
    assert result[0] is out
    assert result[1] is lse
    assert_near(out, rows.expected(q, 1, Options(DIM**-0.5))[0])


def test_a_window_reads_only_the_pages_inside_it(device):
    rows = random_rows([61], device)
    rows.indices[: (61 - 9) // PAGE] = 2**30  # a page that is nowhere
    q = queries(1, device=device)
    out = planned(rows, device, window_left=8).run(q, (rows.k_cache, rows.v_cache))
    assert_near(out, rows.expected(q, 1, Options(DIM**-0.5, window_left=8))[0])


@pytest.mark.parametrize("named", [False, True])
def test_graph_mode_takes_any_batch_up_to_the_buffers_capacity(named, device):
    buffers = graph_buffers(4, 40, device)
    if named:
        wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    else:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", True, False, *buffers)
    q = queries(4, device=device)
    for lens in ([12], [5, 0, 70, 9], [8, 8]):
        rows = random_rows(lens, device, seed=len(lens))
        planned(rows, device, wrapper)
        out, lse = wrapper.run(q, (rows.k_cache, rows.v_cache), return_lse=True)
        expected, expected_lse = rows.expected(q[: len(lens)], 1, Options(DIM**-0.5))
        assert_near(out[: len(lens)], expected)
        assert_near(lse[: len(lens)], expected_lse)
        assert (out[len(lens) :] == 0).all()
        assert (lse[len(lens) :] == -math.inf).all()


def test_one_captured_plan_and_run_is_right_at_any_later_lengths(device):
    """Law 2: the step is a function of device memory. Captured with rows of length 1."""
    lens = [[1, 1, 1], [90, 0, 7], [3, 200, 64], [0, 0, 33]]
    states = [random_rows(case, device, seed=i) for i, case in enumerate(lens)]
    most = max(rows.indices.shape[0] for rows in states)
    pool = max(rows.k_cache.shape[0] for rows in states)
    k_cache, v_cache = torch.zeros(2, pool, PAGE, KV_HEADS, DIM, device=device)
    indices = torch.zeros(most, dtype=torch.int32, device=device)
    buffers = StepBuffers(
        [
            Slot("q", ("batch", HEADS, DIM), torch.float32),
            Slot("out", ("batch", HEADS, DIM), torch.float32),
            Slot("indptr", ("batch+1",), torch.int32),
            Slot("last", ("batch",), torch.int32),
        ],
        max_batch_size=3,
        device=device,
    )
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device))

    def step(batch):
        wrapper.plan(batch.indptr, indices, batch.last, HEADS, KV_HEADS, DIM, PAGE, data_type=torch.float32)
        wrapper.run(batch.q, (k_cache, v_cache), out=batch.out)

    def load(rows):
        buffers.indptr.copy_(rows.indptr)
        buffers.last.copy_(rows.last_page_len)
        indices[: rows.indices.shape[0]].copy_(rows.indices)
        k_cache[: rows.k_cache.shape[0]].copy_(rows.k_cache)
        v_cache[: rows.v_cache.shape[0]].copy_(rows.v_cache)
        buffers.q.copy_(queries(3, seed=7))

    load(states[0])
    step(buffers.narrow(3))
    for number, tensor in enumerate(wrapper.workspace):
        buffers.adopt(f"attention_workspace_{number}", tensor)
    config = BucketConfig(max_batch_size=3, batch_sizes=[3])
    graphs = GraphManager(step, buffers, config.ladder, constants=[indices, k_cache, v_cache])
    graphs.capture(progress=False)
    for rows in states[1:]:
        buffers.set_live_rows(3)
        load(rows)
        graphs.replay(3)
        replayed = buffers.out.clone()
        expected, _ = rows.expected(buffers.q, 1, Options(DIM**-0.5))
        assert_near(replayed, expected)
        graphs.run_eager(3)
        assert torch.equal(buffers.out, replayed)
    graphs.close()


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("kv_dtype", [torch.float32, *FP8])
@pytest.mark.parametrize("dtype", FP8)
def test_fp8_queries_lose_no_bits(dtype, kv_dtype, native_device):
    device = native_device  # interpreted, it would compute in another dtype where `out` is not given
    rows = random_rows([30, 0, 17], device, kv_dtype)
    q = queries(3, dtype, device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(
        rows.indptr, rows.indices, rows.last_page_len, HEADS, KV_HEADS, DIM, PAGE, q_data_type=dtype,
        kv_data_type=kv_dtype,
    )  # fmt: skip
    out = torch.empty(3, HEADS, DIM, dtype=torch.float16, device=device)
    result, lse = wrapper.run(q, (rows.k_cache, rows.v_cache), 0.5, None, 2.0, True, out=out)
    assert result is out
    expected, expected_lse = rows.expected(q.float(), 1, Options(0.5 * DIM**-0.5, 2.0))
    torch.testing.assert_close(out.double().cpu(), expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=1e-3, rtol=1e-3)
    part = wrapper.run(q, (rows.k_cache, rows.v_cache), 0.5, None, 2.0)
    assert part.dtype == dtype
    assert torch.equal(part.float(), out.to(dtype).float())


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_queries_of_one_request_too(dtype, device):
    rows = random_rows([25], device, page_size=25)
    q = queries(1, dtype, device)
    page = rows.indices[0].item()
    out, lse = single_decode_with_kv_cache(q[0], rows.k_cache[page], rows.v_cache[page], return_lse=True)
    expected, expected_lse = rows.expected(q.float(), 1, Options(DIM**-0.5))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double().cpu(), expected[0], atol=2**-9, rtol=0.125 if dtype == FP8[0] else 0.25)
    torch.testing.assert_close(lse.double().cpu(), expected_lse[0], atol=1e-3, rtol=1e-3)


HALF, BRAIN, FULL, BYTE = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("arguments", "q_dtype", "kv_dtype"),
    [
        ({}, HALF, HALF),
        ({"data_type": "bfloat16"}, BRAIN, BRAIN),
        ({"data_type": BRAIN, "q_data_type": None}, BRAIN, BRAIN),
        ({"data_type": BRAIN, "q_data_type": "float16"}, HALF, BRAIN),  # equal to the default, and given
        ({"data_type": BRAIN, "q_data_type": HALF, "kv_data_type": None}, HALF, BRAIN),
        ({"data_type": BRAIN, "kv_data_type": "float32"}, BRAIN, FULL),
        ({"data_type": BRAIN, "q_data_type": FULL, "kv_data_type": BYTE}, FULL, BYTE),
        ({"data_type": BYTE}, HALF, BYTE),
        ({"data_type": BYTE, "q_data_type": BRAIN}, BRAIN, BYTE),
        ({"data_type": BYTE, "q_data_type": BYTE}, BYTE, BYTE),
        ({"data_type": "float8_e5m2", "q_data_type": None}, torch.float8_e5m2, torch.float8_e5m2),
        ({"q_data_type": BRAIN}, BRAIN, BRAIN),
        ({"kv_data_type": BYTE}, HALF, BYTE),
    ],
)
def test_data_type_is_the_default_of_the_others(arguments, q_dtype, kv_dtype, device):
    rows = random_rows([9, 3], device, kv_dtype)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(rows.indptr, rows.indices, rows.last_page_len, HEADS, KV_HEADS, DIM, PAGE, **arguments)
    q = queries(2, q_dtype, device)
    assert wrapper.run(q, (rows.k_cache, rows.v_cache)).dtype == q_dtype


def test_an_unknown_data_type_raises_beside_the_others(device):
    rows = random_rows([9], device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(ValueError, match="data_type"):
        wrapper.plan(
            rows.indptr, rows.indices, rows.last_page_len, HEADS, KV_HEADS, DIM, PAGE, q_data_type=HALF,
            kv_data_type=HALF, data_type="int8",
        )  # fmt: skip


@pytest.mark.parametrize("name", ["rope_scale", "rope_theta"])
def test_a_rope_scale_or_theta_of_zero_is_refused_for_one_request_too(name, device):
    q, kv = queries(1, device=device)[0], torch.randn(4, KV_HEADS, DIM, device=device)
    with pytest.raises(ValueError, match=name):
        single_decode_with_kv_cache(q, kv, kv, pos_encoding_mode="ROPE_LLAMA", **{name: 0})


def test_metadata_in_host_memory_may_be_rewritten_after_plan():
    rows = random_rows([30, 5, 17], "cpu")
    q = queries(3)
    wrapper = planned(rows, "cpu")
    before = wrapper.run(q, (rows.k_cache, rows.v_cache))
    for metadata in (rows.indptr, rows.indices, rows.last_page_len):
        metadata.fill_(1)
    assert torch.equal(wrapper.run(q, (rows.k_cache, rows.v_cache)), before)


def test_q_len_per_req_needs_tensor_cores_and_the_planned_queries(device):
    rows = random_rows([9, 8], device)
    with pytest.raises(ValueError, match="use_tensor_cores=True"):
        planned(rows, device, q_len_per_req=3)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=True)
    planned(rows, device, wrapper, q_len_per_req=3)
    assert wrapper.run(queries(6, device=device), (rows.k_cache, rows.v_cache)).shape == (6, HEADS, DIM)
    for count in (2, 3, 5, 7, 9, 12):
        with pytest.raises(ValueError, match=f"q_len_per_req=3.*2.*{count}"):
            wrapper.run(queries(count, device=device), (rows.k_cache, rows.v_cache))


def test_published_backends_are_accepted_and_others_refused(device):
    for backend in ("auto", "fa2", "fa3", "trtllm-gen"):
        BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend, jit_args=None)
    with pytest.raises(ValueError, match="backend .*'fa9'"):
        BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend="fa9")
    with pytest.raises(ValueError, match="jit_args"):
        BatchDecodeWithPagedKVCacheWrapper(workspace(device), jit_args=["sigmoid"])


def test_batch_invariant_rows_keep_their_bits_in_any_company(device):
    rows = random_rows([1500, 30, 0, 1025], device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device), batch_invariant=True)
    q = queries(4, device=device)
    together = planned(rows, device, wrapper).run(q, (rows.k_cache, rows.v_cache))
    begin, end = rows.indptr[3].item(), rows.indptr[4].item()
    wrapper.plan(
        rows.indptr[3:] - begin, rows.indices[begin:end], rows.last_page_len[3:], HEADS, KV_HEADS, DIM, PAGE,
        data_type=torch.float32,
    )  # fmt: skip
    assert torch.equal(wrapper.run(q[3:], (rows.k_cache, rows.v_cache))[0], together[3])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA", "ALIBI"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_single_decode_agrees_with_float64(kv_layout, mode, dtype, device):
    rows = random_rows([77], device, dtype, page_size=77)
    q = queries(1, torch.float16, device)
    page = rows.indices[0].item()
    k, v = rows.k_cache[page], rows.v_cache[page]
    if kv_layout == "HND":
        k, v = k.transpose(0, 1).clone(), v.transpose(0, 1).clone()
    options = {"pos_encoding_mode": mode, "window_left": 50, "logits_soft_cap": 6.0, "rope_scale": 2.0}
    out, lse = single_decode_with_kv_cache(
        q[0], k, v, kv_layout, q_scale=0.7, k_scale=0.9, v_scale=0.5, return_lse=True, **options
    )
    expected, expected_lse = rows.expected(q, 1, Options(DIM**-0.5 * 0.63, 0.5, 50, 6.0, mode, 2.0))
    torch.testing.assert_close(out.double().cpu(), expected[0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse.double().cpu(), expected_lse[0], atol=1e-3, rtol=1e-3)
    alone = single_decode_with_kv_cache(q[0], k, v, kv_layout, q_scale=0.7, k_scale=0.9, v_scale=0.5, **options)
    torch.testing.assert_close(alone, out)  # on a CPU compiled kernels do it where no lse is asked for


def test_run_before_plan_is_a_runtime_error(device):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    rows = random_rows([3], device)
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(queries(1, device=device), (rows.k_cache, rows.v_cache))
    planned(rows, device, wrapper)
    wrapper.reset_workspace_buffer(workspace(device), torch.empty(8, dtype=torch.uint8, device=device))
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(queries(1, device=device), (rows.k_cache, rows.v_cache))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"num_qo_heads": 7}, "num_qo_heads=7.*num_kv_heads=2"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 8}, "head_dim.*16..512"),
        ({"head_dim": 520}, "head_dim.*16..512"),
        ({"page_size": 0}, "page_size"),
        ({"pos_encoding_mode": "ROPE"}, "pos_encoding_mode.*ROPE_LLAMA"),
        ({"head_dim": 65, "pos_encoding_mode": "ROPE_LLAMA"}, "even head_dim"),
        ({"window_left": -2}, "window_left"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
        ({"rope_scale": 0.0}, "rope_scale"),
        ({"q_data_type": "int8"}, "q_data_type.*float16"),
        ({"q_data_type": torch.float64}, "q_data_type.*float8_e5m2"),
        ({"kv_data_type": "float64"}, "kv_data_type.*float8_e4m3fn"),
        ({"q_len_per_req": 0}, "q_len_per_req"),
        ({"q_len_per_req": 2}, "q_len_per_req=2 needs use_tensor_cores=True"),
        ({"indptr": torch.tensor([0, 2, 3])}, "indptr must be int32"),
        ({"indptr": torch.tensor([0, 2], dtype=torch.int32)}, "indptr"),
        ({"indptr": torch.tensor([0, 2, 9], dtype=torch.int32)}, "at most the 3 pages"),
        ({"indptr": torch.tensor([0, 3, 2], dtype=torch.int32)}, "indptr must rise"),
        ({"last_page_len": torch.tensor([9, 1], dtype=torch.int32)}, "last_page_len.*page_size=8"),
        ({"last_page_len": torch.tensor([0, 1], dtype=torch.int32)}, "last_page_len"),
    ],
)
def test_plan_refuses_invalid_arguments_and_keeps_the_plan(change, names):
    rows = random_rows([9, 8], "cpu")
    wrapper = planned(rows, "cpu")
    q = queries(2)
    before = wrapper.run(q, (rows.k_cache, rows.v_cache))
    valid = {
        "indptr": rows.indptr,
        "indices": rows.indices,
        "last_page_len": rows.last_page_len,
        "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "page_size": PAGE,
    }
    with pytest.raises(ValueError, match=names):
        wrapper.plan(**{**valid, **change})
    assert torch.equal(wrapper.run(q, (rows.k_cache, rows.v_cache)), before)


def test_run_refuses_tensors_that_were_not_planned(device):
    rows = random_rows([9, 8], device)
    wrapper = planned(rows, device)
    q, caches = queries(2, device=device), (rows.k_cache, rows.v_cache)
    with pytest.raises(ValueError, match="rows"):
        wrapper.run(q[:1], caches)
    with pytest.raises(ValueError, match="float16"):
        wrapper.run(q.half(), caches)
    with pytest.raises(ValueError, match=r"q .*8, 64\]"):
        wrapper.run(q[:, :, :32], caches)
    with pytest.raises(ValueError, match="page_size"):
        wrapper.run(q, (rows.k_cache[:, :4], rows.v_cache[:, :4]))
    with pytest.raises(ValueError, match="paged_kv_cache .*5"):
        wrapper.run(q, rows.k_cache)
    with pytest.raises(ValueError, match="dtype"):
        wrapper.run(q, (rows.k_cache, rows.v_cache.half()))
    with pytest.raises(ValueError, match="out "):
        wrapper.run(q, caches, out=torch.empty(2, HEADS, DIM, dtype=torch.float16, device=device))


def test_constructor_refuses_missing_and_misfit_buffers(device):
    space = workspace(device)
    with pytest.raises(ValueError, match="kv_layout"):
        BatchDecodeWithPagedKVCacheWrapper(space, "DHN")
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer"):
        BatchDecodeWithPagedKVCacheWrapper(space, use_cuda_graph=True)
    indptr, indices, last = graph_buffers(4, 40, device)
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer"):
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper(space, indptr[:4], indices, last)
    with pytest.raises(ValueError, match="indices_buffer .*int32"):
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper(space, indptr, indices.long(), last)
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(space, indptr, indices, last)
    with pytest.raises(ValueError, match="4 .*5"):
        planned(random_rows([1] * 5, device), device, wrapper)
    with pytest.raises(ValueError, match="paged_kv_indices_buffer.*40"):
        planned(random_rows([41 * PAGE], device), device, wrapper)


HOSTILE: list[Any] = ["a", 1.5, [0], {"a": 1}, object()]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_pages_of_one_token_are_read_by_head_whatever_their_stride_of_a_token() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 3, 2, 1, 16)  # HND: as an NHD view the stride of a token is that of a head
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 16), "HND")
    wrapper.plan(int32(0, 3), int32(0, 1, 2), int32(1), 2, 2, 16, 1, q_data_type=torch.float32)
    q = torch.randn(1, 2, 16)
    weights = (keys[:, :, 0] * q).sum(-1).div(4).softmax(0)  # [tokens, heads]
    torch.testing.assert_close(wrapper.run(q, (keys, values))[0], (weights[..., None] * values[:, :, 0]).sum(0))


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("name", ["seq_ids", "position_ids", "new_key_values", "active_mask", "kvcache_buffer"])
def test_the_slot_cache_refuses_other_types(name: str, value: Any) -> None:
    cache = SlotKVCacheManager(1, 2, 1, 4, 2, torch.float32, device="cpu")
    valid: dict[str, Any] = {
        "is_for_context_encoding": False, "seq_ids": int32(0), "position_ids": int32(1)[None], "seq_len": 4,
        "new_key_values": [[torch.ones(1, 1, 1, 2)] * 2],
    }  # fmt: skip
    with pytest.raises(ValueError, match=name):
        cache.update_cache(**valid | {name: value})
    assert not any(tensor.any() for tensor in cache.past_key_values)


def test_the_slot_cache_refuses_indices_on_another_device() -> None:
    cache = SlotKVCacheManager(1, 2, 1, 4, 2, torch.float32, device="cpu")
    new = [[torch.ones(1, 1, 1, 2)] * 2]
    with pytest.raises(ValueError, match="seq_ids"):
        cache.update_cache(False, int32(0).to("meta"), int32(1)[None], new, 4)


@pytest.mark.parametrize("value", HOSTILE)
def test_transformer_engines_cache_refuses_other_types(value: Any) -> None:
    params = InferenceParams(2, 8, 1, 2, torch.float32, is_paged=True, total_num_pages=4, page_size=2, device="cpu")
    params.allocate_memory(1)
    params.pre_step(OrderedDict(a=1))
    keys = torch.ones(1, 1, 1, 2)
    for name in ("layer_number", "new_k", "new_v", "qkv_format"):
        arguments = {"layer_number": 1, "new_k": keys, "new_v": keys, "qkv_format": "bshd", name: value}
        with pytest.raises(ValueError, match="layer" if name == "layer_number" else name):
            params.step(**arguments)
    with pytest.raises(ValueError, match="step_dict"):
        params.pre_step(value if not isinstance(value, dict) else {"a": value})
    with pytest.raises(ValueError, match="layer"):
        params.convert_paged_to_nonpaged(value)
    assert params.sequences == {"a": 1}


@pytest.mark.parametrize("value", HOSTILE)
def test_flashinfers_surface_refuses_other_types(value: Any) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 16))
    plan: dict[str, Any] = {
        "indptr": int32(0, 1), "indices": int32(0), "last_page_len": int32(1), "num_qo_heads": 1, "num_kv_heads": 1,
        "head_dim": 16, "page_size": 1, "q_data_type": torch.float32,
    }  # fmt: skip
    for name in (*plan, "window_left", "logits_soft_cap", "sm_scale", "rope_scale", "q_len_per_req"):
        if not (value == 1.5 and name in ("logits_soft_cap", "sm_scale", "rope_scale")):
            with pytest.raises(ValueError, match=name):
                wrapper.plan(**plan | {name: value})
    wrapper.plan(**plan)
    q, cache = torch.ones(1, 1, 16), torch.ones(1, 1, 1, 16)
    run: dict[str, Any] = {"q": q, "paged_kv_cache": (cache, cache)}
    for name in ("q", "paged_kv_cache", "out", "lse"):
        with pytest.raises(ValueError, match=name):
            wrapper.run(**run | {name: value})
    with pytest.raises(ValueError, match="k "):
        single_decode_with_kv_cache(q[0], value, cache[0])
    with pytest.raises(ValueError, match="v "):
        merge_states(value, torch.ones(1, 1, 1))
    with pytest.raises(ValueError, match="append_key"):
        append_paged_kv_cache(value, q, int32(0), int32(0), (cache, cache), int32(0), int32(0, 1), int32(1))


def test_pages_outside_the_pool_are_neither_written_nor_read() -> None:
    q, cache = torch.ones(1, 1, 16), torch.zeros(2, 1, 1, 16)
    for pages in (int32(-1), int32(2), int32()):
        append_paged_kv_cache(q, q, int32(0), int32(0), (cache, cache), pages, int32(0, 1), int32(1))
        assert not cache.any()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 16))
    for pages in (int32(-1, 0), int32(7, 0), int32(0, 2)):
        wrapper.plan(int32(0, 2), pages, int32(1), 1, 1, 16, 1, q_data_type=torch.float32)
        with pytest.raises(ValueError, match=r"pages .*0\.\.1"):
            wrapper.run(q, (cache, cache))
