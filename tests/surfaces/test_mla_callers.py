"""Engines that call FlashInfer's latent attention, as they call it: their arguments and their order."""

import functools

import pytest
import torch
from attention_oracle import Options, attend

import graphdecode as flashinfer
from graphdecode.decode import trtllm_batch_decode_with_kv_cache_mla

HEADS, CKV, KPE, SCALE = 8, 64, 32, 0.1
LENS = [9, 1, 40]


def keys_of(lens, slots, device, seed=0):
    """A buffer of latent keys, its slots in random order, and the keys of each row."""
    draw = torch.Generator().manual_seed(seed)
    buffer = torch.randn(slots, CKV + KPE, generator=draw).bfloat16()
    order = torch.randperm(slots, generator=draw).split([*lens, slots - sum(lens)])[:-1]
    return buffer.to(device), [part.to(torch.int32) for part in order]


def expected(q, buffer, order, counts):
    parts = []
    for queries, part in zip(q.double().cpu().split(counts), order, strict=True):
        keys = buffer.cpu().double()[part.long()].unsqueeze(1)
        parts.append(attend(queries, keys, keys[..., :CKV], Options(SCALE))[0])
    return torch.cat(parts)


def queries(tokens, device, seed=1):
    q = torch.randn(tokens, HEADS, CKV + KPE, generator=torch.Generator().manual_seed(seed))
    return q.bfloat16().to(device)


def assert_near(out, right):
    torch.testing.assert_close(out.double().cpu().view(right.shape), right, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 1, 7]])
def test_as_sglang_plans_and_runs_prompts_and_steps(counts, device):
    workspace = torch.empty(8 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    buffer, order = keys_of(LENS, 64, device)
    q_indptr = torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
    kv_indptr = torch.tensor([0, *LENS], device=device).cumsum(0).to(torch.int32)
    causal = max(counts) > 1
    wrapper.plan(
        q_indptr, kv_indptr, torch.cat(order).to(device), kv_indptr[1:] - kv_indptr[:-1], HEADS, CKV, KPE, 1, causal,
        SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    q, k_buffer = queries(sum(counts), device), buffer.unsqueeze(1)  # [tokens, 1, channels]
    out = wrapper.run(q[:, :, :CKV], q[:, :, CKV:], k_buffer[:, :, :CKV], k_buffer[:, :, CKV:])
    assert_near(out.view(-1, HEADS * CKV), expected(q, buffer, order, counts).flatten(1))


def test_as_sglang_plans_steps_of_a_captured_graph(device):
    ints = {"dtype": torch.int32, "device": device}
    q_indptr, kv_indptr, kv_indices = torch.arange(9, **ints), torch.zeros(9, **ints), torch.zeros(8 * 64, **ints)
    kv_lens = torch.ones(8, **ints)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(
        torch.empty(8 << 20, dtype=torch.uint8, device=device), use_cuda_graph=True, qo_indptr=q_indptr.clone()[:4],
        kv_indptr=kv_indptr.clone()[:4], kv_indices=kv_indices, kv_len_arr=kv_lens[:3], backend="auto",
    )  # fmt: skip
    sizes = (HEADS, CKV, KPE, 1, False, SCALE, torch.bfloat16, torch.bfloat16)
    for seed, lens in enumerate([LENS, [2, 50, 3]]):
        buffer, order = keys_of(lens, 64, device, seed)
        kv_indices[: sum(lens)] = torch.cat(order).to(device)
        ends = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
        if seed == 0:
            arguments = (q_indptr[:4], ends.to(device), kv_indices[: sum(lens)].clone(), torch.tensor(lens, **ints))
        else:  # the plan of a replay: on the host but for the pages, which are where they have to be
            wrapper.plan = functools.partial(flashinfer.BatchMLAPagedAttentionWrapper.plan, wrapper)
            arguments = (q_indptr.cpu()[:4], ends, kv_indices, torch.tensor(lens, dtype=torch.int32))
        wrapper.plan(*arguments, *sizes)
        q, k_buffer = queries(3, device, seed), buffer.unsqueeze(1)
        out = wrapper.run(q[:, :, :CKV], q[:, :, CKV:], k_buffer[:, :, :CKV], k_buffer[:, :, CKV:])
        assert_near(out, expected(q, buffer, order, [1, 1, 1]))


@pytest.mark.parametrize("q_len", [1, 2])
def test_as_vllm_decodes(q_len, device):
    lens, page_size = [33, 2, 64], 32
    buffer, order = keys_of(lens, 6 * page_size, device)
    tables = torch.tensor([[4, 1], [5, 0], [2, 3]], dtype=torch.int32, device=device)
    cache = torch.zeros(6, page_size, CKV + KPE, dtype=torch.bfloat16, device=device)
    for part, pages in zip(order, tables.tolist(), strict=True):
        for position, slot in enumerate(part.tolist()):
            cache[pages[position // page_size], position % page_size] = buffer[slot]
    q = queries(3 * q_len, device)
    counter = torch.zeros(1024, dtype=torch.uint8, device=device)
    out = trtllm_batch_decode_with_kv_cache_mla(
        query=q.view(3, -1, HEADS, CKV + KPE), kv_cache=cache.unsqueeze(1),
        workspace_buffer=torch.zeros(1 << 20, dtype=torch.int8, device=device), qk_nope_head_dim=128,
        kv_lora_rank=CKV, qk_rope_head_dim=KPE, block_tables=tables,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device), max_seq_len=64, bmm1_scale=SCALE, bmm2_scale=1.0,
        return_lse=False, multi_ctas_kv_counter_buffer=counter,
    )  # fmt: skip
    assert_near(out.view(-1, HEADS, CKV), expected(q, buffer, order, [q_len] * 3))
