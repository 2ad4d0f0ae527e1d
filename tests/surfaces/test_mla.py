"""FlashInfer's attention over latent keys against float64: parts and one tensor, planned and without a plan."""

import contextlib
import functools
import math
from dataclasses import dataclass

import pytest
import torch
from attention_oracle import Options, attend
from paged_rows import PagedRows, tolerance

from graphdecode import BucketLadder, GraphManager, Slot, StepBuffers, append_paged_mla_kv_cache
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.surfaces.query_rows import query_rows_triton
from graphdecode.mla import (
    BatchMLAPagedAttentionWrapper,
    MLAPlanMetadata,
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)

query_rows_torch = versions("query_rows").torch
HEADS, CKV, KPE, PAGE = 4, 32, 32, 8
SCALE = 0.17
LN_2 = math.log(2.0)


@dataclass
class Latents:
    """Rows of latent keys in pages, in parts of their own, and the queries of their newest tokens."""

    rows: PagedRows
    counts: list[int]  # queries of each row
    q_nope: torch.Tensor
    q_pe: torch.Tensor

    @classmethod
    def random(cls, lens, device, counts=None, dtype=torch.float32, q_dtype=None, seed=0, page_size=PAGE):
        counts = [1] * len(lens) if counts is None else counts
        shape = {"kv_heads": 1, "head_dim": KPE + CKV, "value_dim": CKV, "page_size": page_size}
        parts = {"is_latent": True, "is_in_parts": True}
        rows = PagedRows.random(lens, dtype=dtype, device=device, seed=seed, **shape, **parts)
        draw = torch.Generator().manual_seed(seed + 1)
        queries = [torch.randn(sum(counts), HEADS, dim, generator=draw).to(q_dtype or dtype) for dim in (CKV, KPE)]
        return cls(rows, counts, *(each.to(device) for each in queries))

    @property
    def caches(self):
        return self.rows.v_cache.squeeze(2), self.rows.k_cache.squeeze(2)

    @property
    def packed(self):
        """Queries and keys as one tensor each, latent channels first."""
        return torch.cat([self.q_nope, self.q_pe], -1), torch.cat(self.caches, -1)

    def indptr(self, device):
        return torch.tensor([0, *self.counts], device=device).cumsum(0).to(torch.int32)

    def lens(self, device):
        return torch.tensor(self.rows.lens, dtype=torch.int32, device=device)

    def listed(self, device):
        return self.indptr(device), self.rows.indptr.to(device), self.rows.indices.to(device), self.lens(device)

    def expected(self, causal=True, ckv_scale=1.0, kpe_scale=1.0, **options):
        """Return the oracle's output and base-2 log-sum-exps."""
        scales = torch.tensor([kpe_scale] * KPE + [ckv_scale] * CKV, dtype=torch.float64)
        queries = torch.cat([self.q_pe, self.q_nope], -1).double().cpu().split(self.counts)
        parts = []
        for q, keys, values in zip(queries, self.rows.keys, self.rows.values, strict=True):
            arguments = (keys.double() * scales, values.double() * ckv_scale, Options(**{"sm_scale": SCALE} | options))
            parts += [attend(q, *arguments)] if causal else [attend(one, *arguments) for one in q.split(1)]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def planned(latents, device, causal=True, where=None, **others):
    wrapper = BatchMLAPagedAttentionWrapper(torch.zeros(1 << 20, dtype=torch.uint8, device=device))
    q_dtype, kv_dtype = latents.q_nope.dtype, latents.rows.k_cache.dtype
    sizes = (HEADS, CKV, KPE, latents.rows.k_cache.shape[1])
    wrapper.plan(*latents.listed(where or device), *sizes, causal, SCALE, q_dtype, kv_dtype, **others)
    return wrapper


def assert_near(result, expected, close=1e-5):
    torch.testing.assert_close(result.double().cpu(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("lens", [[9, 0, 40, 8], [1], [7, 8, 9]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_one_query_attend_to_their_latent_keys(lens, dtype, device):
    latents = Latents.random(lens, device, dtype=dtype)
    out, lse = planned(latents, device).run(latents.q_nope, latents.q_pe, *latents.caches, return_lse=True)
    assert out.dtype == dtype
    for result, expected in zip((out, lse), latents.expected(), strict=True):
        assert_near(result, expected, tolerance(dtype, dtype))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("where", [None, "cpu"])
def test_rows_of_several_queries_are_causal_or_not(causal, where, device):
    latents = Latents.random([20, 3, 0, 9, 2], device, counts=[3, 3, 0, 1, 4], page_size=5)
    wrapper = planned(latents, device, causal, where)
    out, lse = wrapper.run(latents.q_nope, latents.q_pe, *latents.caches, return_lse=True, return_lse_base_on_e=True)
    expected, expected_lse = latents.expected(causal)
    assert_near(out, expected)
    assert_near(lse, expected_lse * LN_2)


def test_parts_may_be_views_of_one_tensor_and_out_is_written(device):
    latents = Latents.random([9, 40], device, dtype=torch.bfloat16)
    query, kv_cache = latents.packed
    wrapper = planned(latents, device, output_dtype=torch.float32, lse_mode="base2")
    out, lse = torch.empty(2, HEADS, CKV, device=device), torch.empty(2, HEADS, device=device)
    expected = latents.expected()
    for arguments in (
        {"query": query, "kv_cache": kv_cache},
        {"query": (latents.q_nope, latents.q_pe), "kv_cache": (kv_cache[..., :CKV], kv_cache[..., CKV:])},
        {"query": (query, (latents.q_nope, latents.q_pe)), "kv_cache": (latents.caches, kv_cache)},
    ):
        out.fill_(math.nan), lse.fill_(math.nan)
        assert wrapper.run(**arguments, out=out, lse=lse) is out
        assert_near(out, expected[0], 1e-2)
        assert_near(lse, expected[1], 1e-2)


def test_scales_sinks_and_bmm_scales_follow_the_formula(device):
    latents = Latents.random([9, 0, 40], device, dtype=torch.float8_e4m3fn, q_dtype=torch.bfloat16)
    sinks = torch.linspace(-2, 1, HEADS, device=device)
    out, lse = planned(latents, device, use_sinks=True).run(
        latents.q_nope, latents.q_pe, *latents.caches, return_lse=True, ckv_scale=3.0, kpe_scale=1.5, sinks=sinks
    )
    expected = latents.expected(ckv_scale=3.0, kpe_scale=1.5, sinks=sinks.cpu())
    assert_near(out, expected[0], 1e-2)
    assert_near(lse, expected[1], 1e-2)
    out = planned(latents, device, scale_mode="bmm-scalar").run(
        latents.q_nope, latents.q_pe, *latents.caches, bmm1_scale=0.4, bmm2_scale=2.0
    )
    assert_near(out, latents.expected(sm_scale=0.4, v_scale=2.0)[0], 1e-2)


def test_keys_need_no_rotated_channels(device):
    latents = Latents.random([9, 40], device)
    wrapper = BatchMLAPagedAttentionWrapper(torch.zeros(1 << 20, dtype=torch.uint8, device=device))
    wrapper.plan(*latents.listed(device), HEADS, CKV, 0, PAGE, True, SCALE, torch.float32, torch.float32)
    ckv, kpe = latents.caches
    out = wrapper.run(latents.q_nope, latents.q_pe[..., :0], ckv, kpe[..., :0])
    latents.q_pe.zero_()
    assert_near(out, latents.expected()[0])


def test_rows_may_be_a_table_and_either_form_of_metadata(device):
    latents = Latents.random([9, 0, 40], device, counts=[2, 1, 3])
    dense = (latents.indptr(device), latents.rows.table, latents.lens(device))
    expected = latents.expected()[0]
    for metadata in (
        {"metadata": MLAPlanMetadata.csr(*latents.listed(device))},
        {"metadata": MLAPlanMetadata.dense(*dense, max_q_len=3)},
        {"cum_seq_lens_q": dense[0], "block_tables": dense[1], "seq_lens": dense[2]},
    ):
        wrapper = BatchMLAPagedAttentionWrapper(torch.zeros(1 << 20, dtype=torch.uint8, device=device), backend="fa2")
        wrapper.plan(
            **metadata, num_heads=HEADS, head_dim_ckv=CKV, head_dim_kpe=KPE, page_size=PAGE, causal=True,
            sm_scale=SCALE, q_data_type=torch.float32, kv_data_type=torch.float32, enable_pdl=True,
        )  # fmt: skip
        assert_near(wrapper.run(query=latents.packed[0], kv_cache=latents.packed[1]), expected)


def test_kv_len_and_page_table_of_a_run_replace_planned_rows(device):
    latents = Latents.random([9, 1, 40], device)
    wrapper = BatchMLAPagedAttentionWrapper(torch.zeros(1 << 20, dtype=torch.uint8, device=device), backend="cutlass")
    arguments = (latents.q_nope, latents.q_pe, *latents.caches)
    tables = {"kv_len": latents.lens(device), "page_table": latents.rows.table}
    assert_near(wrapper.run(*arguments, **tables), latents.expected(sm_scale=(128 + KPE) ** -0.5)[0])
    others = Latents.random([3, 3, 3], device, seed=5)
    wrapper = planned(others, device)
    before = wrapper.run(others.q_nope, others.q_pe, *others.caches)
    assert_near(wrapper.run(*arguments, **tables), latents.expected()[0])
    assert torch.equal(wrapper.run(others.q_nope, others.q_pe, *others.caches), before)


@pytest.mark.parametrize("size", [1 << 20, 4 * HEADS * (CKV + 2) * 5, 1])
def test_rows_are_split_as_often_as_the_workspace_has_room(size, backend):
    latents = Latents.random([300, 0, 90], backend)
    wrapper = BatchMLAPagedAttentionWrapper(torch.zeros(size, dtype=torch.uint8, device=backend))
    sizes = (HEADS, CKV, KPE, PAGE, True, SCALE, torch.float32, torch.float32)
    wrapper.plan(*latents.listed(backend), *sizes)
    assert_near(wrapper.run(latents.q_nope, latents.q_pe, *latents.caches), latents.expected()[0])


def test_tokens_behind_the_planned_ones_get_nothing_in_buffers_of_any_size(device):
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (5, 5, 32, 4)]
    wrapper = BatchMLAPagedAttentionWrapper(torch.zeros(1 << 20, dtype=torch.uint8, device=device), True, *buffers)
    for lens, counts in (([40, 33, 1], [2, 1, 1]), ([8], [3])):
        latents = Latents.random(lens, device, counts)
        wrapper.plan(*latents.listed(device), HEADS, CKV, KPE, PAGE, True, SCALE, torch.float32, torch.float32)
    queries = (torch.cat([each, each, each]) for each in (latents.q_nope, latents.q_pe))
    out = wrapper.run(*queries, *latents.caches)
    assert_near(out[:3], latents.expected()[0])
    assert not out[3:].any()


@pytest.mark.parametrize("wrong", [-1, 99])
@pytest.mark.parametrize("form", ["list", "table", "run", "trtllm"])
def test_page_numbers_outside_the_pool_raise_and_write_nothing(form, wrong):
    latents = Latents.random([9, 20], "cpu")
    lists, table, out = list(latents.listed("cpu")), latents.rows.table.clone(), torch.zeros(2, HEADS, CKV)
    lists[2][-1] = table[1, 2] = wrong
    wrapper, arguments = planned(latents, "cpu"), (latents.q_nope, latents.q_pe, *latents.caches, out)
    sizes = (HEADS, CKV, KPE, PAGE, True, SCALE, torch.float32, torch.float32)
    run = functools.partial(wrapper.run, *arguments)
    if form == "list":
        wrapper.plan(*lists, *sizes)
    elif form == "table":
        dense = {"cum_seq_lens_q": lists[0], "block_tables": table, "seq_lens": lists[3]}
        wrapper.plan(None, None, None, None, *sizes, **dense)
    elif form == "run":
        run = functools.partial(run, kv_len=lists[3], page_table=table)
    else:
        run = functools.partial(attended, latents, "cpu", block_tables=table, out=out.unsqueeze(1))
    with pytest.raises(ValueError, match=rf"pages .*0\.\.\d+.*{wrong}"):
        run()
    assert not out.any()


STATES = [([40, 33, 1], [2, 1, 1]), ([3, 0], [1, 1]), ([8, 24, 16, 40], [1, 1, 1, 1])]


@pytest.mark.parametrize("is_table", [False, True])
def test_a_captured_run_is_right_at_later_batches_and_lengths(is_table, device):
    states = [Latents.random(lens, device, counts, seed=seed) for seed, (lens, counts) in enumerate(STATES)]
    pages = max(len(state.caches[0]) for state in states)
    ckv, kpe = (torch.zeros(pages, PAGE, dim, device=device) for dim in (CKV, KPE))
    space = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    sizes = (HEADS, CKV, KPE, PAGE, True, SCALE, torch.float32, torch.float32)
    ints = {"dtype": torch.int32, "device": device}
    if is_table:
        wrapper = BatchMLAPagedAttentionWrapper(space, True)
        q_indptr, table, lens = torch.zeros(5, **ints), torch.zeros(4, 5, **ints), torch.zeros(4, **ints)
        dense = {"cum_seq_lens_q": q_indptr, "block_tables": table, "seq_lens": lens}
        wrapper.plan(None, None, None, None, *sizes, **dense)
        saved = list(dense.values())
    else:
        saved = [torch.zeros(n, **ints) for n in (5, 5, 32, 4)]
        wrapper = BatchMLAPagedAttentionWrapper(space, True, *saved)
        wrapper.plan(*states[0].listed(device), *sizes)
    slots = [Slot(name, ("batch", HEADS, dim), torch.float32, pad=0.0)
             for name, dim in (("q_nope", CKV), ("q_pe", KPE), ("out", CKV))]  # fmt: skip
    buffers = StepBuffers(slots, max_batch_size=6, device=device)
    wrapper.run(buffers.q_nope, buffers.q_pe, ckv, kpe)  # of the most tokens: the workspace is as large as it gets

    def step(batch):
        wrapper.run(batch.q_nope, batch.q_pe, ckv, kpe, batch.out)

    for number, tensor in enumerate(wrapper.workspace):
        buffers.adopt(f"workspace_{number}", tensor)
    graphs = GraphManager(step, buffers, BucketLadder([6], 6), constants=[ckv, kpe, *saved])
    with contextlib.closing(graphs):
        graphs.capture(progress=False)
        for state in states:
            if is_table:
                count, width = state.rows.table.shape
                q_indptr.fill_(sum(state.counts))
                q_indptr[: count + 1] = state.indptr(device)
                table[:count, :width], lens[:count] = state.rows.table, state.lens(device)
            else:
                wrapper.plan(*state.listed(device), *sizes)
            for cache, part in zip((ckv, kpe), state.caches, strict=True):
                cache[: len(part)].copy_(part)
            tokens = sum(state.counts)
            buffers.set_live_rows(tokens)
            buffers.q_nope[:tokens], buffers.q_pe[:tokens] = state.q_nope, state.q_pe
            graphs.replay(6)
            replayed = buffers.out.clone()
            assert_near(replayed[:tokens], state.expected()[0])
            assert not replayed[tokens:].any()
            graphs.run_eager(6)
            assert torch.equal(buffers.out, replayed)


@pytest.mark.parametrize("version", [query_rows_triton, query_rows_torch])
@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_each_query_is_a_row_with_the_keys_that_it_sees(version, is_table, causal, device):
    device = device if version is query_rows_triton else "cpu"
    starts, lengths = (torch.full((9,), -7, dtype=torch.int32, device=device) for _ in range(2))
    q_indptr, kv_indptr, kv_lens = (
        torch.tensor(each, dtype=torch.int32, device=device)
        for each in ([0, 2, 2, 6, 7], [0, 2, 2, 5, 5], [7, 0, 12, 0])
    )
    width = 3 if is_table else 5
    version(starts, lengths, q_indptr, None if is_table else kv_indptr, kv_lens, width, 4, causal)
    rows = [0, 0, 2, 2, 2, 2, 3]
    begins = [row * width if is_table else kv_indptr[row].item() for row in rows]
    visible = [6, 7, 9, 10, 11, 12, 0] if causal else [7, 7, 12, 12, 12, 12, 0]
    assert starts.tolist() == [*begins, 0, 0]
    assert lengths.tolist() == [*visible, 0, 0]


def attended(latents, device, function=trtllm_batch_decode_with_kv_cache_mla, **others):
    query, kv_cache = latents.packed
    if "cum_seq_lens_q" not in others:
        query = query.unflatten(0, (len(latents.counts), -1))
    arguments = {
        "query": query, "kv_cache": kv_cache, "workspace_buffer": torch.zeros(1, device=device), "qk_nope_head_dim": 8,
        "kv_lora_rank": CKV, "qk_rope_head_dim": KPE, "block_tables": latents.rows.table,
        "seq_lens": latents.lens(device), "max_seq_len": 40, "bmm1_scale": SCALE,
    }  # fmt: skip
    return function(**arguments | others)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_without_a_plan_rows_attend_as_their_tables_say(q_len, as_tensors, device):
    latents = Latents.random([9, 0, 40, 2], device, counts=[q_len] * 4)
    scales = [torch.tensor(each, device=device) if as_tensors else each for each in (0.3, 1.7)]
    sinks = torch.linspace(-1, 1, HEADS, device=device)
    arguments = {"bmm1_scale": scales[0], "bmm2_scale": scales[1], "sinks": [sinks]}
    out, lse = attended(latents, device, **arguments, return_lse=True, return_lse_base="basee")
    expected = latents.expected(sm_scale=0.3, v_scale=1.7, sinks=sinks.cpu())
    assert out.shape == (4, q_len, HEADS, CKV)
    assert_near(out.flatten(0, 1), expected[0])
    assert_near(lse, expected[1] * LN_2)


def test_without_a_plan_rows_may_have_any_numbers_of_queries(device):
    latents = Latents.random([9, 0, 40], device, counts=[1, 0, 3])
    arguments = {"cum_seq_lens_q": latents.indptr(device), "max_q_len": 3}
    assert_near(attended(latents, device, **arguments), latents.expected()[0])
    if device == "cpu":  # a GPU is not waited for
        with pytest.raises(ValueError, match=r"cum_seq_lens_q .*4.*6"):
            attended(latents, device, cum_seq_lens_q=torch.tensor([0, 1, 1, 6], dtype=torch.int32))


def test_eight_bit_latents_without_a_plan_give_sixteen_bits(device):
    latents = Latents.random([9, 20], device, dtype=torch.float8_e4m3fn)
    out = torch.empty(2, HEADS, CKV, dtype=torch.bfloat16, device=device)
    xqa_batch_decode_with_kv_cache_mla(
        latents.packed[0].unsqueeze(1), latents.packed[1].unsqueeze(1), torch.zeros(1, device=device), 8, CKV, KPE,
        latents.rows.table, latents.lens(device), 20, out, SCALE,
    )  # fmt: skip
    assert_near(out, latents.expected()[0], 1e-2)
    assert attended(latents, device).dtype == torch.bfloat16


@pytest.mark.parametrize("is_one_tensor", [False, True])
def test_append_writes_latents_to_their_positions_in_pages(is_one_tensor, device):
    joined = torch.zeros(5, 4, CKV + KPE, device=device)
    ckv, kpe = (
        (joined[..., :CKV], joined[..., CKV:])
        if is_one_tensor
        else (joined[..., :CKV].clone(), joined[..., CKV:].clone())
    )
    ints = {"dtype": torch.int32, "device": device}
    new = torch.randn(4, CKV + KPE, generator=torch.Generator().manual_seed(0)).to(device)
    append_paged_mla_kv_cache(
        new[:, :CKV], new[:, CKV:], torch.tensor([0, 0, 1, -1], **ints), torch.tensor([3, 4, 0, 0], **ints), ckv, kpe,
        torch.tensor([4, 0, 2], **ints), torch.tensor([0, 2, 3], **ints), torch.tensor([1, 1], **ints),
    )  # fmt: skip
    for page, position, token in ((4, 3, 0), (0, 0, 1), (2, 0, 2)):
        assert torch.equal(torch.cat([ckv[page, position], kpe[page, position]]), new[token])
    assert torch.count_nonzero(ckv) + torch.count_nonzero(kpe) == 3 * (CKV + KPE)


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


WRONG_PLANS = [
    ({"num_heads": None}, "num_heads"),
    ({"num_heads": 0}, "num_heads"),
    ({"head_dim_ckv": 8}, "head_dim_ckv must be"),
    ({"head_dim_kpe": 1024}, "head_dim_kpe"),
    ({"page_size": 0}, "page_size"),
    ({"sm_scale": math.nan}, "sm_scale"),
    ({"q_data_type": torch.int8}, "q_data_type"),
    ({"kv_data_type": "int4"}, "kv_data_type"),
    ({"qo_indptr": _ints(0, 1)}, "qo_indptr"),
    ({"qo_indptr": _ints(0, 2, 1)}, "qo_indptr must rise"),
    ({"kv_indptr": _ints(0, 2, 9)}, "kv_indptr must end"),
    ({"kv_len_arr": _ints(17, 9)}, "kv_len_arr must be in"),
    ({"kv_len_arr": _ints(-1, 9)}, "kv_len_arr must be in"),
    ({"kv_len_arr": torch.tensor([9, 9])}, "kv_len_arr must be int32"),
    ({"kv_indices": None}, "kv_indices is None"),
    ({"block_tables": torch.zeros(2, 2, dtype=torch.int32)}, "block_tables"),
    ({"metadata": 3}, "metadata"),
    ({"query_layout": "mixed"}, "query_layout"),
    ({"lse_mode": "base10"}, "lse_mode"),
    ({"scale_mode": "mine"}, "scale_mode"),
    ({"output_scale": "per-tensor"}, "output_scale"),
    ({"output_dtype": torch.int8}, "output_dtype"),
    ({"skip_softmax": True}, "skip_softmax"),
]


@pytest.mark.parametrize(("wrong", "names"), WRONG_PLANS)
def test_a_plan_that_does_not_fit_is_refused_and_changes_nothing(wrong, names):
    latents = Latents.random([9, 9], "cpu")
    wrapper = planned(latents, "cpu")
    before = wrapper.run(latents.q_nope, latents.q_pe, *latents.caches)
    lists = dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), latents.listed("cpu"), strict=True))
    right = {"num_heads": HEADS, "head_dim_ckv": CKV, "head_dim_kpe": KPE, "page_size": PAGE, "causal": True,
             "sm_scale": SCALE, "q_data_type": "float32", "kv_data_type": "float32"}  # fmt: skip
    with pytest.raises(ValueError, match=names):
        wrapper.plan(**lists | right | wrong)
    assert torch.equal(wrapper.run(latents.q_nope, latents.q_pe, *latents.caches), before)


WRONG_RUNS = [
    ({"q_nope": torch.zeros(2, HEADS, CKV + 1)}, "q_nope"),
    ({"q_pe": torch.zeros(3, HEADS, KPE)}, "q_pe"),
    ({"q_pe": None}, "q_pe"),
    ({"q_nope": torch.zeros(1, HEADS, CKV), "q_pe": torch.zeros(1, HEADS, KPE)}, "2 tokens as planned"),
    ({"ckv_cache": torch.zeros(5, PAGE + 1, CKV)}, "ckv_cache"),
    ({"kpe_cache": torch.zeros(1, PAGE, KPE)}, "kpe_cache"),
    ({"kpe_cache": torch.zeros(5, PAGE, KPE, dtype=torch.float16)}, "kpe_cache"),
    ({"query": torch.zeros(2, HEADS, CKV + KPE)}, "query takes the place"),
    ({"out": torch.zeros(2, HEADS, CKV, dtype=torch.float16)}, "out"),
    ({"lse": torch.zeros(2, HEADS + 1)}, "lse"),
    ({"kv_len": torch.zeros(2, dtype=torch.int32)}, "kv_len and page_table"),
    ({"o_scale": 2.0}, "o_scale"),
    ({"ckv_scale_arr": torch.ones(1)}, "ckv_scale_arr"),
    ({"ckv_scale": 0.0}, "ckv_scale"),
    ({"kpe_scale": math.inf}, "kpe_scale"),
    ({"sinks": torch.zeros(HEADS + 1)}, "sinks"),
    ({"skip_softmax_threshold_scale_factor": 2.0}, "skip_softmax_threshold_scale_factor"),
]


@pytest.mark.parametrize(("wrong", "names"), WRONG_RUNS)
def test_a_run_that_does_not_fit_is_refused_by_name(wrong, names):
    latents = Latents.random([9, 9], "cpu")
    ckv, kpe = latents.caches
    arguments = {"q_nope": latents.q_nope, "q_pe": latents.q_pe, "ckv_cache": ckv, "kpe_cache": kpe}
    with pytest.raises(ValueError, match=names):
        planned(latents, "cpu").run(**arguments | wrong)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"sparse_mla_top_k": 4}, "sparse_mla_top_k"),
        ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx"),
        ({"enable_dcp": True}, "enable_dcp"),
        ({"cp_world": 2}, "cp_world"),
        ({"return_lse_base": "base10"}, "return_lse_base"),
        ({"backend": "mine"}, "backend"),
        ({"query": torch.zeros(3, HEADS, CKV + KPE)}, "query"),
        ({"query": torch.zeros(3, 1, HEADS, CKV)}, "query must have kv_lora_rank"),
        ({"kv_lora_rank": CKV + 1}, "kv_lora_rank"),
        ({"kv_cache": torch.zeros(3, PAGE, CKV)}, "kv_cache"),
        ({"seq_lens": None}, "seq_lens"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int32)}, "block_tables"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"bmm1_scale": torch.ones(2)}, "bmm1_scale"),
        ({"out": torch.zeros(3, 1, HEADS, CKV, dtype=torch.float64)}, "out"),
    ],
)
def test_invalid_arguments_without_a_plan_raise_by_name(wrong, names):
    with pytest.raises(ValueError, match=names):
        attended(Latents.random([9, 1, 9], "cpu"), "cpu", **wrong)


def test_a_run_needs_a_plan_and_captured_rows_need_buffers():
    latents = Latents.random([9], "cpu")
    with pytest.raises(RuntimeError, match="plan"):
        BatchMLAPagedAttentionWrapper(torch.zeros(1)).run(latents.q_nope, latents.q_pe, *latents.caches)
    wrapper = BatchMLAPagedAttentionWrapper(torch.zeros(1), use_cuda_graph=True)
    with pytest.raises(ValueError, match="buffers"):
        wrapper.plan(*latents.listed("cpu"), HEADS, CKV, KPE, PAGE, True, SCALE, torch.float32, torch.float32)
    wrapper = BatchMLAPagedAttentionWrapper(torch.zeros(1), True, _ints(0, 0), _ints(0, 0), _ints(0), _ints(0))
    with pytest.raises(ValueError, match="kv_indices"):
        wrapper.plan(*latents.listed("cpu"), HEADS, CKV, KPE, PAGE, True, SCALE, torch.float32, torch.float32)
