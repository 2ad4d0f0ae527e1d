"""Products of experts whose weights stay in few bits: against float64 of what they stand for, whoever goes where."""

import pytest
import torch
from compiled_kernels import NATIVE, compiled
from quantized_weights import integer_weight, stored_weight
from test_experts import ALPHA, LIMIT, product, random, routed

from graphdecode.kernels.linear.quantized_linear import Numbers, dequantized_panels, joined_panels, quantized_panels
from graphdecode.kernels.moe.expert_linear import Routed, quantized_expert_linear, stacked_panels
from graphdecode.kernels.native import library as native
from graphdecode.linear.quantization.gguf import BLOCKS_ON_CPU, GgufBlocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXPERTS, SLOTS, NOBODYS = 6, 2, 3
WIDTH, DEPTH = 40, 512  # no whole panels, and blocks of several chunks


def experts_of(kind, is_gated, width=WIDTH, depth=DEPTH):
    """Return the panels of all experts, and what they stand for in float64, the gate first."""
    made, weights = [], []
    for expert in range(EXPERTS):
        halves = []
        for half in range(1 + is_gated):
            if kind in BLOCKS_ON_CPU:
                stored, weight = stored_weight(kind, (width, depth), seed=2 * expert + half)
                halves.append((GgufBlocks(stored, kind).panels(), weight))
            elif kind == "e4m3":
                codes = random(width, depth, seed=2 * expert + half).to(torch.float8_e4m3fn)
                scales = random(width, depth // 128, seed=90 + expert)
                held = quantized_panels(codes, 8, None, Numbers(scales))
                halves.append((held, dequantized_panels(held)[:width].double()))
            else:
                bits, zero_points = kind
                halves.append(integer_weight(bits, depth // 32, torch.float16, zero_points, (width, depth)))
        panels, values = zip(*halves, strict=True)
        made.append(joined_panels(panels, interleaved=True))
        weights.append(torch.cat(values))
    held = stacked_panels(made, EXPERTS)
    assert held is not None
    return held, torch.stack(weights)


def check(kind, gate, dtype, rows, with_bias):
    held, weight = experts_of(kind, gate != "none")
    bias = random(EXPERTS, weight.shape[1], seed=3, dtype=dtype) if with_bias else None
    wide = random(max(rows), DEPTH + 3, seed=4, dtype=dtype) / 32  # so that fp16 holds what a gate multiplies
    for count in rows:
        x, logits = wide[:count, 1:-2], random(count, EXPERTS, seed=count)
        logits[:, NOBODYS] = -9.0
        ids, _, order, offsets = routed("torch", logits, SLOTS, max(1, count - 2))
        out = torch.full((count * SLOTS, WIDTH), torch.nan, dtype=dtype)
        added = random(len(out), weight.shape[1], seed=5) / 32 if with_bias else None
        quantized_expert_linear(out, x, held, None, bias, Routed(order, offsets, SLOTS, gate, ALPHA, LIMIT, added))
        chosen = ids.view(-1)
        assert out[chosen < 0].isnan().all()
        for expert in range(EXPERTS):
            pairs = (chosen == expert).nonzero()[:, 0]
            assert expert != NOBODYS or len(pairs) == 0
            own = x[pairs // SLOTS].double()
            plain = own @ weight[expert].T + (0 if bias is None else bias[expert].double() + added[pairs])
            sizes = own.abs() @ weight[expert].abs().T  # of what is summed up: sums in float32 err by so much of it
            expected, slack = gated_of(plain, 3e-6 * sizes, gate)
            rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
            allowed = slack + rounding * expected.abs() + 1e-6
            assert ((out[pairs].double() - expected).abs() <= allowed).all(), (count, expert)


def gated_of(plain, slack, gate):
    """Return what a gate makes of a product, and of an error in it at most: by twice its derivatives, nearly."""
    if gate == "none":
        return plain, slack
    eye = torch.eye(plain.shape[1], dtype=torch.float64)
    rows = [product(row, eye, None, gate) for row in plain]
    expected = torch.stack(rows) if rows else plain.new_empty(0, plain.shape[1] // 2)
    left, up = plain.chunk(2, dim=1)
    left_slack, up_slack = slack.chunk(2, dim=1)
    return expected, 2 * (left_slack * (up.abs() + 1) + up_slack * (left.abs() + 1)) + 2e-6 * expected.abs()


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", sorted(BLOCKS_ON_CPU))
def test_no_weight_is_rounded_in_any_block_for_any_number_of_rows(kind, dtype):
    few = kind not in ("MXFP4", "Q4_K")
    check(kind, "swiglu_clamped", dtype, (1, 9, 33) if few else (*range(1, 34), 300), with_bias=True)
    check(kind, "none", dtype, (3, 70), with_bias=False)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [(4, False), (4, True), (8, False), "e4m3"], ids=str)
def test_nor_in_groups(kind, dtype):
    check(kind, "silu", dtype, (1, 20, 150), with_bias=False)
    check(kind, "none", dtype, (1, 70), with_bias=True)


@pytest.mark.parametrize("gate", ["none", "gelu_tanh"])
def test_torch_computes_the_same_without_a_compiler(gate):
    with native.switched_off():
        check("Q4_K", gate, torch.float32, (7,), with_bias=True)


@pytest.mark.parametrize("version", ["torch", NATIVE])
def test_columns_may_have_an_order_of_their_own_in_each_expert(version):
    held, weight = experts_of((4, True), is_gated=False)
    generator = torch.Generator().manual_seed(9)
    columns = torch.stack([torch.randperm(DEPTH, generator=generator) for _ in range(EXPERTS)])
    x = random(40, DEPTH, seed=4)
    ids, _, order, offsets = routed("torch", random(40, EXPERTS, seed=5), SLOTS, 40)
    outs = []
    for is_off in (version == "torch", False):
        out = torch.empty(40 * SLOTS, WIDTH)
        given = (out, x, held, columns.int(), None, Routed(order, offsets, SLOTS))
        if is_off:
            with native.switched_off():
                quantized_expert_linear(*given)
        else:
            quantized_expert_linear(*given)
        outs.append(out)
    expected = torch.stack(
        [weight[e] @ x[p // SLOTS, columns[e]].double() for p, e in enumerate(ids.view(-1).tolist())]
    )
    torch.testing.assert_close(outs[0].double(), expected, rtol=1e-4, atol=1e-3)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["MXFP4", "Q4_K"])
def test_a_rows_product_does_not_depend_on_other_rows_or_threads(kind, dtype):
    """Law 9, on a CPU."""
    held, _ = experts_of(kind, is_gated=True)
    x, logits = random(700, DEPTH, seed=4, dtype=dtype), random(700, EXPERTS, seed=5)
    results = []
    for count, share in ((700, 1), (700, 3), (1, 1), (30, 3), (150, 2)):
        torch.set_num_threads(share)
        _, _, order, offsets = routed("native", logits[:count], SLOTS, count)
        out = torch.empty(count * SLOTS, WIDTH, dtype=dtype)
        pairs = Routed(order, offsets, SLOTS, "silu")
        quantized_expert_linear(out, x[:count], held, None, None, pairs, batch_invariant=True)
        results.append(out)
    for result in results[1:]:
        assert torch.equal(results[0][: len(result)], result)


def test_experts_that_differ_in_kind_have_no_panels():
    one, other = (GgufBlocks(stored_weight(kind, (40, 512))[0], kind).panels() for kind in ("Q4_0", "IQ4_NL"))
    assert stacked_panels([one, one], 2) is not None
    assert stacked_panels([one, other], 2) is None
    assert stacked_panels([one, None], 2) is None


def test_the_operator_passes_opcheck():
    held, _ = experts_of("Q4_K", is_gated=True)
    _, _, order, offsets = routed("torch", random(3, EXPERTS), SLOTS, 3)
    given = (torch.zeros(3 * SLOTS, WIDTH), random(3, DEPTH), *held, None, None, order, offsets)
    torch.library.opcheck(
        torch.ops.graphdecode.quantized_expert_linear.default, (*given, SLOTS, "silu", 1.0, 0.0, None, False)
    )
