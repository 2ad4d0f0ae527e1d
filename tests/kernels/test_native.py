"""The compiled kernels of the CPU: each against a float64 oracle or torch, and with arguments that cannot be."""

import pytest
import torch
from compiled_kernels import compiled
from sampling_rows import neutral_slots, random_rows, set_row

from graphdecode.kernels.attention.attention_plan import PlanSizes
from graphdecode.kernels.linear.linear import can_gate, native_linear, to_panels
from graphdecode.kernels.model.act_mul import ACTIVATIONS
from graphdecode.kernels.native.library import NativeCall, NativeSequence, joined
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.sampling.sampling_slots import (
    DEAD_TOKEN,
    FLAG_LOGPROBS,
    WITHOUT_FINITE,
    WITHOUT_NUMBERS,
    SamplingSlots,
)

pytestmark = compiled

native_attention_plan = versions("attention_plan").native
decode_attention_torch = versions("decode_attention").torch
native_decode_attention = versions("decode_attention").native
native_rope_append = versions("rope_append").native
rope_append_torch = versions("rope_append").torch
native_act_mul = versions("act_mul").native
native_extend_attention = versions("extend_attention").native
native_rms_norm = versions("rms_norm").native
native_sample = versions("sample").native
sample_torch = versions("sample").torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
EPS = 1e-5
NO_SCALES = (1.0, 1.0, None, None)  # of caches that do not have 8 bits


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


def close(actual, expected, dtype):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gate_is_the_formula(activation, dtype, generator):
    gate_up = (torch.randn(5, 70, generator=generator) * 20).to(dtype)
    gate_up[0, :6] = torch.tensor([0.0, -0.0, 1e4, -1e4, 88.5, -88.5])
    gate, up = gate_up[:, :35].double(), gate_up[:, 35:].double()
    apply = torch.nn.functional.silu if activation == "silu" else torch.nn.functional.gelu
    options = {} if activation == "silu" else {"approximate": "tanh" if activation == "gelu_tanh" else "none"}
    out = torch.full((5, 35), torch.nan, dtype=dtype)
    native_act_mul(out, gate_up, activation)()
    expected = (apply(gate, **options) * up).to(dtype).double()  # in fp16 what is too large is infinite
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "in_features"), [(1, 96), (8, 96), (9, 96), (35, 97), (900, 301)])
def test_a_gated_product_has_the_bits_of_its_parts(rows, in_features, activation, dtype, generator):
    weight = (torch.randn(2 * 160, in_features, generator=generator) / 16).to(dtype)
    x, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((rows, in_features), (2 * 160,)))
    out, expected = (torch.full((rows, 160), torch.nan, dtype=dtype) for _ in range(2))
    gate_up = torch.empty(rows, 2 * 160)
    for given in (None, bias):
        native_linear(gate_up, x, to_panels(weight), given)
        native_act_mul(expected, gate_up, activation)()
        versions("gated_linear").native(out, x, to_panels(weight), activation, given)()
        if can_gate(to_panels(weight), 2 * 160):  # else nothing uses it, and other sums have other orders
            assert torch.equal(out, expected)
        close(out, expected, dtype)
        versions("gated_linear").torch(out, x, to_panels(weight), activation, given)
        close(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (33, 7), (64, 64), (100, 257), (70, 96)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product_is_the_formula_for_any_number_of_rows(out_features, in_features, dtype, with_bias, generator):
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if with_bias else None
    panels = to_panels(weight)
    for rows in (*range(1, 34), 50, 67):
        x = torch.randn(rows, in_features + 3, generator=generator).to(dtype)[:, 1:-2]
        out = torch.full((rows, out_features), torch.nan, dtype=dtype)
        native_linear(out, x, panels, bias)
        expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * in_features**0.5)


@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [(601, 2048, 96), (1100, 1056, 70), (1043, 32, 4128)],  # parts of rows share panels; a large result is streamed
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_prompts_rows_are_what_they_are_alone(rows, in_features, out_features, dtype, with_bias, generator):
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if with_bias else None
    x, panels = torch.randn(rows, in_features, generator=generator).to(dtype), to_panels(weight)
    whole = torch.full((rows, out_features), torch.nan, dtype=dtype)
    native_linear(whole, x, panels, bias)
    expected = x.float() @ weight.float().T + (0.0 if bias is None else bias.float())
    torch.testing.assert_close(whole.float(), expected, rtol=TOLERANCE[dtype], atol=2**-7)
    for part in (slice(0, 5), slice(280, 330), slice(rows - 17, rows)):
        alone = torch.empty_like(whole[part])
        native_linear(alone, x[part], panels, bias)
        assert torch.equal(alone, whole[part]), part


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [300, 320, 2048])
def test_a_products_row_depends_on_nothing_but_the_row(in_features, dtype, generator):
    """Neither on how many rows there are, nor which others, nor how many threads work."""
    weight = torch.randn(1000, in_features, generator=generator).to(dtype)
    panels = to_panels(weight)
    x = torch.randn(200, in_features, generator=generator).to(dtype)
    whole = torch.empty(200, 1000, dtype=dtype)
    torch.set_num_threads(1)
    native_linear(whole, x, panels)
    torch.set_num_threads(3)
    for rows in (1, 2, 5, 8, 13, 33, 49):
        part = torch.empty(rows, 1000, dtype=dtype)
        hostile = x[:rows].clone()
        hostile[1:] = torch.nan
        native_linear(part, hostile, panels)
        assert torch.equal(part[0], whole[0]), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "half"), [(16, 8), (48, 24), (64, 16), (16, 0)])
@pytest.mark.parametrize("norms", ["none", "of each head", "of all heads"])
def test_rotation_and_append_are_the_torch_version(dim, half, norms, dtype, generator):
    pages, page_size, rows, live = 9, 4, 3, 6
    qkv = torch.randn(8, (5 + 2 * 2) * dim, generator=generator).to(dtype)
    heads = (5, 2) if norms == "of all heads" else (1, 1)
    weights = [None if norms == "none" else torch.randn(count * dim, generator=generator) for count in heads]
    table = torch.randperm(pages - 1, generator=generator)[: rows * 2].view(rows, 2).int()
    row_of = torch.tensor([0, 0, 1, 2, 2, 2, 2**31 - 1, -5], dtype=torch.int32)
    positions = torch.tensor([2, 3, 7, 0, 1, 4, 2**31 - 1, -9], dtype=torch.int32)
    cos_sin = torch.randn(8, 2, half, generator=generator)
    results = []
    for version in (rope_append_torch, lambda *given: native_rope_append(*given)()):
        q_out = torch.zeros(8, 5, dim, dtype=dtype)
        caches = torch.zeros(2, pages, page_size, 2, dim, dtype=dtype)
        alive = torch.tensor([live], dtype=torch.int32)
        version(q_out, *caches, qkv, row_of, positions, alive, table, cos_sin, *weights, EPS, *NO_SCALES)
        results.append((q_out, caches))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "dim", "page_size"), [(1, 16, 1), (3, 48, 5), (4, 64, 16), (7, 128, 64)])
@pytest.mark.parametrize(
    ("window", "soft_cap", "has_sinks"), [(-1, 0.0, False), (0, 3.0, False), (10, 0.0, True), (70, 3.0, True)]
)
def test_attention_is_the_torch_version(group, dim, page_size, window, soft_cap, has_sinks, dtype, generator):
    lengths = torch.tensor([0, 1, page_size, page_size + 1, 63, 64, 65, 200, -3], dtype=torch.int32)
    row_pages = -(-200 // page_size)
    pages = row_pages * 4 + 1
    k_cache, v_cache = torch.randn(2, pages, page_size, 2, dim, generator=generator).to(dtype)
    k_cache[-1] = v_cache[-1] = torch.nan  # the null page
    table = torch.full((9, row_pages), pages - 1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        used = -(-max(length, 0) // page_size)
        table[row, :used] = torch.randint(0, pages - 1, (used,), generator=generator).int()
    q = torch.randn(9, 2 * group, dim, generator=generator).to(dtype)
    sinks = torch.randn(2 * group, generator=generator) if has_sinks else None
    nothing, no_plan = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    results = []
    for version in (decode_attention_torch, lambda *given: native_decode_attention(*given)()):
        out = torch.full_like(q, torch.nan)
        given = (out, None, q, k_cache, v_cache, table, None, lengths, no_plan, nothing, nothing, no_plan, 1, 1)
        version(*given, dim**-0.5, window, soft_cap, sinks, False, 1.0, "NONE", 1.0, 1e4, None, None)
        results.append(out)
    torch.testing.assert_close(*results, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    assert not results[1][0].any()
    assert not results[1][-1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "kv_heads", "dim", "page_size"), [(3, 4, 64, 16), (12, 2, 96, 8), (20, 3, 32, 48)])
def test_a_rows_attention_has_the_same_bits_alone_and_in_any_company(group, kv_heads, dim, page_size, dtype, generator):
    lengths = torch.tensor([700, 1, 129, 16, 1100, 47], dtype=torch.int32)
    pages = -(-1100 // page_size)
    k_cache, v_cache = torch.randn(2, pages + 1, page_size, kv_heads, dim, generator=generator).to(dtype)
    table = torch.stack([torch.randperm(pages, generator=generator) for _ in lengths]).int()
    q = torch.randn(len(lengths), group * kv_heads, dim, generator=generator).to(dtype)
    nothing, no_plan = torch.zeros(1), torch.zeros(1, dtype=torch.int32)

    def attention(version, rows, threads=1):
        out = torch.full_like(q[rows], torch.nan)
        given = (out, None, q[rows], k_cache, v_cache, table[rows], None, lengths[rows], no_plan, nothing, nothing)
        call = version(*given, no_plan, 1, 1, dim**-0.5, -1, 0.0, None, False, 1.0, "NONE", 1.0, 1e4, None, None)
        if call is not None:
            call.function(call.packed, threads)
        return out

    expected = attention(decode_attention_torch, slice(None))
    together = attention(native_decode_attention, slice(None))
    close(together, expected, dtype)
    assert torch.equal(together, attention(native_decode_attention, slice(None), threads=5))
    for row in range(len(lengths)):
        for threads in (1, 3):  # a row alone is shared out by its heads, too
            assert torch.equal(together[[row]], attention(native_decode_attention, slice(row, row + 1), threads))


def sampled_by(version, logits, positions, slots, counts, recent, live):
    sampled = torch.full((len(logits),), -7)
    version(sampled, logits, positions, torch.tensor([live], dtype=torch.int32), *slots, counts, recent)
    return sampled.tolist()


def run_native_sample(*given):
    native_sample(*given)()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 15, 16, 100])
def test_the_greedy_token_is_the_first_of_the_largest(vocab, dtype, generator):
    logits = torch.randn(6, vocab, generator=generator).to(dtype)
    logits[1] = logits[1, 0]
    logits[2, vocab // 2 :] = torch.nan
    logits[3] = -torch.inf
    slots = neutral_slots(6)
    slots.sampling_flags[1] = FLAG_LOGPROBS
    expected = logits[:5].float().numpy().argmax(axis=1).tolist()
    expected[2:4] = [WITHOUT_NUMBERS, WITHOUT_FINITE]
    got = sampled_by(run_native_sample, logits, torch.zeros(6, dtype=torch.int32), slots, None, None, 5)
    assert got == [*expected, DEAD_TOKEN]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [45, 2000, 33333])
def test_a_drawn_token_is_the_torch_versions(vocab, dtype):
    """At the border of two tokens the last bit of an exponential may decide: one row in a million."""
    for seed in range(2 if vocab > 30_000 else 6):
        logits, positions, slots, *books = random_rows(12, vocab, seed)
        given = (logits.to(dtype), positions, slots, *books, 11)
        assert sampled_by(run_native_sample, *given) == sampled_by(sample_torch, *given), f"seed {seed}"


@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.3, 3.0, 40.0])
@pytest.mark.parametrize("wish", [{"top_k": 1}, {"top_k": 700}, {"top_p": 0.5}, {"top_p": 0.999, "top_k": 1500}])
def test_thresholds_are_found_in_any_range_of_values(spread, wish, generator):
    vocab, rows = 2003, 16
    logits = torch.randn(rows, vocab, generator=generator) * spread - 5.0
    logits[1, ::3] = -torch.inf
    logits[2] = (logits[2] * 2).round() / 2  # many ties
    slots = neutral_slots(rows)
    for row in range(rows):
        set_row(slots, row, temperature=0.7, seed=row, **wish)
    given = (logits, torch.arange(rows, dtype=torch.int32), slots, None, None, rows)
    assert sampled_by(run_native_sample, *given) == sampled_by(sample_torch, *given)


def test_a_draw_does_not_depend_on_company_or_threads(generator):
    rows, vocab = 7, 5000
    logits = torch.randn(rows, vocab, generator=generator) * 3
    slots = neutral_slots(rows)
    for row in range(rows):
        set_row(slots, row, temperature=1.1, top_p=0.95, top_k=400, min_p=0.01, seed=5)
    positions = torch.full((rows,), 9, dtype=torch.int32)
    logits[:] = logits[0]
    torch.set_num_threads(3)
    together = sampled_by(run_native_sample, logits, positions, slots, None, None, rows)
    torch.set_num_threads(1)
    one = SamplingSlots(*(slot[:1] for slot in slots))
    alone = sampled_by(run_native_sample, logits[:1], positions[:1], one, None, None, 1)
    assert together == alone * rows


def test_lengths_of_dead_rows_are_zero():
    kv_lens = torch.full((5,), -9, dtype=torch.int32)
    before = torch.tensor([3, 0, 2**31 - 1, 7], dtype=torch.int32)
    native_attention_plan(kv_lens, kv_lens, before, torch.tensor([2], dtype=torch.int32), *PlanSizes(1))()
    assert kv_lens.tolist() == [4, 1, 0, 0, -9]


def test_a_wrong_page_table_reaches_no_other_memory(generator):
    k_cache, v_cache = torch.randn(2, 3, 4, 1, 16, generator=generator)
    before = k_cache.clone()
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    position = torch.zeros(1, dtype=torch.int32)
    q_out, qkv, one = torch.zeros(1, 1, 16), torch.randn(1, 48, generator=generator), torch.ones(1, dtype=torch.int32)
    native_rope_append(
        q_out, k_cache, v_cache, qkv, position, position, one, table, torch.ones(4, 2, 8), None, None, EPS, *NO_SCALES
    )()
    assert torch.equal(k_cache, before)
    out, nothing = torch.zeros_like(q_out), torch.zeros(1)
    no_plan = torch.zeros(1, dtype=torch.int32)
    given = (out, None, q_out, k_cache, v_cache, table, None, one, no_plan, nothing, nothing, no_plan, 1, 1)
    native_decode_attention(*given, 0.25, -1, 0.0, None, False, 1.0, "NONE", 1.0, 1e4, None, None)()
    assert torch.equal(out[0, 0], v_cache[-1, 0, 0])  # the null page


def test_what_the_kernels_do_not_serve_is_left_to_torch():
    half = torch.zeros(2, 16, dtype=torch.float16)
    assert native_rms_norm(half, half, half[0], EPS) is None
    mixed = torch.zeros(2, 16)
    assert native_rms_norm(mixed, mixed, torch.zeros(16, dtype=torch.bfloat16), EPS) is None
    assert native_act_mul(mixed, torch.zeros(2, 64)[:, ::2], "silu") is None


def test_neighbouring_kernels_become_one_call(generator):
    x, weight = torch.randn(3, 16, generator=generator), torch.ones(16)
    outs = torch.full((4, 3, 16), torch.nan)
    other = []
    calls = [native_rms_norm(out, x * n, weight, EPS) for n, out in enumerate(outs, 1)]
    assert all(isinstance(call, NativeCall) for call in calls)
    merged = joined([calls[0], calls[1], lambda: other.append(outs[2].isnan().all()), calls[2], calls[3]])
    assert [type(call) for call in merged[::2]] == [NativeSequence, NativeSequence]
    assert len(merged) == 3
    for call in merged:
        call()
    assert not outs.isnan().any()
    assert other == [True]  # in the same order as before


def test_a_hostile_count_of_live_rows_reaches_no_row_that_is_not_there(generator):
    rows, vocab = 3, 40
    logits, slots = torch.randn(rows, vocab, generator=generator), neutral_slots(rows)
    for live, expected in ((2**31 - 1, logits.argmax(1).tolist()), (-(2**31), [DEAD_TOKEN] * rows)):
        around = torch.full((rows + 2,), -7)
        native_sample(around[1:-1], logits, slots.top_k, torch.tensor([live], dtype=torch.int32), *slots, None, None)()
        assert around.tolist() == [-7, *expected, -7]


def test_tokens_and_positions_that_cannot_be_reach_no_other_memory(generator):
    k_cache, v_cache = torch.zeros(2, 3, 4, 1, 16)
    table = torch.zeros(1, 2, dtype=torch.int32)
    rows = torch.tensor([0, 5, -1, 0, 0], dtype=torch.int32)
    positions = torch.tensor([1, 1, 1, -3, 2**31 - 1], dtype=torch.int32)
    q_out, qkv = torch.zeros(5, 1, 16), torch.randn(5, 48, generator=generator)
    live = torch.tensor([5], dtype=torch.int32)
    native_rope_append(
        q_out, k_cache, v_cache, qkv, rows, positions, live, table, torch.ones(8, 2, 8), None, None, EPS, *NO_SCALES
    )()
    written = k_cache.flatten(0, 2).any(1).nonzero().flatten().tolist()
    assert written == [1]  # the first token's place alone


@pytest.mark.parametrize("dim", [65536])
def test_no_model_is_too_large_for_the_stack(dim, generator):
    q, k_cache, v_cache = torch.randn(3, 1, 1, 1, dim, generator=generator)
    nothing, plan = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    table, one = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    out = torch.empty(1, 1, dim)
    given = (out, None, q[0], k_cache, v_cache, table, None, one, plan, nothing, nothing, plan, 1, 1)
    native_decode_attention(*given, 0.01, -1, 0.0, None, False, 1.0, "NONE", 1.0, 1e4, None, None)()
    torch.testing.assert_close(out, v_cache[0])
    ends = torch.tensor([0, 1], dtype=torch.int32)
    extended = torch.empty(1, 1, dim)
    native_extend_attention(
        extended, None, q[0], k_cache, v_cache, ends, ends, table, 0.01, -1, 0.0, None, False, 1.0, None, None
    )()
    torch.testing.assert_close(extended, v_cache[0])
    appended = torch.zeros(1, 1, dim)
    qkv, zero = torch.randn(1, 3 * dim, generator=generator), torch.zeros(1, dtype=torch.int32)
    given = (appended, k_cache, v_cache, qkv, zero, zero, one, table, torch.ones(1, 2, 8), None, None, EPS)
    native_rope_append(*given, *NO_SCALES)()
    torch.testing.assert_close(v_cache[0, 0, 0], qkv[0, 2 * dim :])


def test_a_tensor_of_another_type_than_the_kernel_reads_is_left_to_torch():
    logits, slots = torch.zeros(2, 16), neutral_slots(2)
    live = torch.tensor([2], dtype=torch.int32)
    assert native_sample(torch.zeros(2).long(), logits, slots.top_k, live, *slots, None, None) is not None
    assert native_sample(torch.zeros(2).long(), logits, slots.top_k.long(), live, *slots, None, None) is None
    assert native_sample(torch.zeros(2).long(), logits, slots.top_k, live.long(), *slots, None, None) is None
