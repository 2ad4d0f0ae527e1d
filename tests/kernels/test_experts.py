"""Mixtures of experts: routing, the experts' products and their sum, each version against float64."""

import math

import pytest
import torch
from compiled_kernels import NATIVE, compiled

from graphdecode.kernels.moe.expert_linear import GATES, Routed, expert_linear, expert_panels
from graphdecode.kernels.moe.moe_route import moe_combine, moe_route
from graphdecode.kernels.native.registration import versions

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ALPHA, LIMIT = 1.702, 2.0
VERSIONS = ["torch", "triton", NATIVE]


def run(version, name, *arguments):
    """Run one version of an operator on tensors of the CPU; Triton's on copies where there is a GPU."""
    if version == "native":
        call = versions(name).native(*arguments)
        assert call is not None
        call()
    elif version == "triton" and torch.cuda.is_available():
        given = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
        versions(name).triton(*given)
        for argument, result in zip(arguments, given, strict=True):
            if isinstance(argument, torch.Tensor):
                argument.copy_(result)
    else:
        getattr(versions(name), version)(*arguments)


def routed(version, logits, slots, live, renormalize=True):
    """Return ids, weights, order and offsets, whatever nobody writes being hostile."""
    rows, experts = logits.shape
    ids = torch.full((rows, slots), 2**30, dtype=torch.int32)
    weights = torch.full((rows, slots), torch.nan)
    order = torch.full((rows * slots,), 2**30, dtype=torch.int32)
    offsets = torch.full((experts + 1,), 2**30, dtype=torch.int32)
    alive = torch.tensor([live], dtype=torch.int32)
    run(version, "moe_route", ids, weights, order, offsets, logits, alive, renormalize)
    return ids, weights, order, offsets


def random(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("rows", "experts", "slots"), [(1, 4, 1), (7, 5, 5), (9, 60, 4), (40, 33, 8)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_each_row_goes_to_its_largest_logits_with_their_shares(version, rows, experts, slots, renormalize):
    wide = random(rows, experts + 3) * 3
    logits = wide[:, 1:-2]
    ids, weights, order, offsets = routed(version, logits, slots, rows, renormalize)
    shares = torch.softmax(logits.double(), 1)
    expected = shares.topk(slots)
    assert torch.equal(ids.long(), expected.indices)
    values = expected.values / expected.values.sum(1, keepdim=True) if renormalize else expected.values
    torch.testing.assert_close(weights.double(), values, rtol=1e-5, atol=1e-6)
    assert offsets[0] == 0
    assert offsets[-1] == rows * slots
    for expert in range(experts):
        pairs = order[offsets[expert] : offsets[expert + 1]]
        assert pairs.tolist() == [pair for pair in range(rows * slots) if ids.view(-1)[pair] == expert]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dead_rows_choose_nobody_and_equal_or_impossible_logits_still_choose_each_expert_once(version, dtype):
    logits = torch.zeros(6, 4, dtype=dtype)
    logits[1] = torch.tensor([-math.inf, 1.0, -math.inf, 1.0])
    logits[2] = torch.nan
    logits[3] = torch.tensor([math.nan, -5.0, 0.0, 0.0])
    logits[4:] = torch.nan
    ids, weights, order, offsets = routed(version, logits, 3, 4)
    assert ids.tolist() == [[0, 1, 2], [1, 3, 0], [0, 1, 2], [2, 3, 1], [-1] * 3, [-1] * 3]
    torch.testing.assert_close(weights[0], torch.full((3,), 1 / 3))
    torch.testing.assert_close(weights[1], torch.tensor([0.5, 0.5, 0.0]))
    assert (weights[4:] == 0).all()
    assert offsets.tolist() == [0, 3, 7, 10, 12]
    assert sorted(order[:12].tolist()) == list(range(12))
    assert (order[12:] == 2**30).all()


def product(x, weight, bias, gate):
    """One row's product with one expert in float64."""
    y = weight.double() @ x.double() + (0 if bias is None else bias.double())
    if gate == "none":
        return y
    left, up = y.chunk(2)
    if gate == "swiglu_clamped":
        left, up = left.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return left / (1 + torch.exp(-ALPHA * left)) * (up + 1)
    if gate == "silu":
        return left / (1 + torch.exp(-left)) * up
    if gate == "gelu":
        return left * 0.5 * (1 + torch.erf(left / math.sqrt(2))) * up
    return 0.5 * left * (1 + torch.tanh(math.sqrt(2 / math.pi) * (left + 0.044715 * left**3))) * up


def packed(version, weight, gate):
    if version != "native":
        return weight
    return torch.cat([expert_panels(own, gate != "none") for own in weight])


@pytest.mark.parametrize("version", [*VERSIONS, "panels"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("dtype", "with_bias", "rows", "depth", "width"),
    [
        (torch.float32, True, 5, 70, 40),
        (torch.float32, False, 23, 64, 32),
        (torch.bfloat16, True, 5, 71, 40),
        (torch.bfloat16, True, 130, 64, 40),  # in matrix tiles, where there are some
        (torch.float16, True, 5, 71, 40),
    ],
)
def test_an_experts_product_is_the_formula_for_its_pairs_and_nothing_else_is_written(
    version, gate, dtype, with_bias, rows, depth, width
):
    check_product(version, gate, dtype, with_bias, rows, depth, width)


def check_product(version, gate, dtype, with_bias, rows, depth, width):
    experts, slots = 6, 2
    halves = 1 if gate == "none" else 2
    weight = random(experts, width * halves, depth, seed=2, dtype=dtype) / 6
    bias = random(experts, width * halves, seed=3, dtype=dtype) if with_bias else None
    x = random(rows, depth + 3, seed=4, dtype=dtype)[:, 1:-2]
    logits = random(rows, experts, seed=5)
    logits[:, 3] = -9.0  # nobody goes there
    weight[3] = torch.nan
    added = random(rows * slots, width * halves, seed=6) if with_bias else None
    ids, _, order, offsets = routed("torch", logits, slots, rows - 2)
    out = torch.full((rows * slots, width), torch.nan, dtype=dtype)
    if version == "panels":  # the panels' meaning in torch, where there is no compiler
        version, own = "torch", packed("native", weight, gate)
    else:
        own = packed(version, weight, gate)
    run(version, "expert_linear", out, x, own, bias, order, offsets, slots, gate, ALPHA, LIMIT, added, False)
    for pair, expert in enumerate(ids.view(-1).tolist()):
        if expert < 0:
            assert out[pair].isnan().all()
            continue
        beside = None if bias is None else bias[expert].double() + added[pair]
        expected = product(x[pair // slots], weight[expert], beside, gate)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out[pair].double(), expected, rtol=tolerance, atol=tolerance)


@compiled
@pytest.mark.parametrize(
    ("dtype", "depth"), [(torch.float32, 65), (torch.bfloat16, 65), (torch.bfloat16, 64), (torch.float16, 65)]
)
def test_a_rows_product_does_not_depend_on_other_rows_or_threads(dtype, depth):
    """Law 9, on a CPU."""
    experts, slots, rows, width = 4, 2, 90, 100
    weight = packed("native", random(experts, 2 * width, depth, seed=2, dtype=dtype), "silu")
    x, logits = random(rows, depth, seed=4, dtype=dtype), random(rows, experts, seed=5)
    results = []
    for count, share in ((rows, 1), (rows, 3), (1, 1), (9, 3)):
        torch.set_num_threads(share)
        _, _, order, offsets = routed("native", logits[:count], slots, count)
        out = torch.empty(count * slots, width, dtype=dtype)
        given = x[:count].clone()
        given[1:] = given[1:] if count == rows else torch.nan
        expert_linear(out, given, weight, None, Routed(order, offsets, slots, "silu"))
        results.append(out[:slots])
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_gate", [False, True])
def test_a_row_is_the_weighted_sum_of_its_parts(version, dtype, with_gate):
    rows, slots, hidden = 4, 3, 150
    parts, shared = random(rows * slots, hidden, dtype=dtype), random(rows, hidden, seed=2, dtype=dtype)
    weights, logits = random(rows, slots, seed=3).softmax(1), random(rows, 9, seed=4, dtype=dtype)
    ids = torch.zeros(rows, slots, dtype=torch.int32)
    ids[3] = -1
    parts[9:] = torch.nan
    weights[3] = 0.0
    gate = logits[:, 8:] if with_gate else None
    out = shared.clone() if with_gate else torch.full((rows, hidden), torch.nan, dtype=dtype)
    run(version, "moe_combine", out, parts, ids, weights, gate)
    parts[9:] = 0.0
    expected = (parts.double().view(rows, slots, hidden) * weights.double()[:, :, None]).sum(1)
    if with_gate:
        expected += shared.double() / (1 + torch.exp(-logits[:, 8:].double()))
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("gate", ["silu", "none"])
@pytest.mark.parametrize("rows", [33, 130])
def test_many_pairs_take_larger_tiles_and_agree_with_the_smallest(device, rows, gate):
    """Triton's tiles; in the interpreter both run."""
    experts, slots, width = 2, 2, 16 if gate == "silu" else 32
    weight = random(experts, 32, 16, dtype=torch.float16).to(device)
    x = random(rows, 16, dtype=torch.float16).to(device)
    _, _, order, offsets = (t.to(device) for t in routed("torch", random(rows, experts, seed=5), slots, rows))
    given = (x, weight, None, order, offsets, slots, gate, 1.0, 0.0, None)
    outs = [torch.full((rows * slots, width), torch.nan, dtype=torch.float16, device=device) for _ in range(2)]
    for out, is_invariant in zip(outs, (False, True), strict=True):
        versions("expert_linear").triton(out, *given, is_invariant)
    torch.testing.assert_close(*outs, rtol=2e-3, atol=2e-3)


def test_an_unknown_gate_is_refused():
    none = torch.zeros(0)
    with pytest.raises(ValueError, match="gate is 'relu'; it must be one of none, silu"):
        expert_linear(none, none, none, None, Routed(none, none, 1, "relu"))


def test_the_operators_pass_opcheck(device):
    rows, slots, experts = 3, 2, 4
    ids, order = (torch.zeros(size, dtype=torch.int32, device=device) for size in ((rows, slots), rows * slots))
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=device)
    weights, logits = torch.zeros(rows, slots, device=device), random(rows, experts).to(device)
    live = torch.tensor([2], dtype=torch.int32, device=device)
    route = (ids, weights, order, offsets, logits, live, True)
    torch.library.opcheck(torch.ops.graphdecode.moe_route.default, route)
    moe_route(*route)
    out, x = torch.zeros(rows * slots, 8, device=device), random(rows, 16).to(device)
    weight = random(experts, 16, 16).to(device)
    given = (out, x, weight, None, order, offsets, slots, "silu", 1.0, 0.0, None, False)
    torch.library.opcheck(torch.ops.graphdecode.expert_linear.default, given)
    combined = (torch.zeros(rows, 8, device=device), out, ids, weights, None)
    torch.library.opcheck(torch.ops.graphdecode.moe_combine.default, combined)
    moe_combine(*combined)
