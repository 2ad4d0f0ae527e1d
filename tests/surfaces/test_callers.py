"""Engines that call FlashInfer, as they call it: their arguments and their order, over this surface."""

import types

import pytest
import torch
from attention_oracle import Options, attend
from paged_rows import PagedRows, tolerance

import graphdecode as flashinfer

HEADS, KV_HEADS, DIM = 8, 2, 64
SCALE = DIM**-0.5
LENS = [9, 1, 40]


def rows_of(lens, device, page_size, dtype=torch.bfloat16, layout="NHD"):
    sizes = {"kv_heads": KV_HEADS, "head_dim": DIM, "page_size": page_size}
    return PagedRows.random(lens, dtype=dtype, layout=layout, device=device, **sizes)


def queries(rows, device, dtype=torch.bfloat16):
    return torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)


def workspace(device):
    return torch.zeros(8 << 20, dtype=torch.uint8, device=device)


def assert_near(out, expected, dtype=torch.bfloat16):
    close = tolerance(dtype, dtype)
    torch.testing.assert_close(out.double().cpu(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("captured", [False, True])
def test_as_mini_sglang_plans_and_runs(captured, device):
    rows, q = rows_of(LENS, device, 1), queries(3, device)
    if captured:
        buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (5, 64, 4)]
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            workspace(device), kv_layout="NHD", use_tensor_cores=True, indptr_buffer=buffers[0],
            indices_buffer=buffers[1], last_page_len_buffer=buffers[2],
        )  # fmt: skip
    else:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(device), use_tensor_cores=True, kv_layout="NHD", backend="fa2"
        )
    seq_lens = torch.tensor(LENS, dtype=torch.int32)
    wrapper.plan(
        indptr=rows.indptr.cpu(), indices=rows.indices, last_page_len=rows.last_page_len.cpu(), num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=DIM, page_size=1, pos_encoding_mode="NONE", seq_lens=seq_lens,
        data_type=torch.bfloat16, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, non_blocking=True,
    )  # fmt: skip
    out = wrapper.run(q=q, paged_kv_cache=(rows.k_cache, rows.v_cache))
    assert_near(out, rows.expected(q, 1, Options(SCALE))[0])


def test_as_sglang_begins_and_forwards(device):
    rows, q = rows_of(LENS, device, 1), queries(3, device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", use_tensor_cores=False)
    pages = (rows.indptr, rows.indices, rows.last_page_len, HEADS, KV_HEADS, DIM, 1)
    types_of = {"data_type": torch.bfloat16, "q_data_type": torch.bfloat16}
    wrapper.begin_forward(*pages, **types_of, non_blocking=True, fixed_split_size=None, disable_split_kv=False)
    expected = rows.expected(q, 1, Options(SCALE * 0.5, soft_cap=20.0, v_scale=2.0))[0]
    arguments = {"sm_scale": SCALE, "logits_soft_cap": 20.0, "k_scale": 0.5, "v_scale": 2.0}
    assert_near(wrapper.forward(q, (rows.k_cache, rows.v_cache), **arguments), expected)
    wrapper.begin_forward = types.MethodType(flashinfer.fast_decode_plan, wrapper)
    wrapper.begin_forward(*pages, **types_of, non_blocking=True, global_override_indptr_cpu=rows.indptr.cpu())
    assert_near(wrapper.forward(q, (rows.k_cache, rows.v_cache), **arguments), expected)


def test_as_vllm_plans_and_runs(device):
    rows, q = rows_of(LENS, device, 16, layout="joined"), queries(3, device)
    cache, out = torch.stack([rows.k_cache, rows.v_cache], dim=1), torch.empty_like(q)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), "NHD", use_cuda_graph=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None, use_tensor_cores=True,
    )  # fmt: skip
    wrapper.plan(
        rows.indptr.cpu(), rows.indices, rows.last_page_len.cpu(), HEADS, KV_HEADS, DIM, 16, pos_encoding_mode="NONE",
        sm_scale=SCALE, window_left=7, logits_soft_cap=0.0, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        o_data_type=torch.bfloat16, fixed_split_size=-1, disable_split_kv=False,
    )  # fmt: skip
    # before each run it compares these attributes with its layer's
    assert [getattr(wrapper, name) for name in ("_window_left", "_logits_soft_cap", "_sm_scale")] == [7, 0.0, SCALE]
    wrapper.run(q, cache, k_scale=1.0, v_scale=1.0, out=out)
    assert_near(out, rows.expected(q, 1, Options(SCALE, window_left=7))[0])


def test_as_vllm_decodes_by_block_tables(device):
    rows, q = rows_of(LENS, device, 16), queries(3, device)
    cache = torch.stack([rows.k_cache.transpose(1, 2), rows.v_cache.transpose(1, 2)], dim=1)
    sinks, out = torch.linspace(-1, 1, HEADS, device=device), torch.empty_like(q)
    lens = torch.tensor(LENS, dtype=torch.int32, device=device)
    flashinfer.decode.trtllm_batch_decode_with_kv_cache(
        query=q, kv_cache=cache, workspace_buffer=workspace(device), block_tables=rows.table, seq_lens=lens,
        max_seq_len=max(LENS), bmm1_scale=SCALE, bmm2_scale=1.0, window_left=-1, sinks=sinks, o_sf_scale=None, out=out,
        q_len_per_req=1,
    )  # fmt: skip
    assert_near(out, rows.expected(q, 1, Options(SCALE, sinks=sinks.cpu()))[0])


def test_as_vllm_cascades(device):
    rows, q = rows_of([32, 9, 1], device, 16), queries(3, device)  # a prefix of two pages, and two rows of their own
    starts = [torch.tensor(each, dtype=torch.int32) for each in ([0, 3], [0, 2, 3], [0, 2], [0, 1, 2])]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device), "NHD")
    wrapper.plan(
        qo_indptr_arr=starts[:2], paged_kv_indptr_arr=starts[2:],
        paged_kv_indices_arr=[rows.indices[:2].cpu(), rows.indices[2:]],
        paged_kv_last_page_len=[rows.last_page_len[:1].cpu(), rows.last_page_len[1:].cpu()], num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=DIM, page_size=16, causal=True, sm_scale=SCALE, window_left=-1,
        logits_soft_cap=0.0, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    out = wrapper.run(q, torch.stack([rows.k_cache, rows.v_cache], dim=1))
    for row, part in ((0, slice(2)), (1, slice(2, 3))):
        keys, values = (torch.cat([each[0], each[row + 1]]) for each in (rows.keys, rows.values))
        assert_near(out[part], attend(q[part], keys, values, Options(SCALE))[0])


def test_as_vllm_samples(device):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)).to(device)
    k, p = torch.tensor([1, 5, 50], device=device), torch.tensor([1.0, 1e-3, 0.9], device=device)
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    likely = logits.argmax(-1).tolist()
    tokens = flashinfer.sampling.top_k_top_p_sampling_from_logits(logits, k, p, deterministic=True).view(-1)
    assert tokens[:2].tolist() == likely[:2]
    tokens = flashinfer.sampling.top_k_sampling_from_probs(probs, k, deterministic=True)
    assert tokens[0] == likely[0]
    tokens = flashinfer.sampling.top_p_sampling_from_probs(probs, p, deterministic=True)
    assert tokens[1] == likely[1]
    assert tokens.dtype == torch.int32
