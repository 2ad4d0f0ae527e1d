"""Products with weights of few bits on a GPU, against float64 of what others make of the same bytes."""

import os

import pytest
import torch
from test_experts import ALPHA, LIMIT, product, random, routed
from test_fused_linear import exact as fused_exact
from test_fused_linear import gain_of, residual_of
from test_small_linear import EPS, TOLERANCE

from graphdecode.kernels.linear.code_words import CODES, from_words, to_words
from graphdecode.kernels.linear.dequantize_tiles import dequantize_tiles, dequantize_tiles_triton, dequantized_linear
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, tiled_config
from graphdecode.kernels.linear.tiled_linear import tiled_linear, tiled_linear_triton
from graphdecode.kernels.linear.weight_tiles import joined_tiles, layout_of
from graphdecode.kernels.model.embedding import tiled_embedding, tiled_embedding_triton
from graphdecode.kernels.moe.expert_linear import Routed, tiled_expert_linear, tiled_expert_linear_triton

pytest.importorskip("triton")
from interpreted_launches import early_starts
from tiled_weights import FORMATS, weight_of

from step_code.many_rows import WEIGHTS, times_bf16


def config(splits=1, block_m=16, block_n=32, pdl=False):
    return SmallLinearConfig("dot", block_n, 0, splits, num_warps=2, num_stages=2, pdl=pdl, block_m=block_m)


def launch(chosen, x, tiles, bias=None, gain=None, epilogue="store", residual=None, scale=1.0):
    """The Triton version, over workspaces that hold garbage where they may."""
    rows, out_features = x.shape[0], tiles.words.shape[1]
    width = out_features if epilogue in ("store", "add") else out_features // 2
    out = torch.full((rows, width), torch.nan, dtype=x.dtype, device=x.device)
    if residual is not None:
        out.copy_(residual)
    counters = torch.zeros(max(chosen.counters(rows, out_features), 1), dtype=torch.int32, device=x.device)
    columns = -(-out_features // chosen.block_n) * (chosen.block_n + 1)
    partial = torch.full((chosen.splits, rows, columns), torch.nan, device=x.device)
    tiled_linear_triton(out, x, tiles, bias, gain, partial, counters, EPS, epilogue, scale, chosen)
    assert not counters.any(), "the counters are not ready for the next product"
    return out


def on(device, tiles):
    return tiles._replace(
        **{name: part.to(device) for name, part in zip(tiles._fields, tiles[:4], strict=False) if part is not None}
    )


def activations(rows, columns, dtype, device):
    draw = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randn(rows, columns, generator=draw).to(dtype).to(device)


def check(out, x, weight, bias=None):
    """Sums in fp32 err by so much of what is summed up; the result is rounded once."""
    expected = x.double().cpu() @ weight.T + (0 if bias is None else bias.double().cpu())
    sizes = x.double().cpu().abs() @ weight.abs().T
    rounding = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-7}[
        out.dtype
    ]  # the interpreter cuts bf16 off
    allowed = 4e-6 * sizes + rounding * expected.abs() + 1e-6
    assert ((out.double().cpu() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("span", [16, 64])
def test_words_hold_every_code(code, span):
    kind = CODES[code]
    columns = 16 * span
    codes = torch.randint(0, 1 << kind.bits, (5, columns), generator=torch.Generator().manual_seed(1)).byte()
    words, high = to_words(codes, code, span)
    assert torch.equal(from_words(words, high, code), codes)
    held = words.nbytes + (0 if high is None else high.nbytes)
    assert held == codes.numel() * kind.bits // 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_no_weight_is_rounded(name, dtype, device):
    """Rows and columns that blocks do not divide; columns split in two, and rows in tiles of eight."""
    tiles, weight = weight_of(name, 50, 450)
    x = activations(11, weight.shape[1], dtype, device)
    bias = activations(1, 50, dtype, device)[0]
    check(launch(config(2, block_m=8, block_n=64), x, on(device, tiles), bias), x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_rows_are_the_values_rounded_once(name, dtype, device):
    """Some rows of the weight, whose number and columns blocks do not divide; nothing is written behind them."""
    tiles, weight = weight_of(name, 50, 450)
    rows, columns = 37, weight.shape[1]
    out = torch.full((rows * columns + 8,), torch.nan, dtype=dtype, device=device)
    dequantize_tiles_triton(out[: rows * columns].view(rows, columns), on(device, tiles), 11)
    assert out[rows * columns :].isnan().all()
    expected = weight[11 : 11 + rows].to(device)
    wide = out[: rows * columns].view(rows, columns).double()
    rounding = 2**-11 if dtype == torch.float16 else 2**-7  # the interpreter cuts bf16 off
    sizes = weight.abs().max(dim=1, keepdim=True).values[11 : 11 + rows].to(device)
    assert ((wide - expected).abs() <= rounding * expected.abs() + 2**-23 * sizes + 2**-25).all()
    plain = torch.empty(rows, columns, dtype=dtype)
    dequantize_tiles(plain, tiles, 11)
    torch.testing.assert_close(plain.double(), expected.cpu(), rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("held_rows", [1, 13, 50])
def test_a_product_over_a_dequantized_weight_comes_in_parts_that_scratch_holds(held_rows):
    tiles, weight = weight_of("int4 by 128 with zeros", 50, 450)
    columns = weight.shape[1]
    x, bias = activations(70, columns, torch.bfloat16, "cpu"), activations(1, 50, torch.bfloat16, "cpu")[0]
    scratch = torch.full((held_rows * columns,), torch.nan, dtype=torch.bfloat16)
    out = torch.full((70, 64), torch.nan, dtype=torch.bfloat16)
    dequantized_linear(out[:, :50], x, tiles, bias, scratch)
    check(out[:, :50].contiguous(), x, weight.bfloat16().double(), bias)
    assert out[:, 50:].isnan().all()


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 33, 64])
@pytest.mark.parametrize("name", ["int8", "int4 by 128 with zeros", "Q4_K", "Q6_K", "Q8_0"])
def test_any_number_of_rows(name, rows, device):
    tiles, weight = weight_of(name, 40, 256)
    block_m = next(most for most in (8, 16, 32, 64) if rows <= most)
    x = activations(rows, weight.shape[1], torch.bfloat16, device)
    check(launch(config(1 + rows % 2, block_m), x, on(device, tiles)), x, weight)


@pytest.mark.parametrize("name", ["int8", "Q4_0", "Q5_1", "Q6_K", "MXFP4"])
@pytest.mark.parametrize("epilogue", ["store", "add", "silu"])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_norm_and_an_epilogue_are_those_of_the_formulas(name, epilogue, splits, device):
    tiles, weight = weight_of(name, 48, 300)
    x = activations(5, weight.shape[1], torch.float16, device) * 3
    gain, residual = gain_of(x), residual_of(x, 48)
    given = residual if epilogue == "add" else None
    out = launch(config(splits), x, on(device, tiles), None, gain, epilogue, given, 0.5)
    scale = weight.abs().mean()
    expected = fused_exact(x, weight.to(device), None, gain, epilogue, residual, 0.5)
    tolerance = 4 * TOLERANCE[torch.float16]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * max(1.0, 20 * float(scale)))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", ["int8", "Q4_1", "Q5_K"])
def test_a_row_has_the_bits_that_it_has_alone_beside_any_other(name, splits, device):
    """Laws: padding is inert, only the speed changes."""
    tiles, weight = weight_of(name, 40, 512)
    tiles = on(device, tiles)
    x = activations(9, weight.shape[1], torch.float16, device)
    gain = gain_of(x)
    together = launch(config(splits), x, tiles, None, gain)
    alone = launch(config(splits, block_m=8), x[-1:], tiles, None, gain)
    assert torch.equal(alone[0], together[-1])
    x[:-1] = torch.nan
    assert torch.equal(launch(config(splits), x, tiles, None, gain)[-1], alone[0])


@pytest.mark.parametrize("name", FORMATS)
def test_the_torch_version_is_the_product(name):
    tiles, weight = weight_of(name, 50, 700)
    x = activations(3, weight.shape[1], torch.float32, "cpu")
    out = torch.full((3, 50), torch.nan)
    tiled_linear(out, x, tiles, None, None, config())
    check(out, x, weight)


def test_the_operator_passes_opcheck(device):
    tiles, _ = weight_of("Q4_1", 50, 256)
    tiles = on(device, tiles)
    x, out = activations(2, 256, torch.float32, device), torch.zeros(2, 50, device=device)
    partial, counters = torch.zeros(2, 2, 2 * 33, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    given = (out, x, *tiles, None, None, partial, counters, 0.0, "store", 1.0, *config(2))
    torch.library.opcheck(torch.ops.graphdecode.tiled_linear.default, given)


def test_too_few_counters_are_refused():
    tiles, _ = weight_of("Q8_0", 50, 256)
    with pytest.raises(ValueError, match="counters holds 0; 2 are needed"):
        tiled_linear(torch.zeros(1, 50), torch.zeros(1, 256), tiles, None, None, config(2))


@pytest.mark.parametrize("name", ["int4 by 32", "Q5_K", "Q6_K", "Q8_0"])
def test_tiles_hold_no_more_bytes_than_what_they_are_made_of(name):
    tiles, weight = weight_of(name, 64, 512)
    held = sum(part.nbytes for part in tiles[:4] if part is not None)
    bits = {"int4 by 32": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "Q8_0": 8.5}[name]
    assert held * 8 == bits * weight.numel()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="an early start is early in the interpreter")
@pytest.mark.parametrize("name", ["int8", "Q4_K"])
def test_products_that_begin_early_one_after_another_are_the_products(name, strict_launches):
    """Each reads what the one before it writes, and asks for its weight before that one has begun."""
    tiles = [weight_of(name, 256, 256) for _ in range(2)]
    x = activations(2, 256, torch.float32, "cpu")
    outs = [torch.full((2, 256), torch.nan) for _ in tiles]
    counters, chosen = torch.zeros(64, dtype=torch.int32), config(2, block_n=128, pdl=True)
    partials = [torch.full((2, 2, 2 * 129), torch.nan) for _ in tiles]
    with early_starts(strict_launches):
        for given, (weight, _), out, partial in zip([x, *outs], tiles, outs, partials, strict=False):
            tiled_linear_triton(out, given, weight, None, None, partial, counters, EPS, "store", 1.0, chosen)
    expected = x.double() @ tiles[0][1].T @ tiles[1][1].T
    torch.testing.assert_close(outs[1].double(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("has_totals", [False, True])
@pytest.mark.parametrize("rows", [None, 1, 8, 9, 33, 64, 2048])
def test_every_program_has_work(rows, has_totals):
    layout = layout_of("u4", 32, "least" if has_totals else "none")
    for out_features, columns in ((4096, 4096), (128256, 4096), (64, 256), (1024, 14336)):
        for is_normed in (False, True):
            chosen = tiled_config(rows, out_features, columns, layout, 132, True, is_normed)
            assert chosen.splits <= columns // layout.step
            assert chosen.block_m <= (32 if has_totals else 64)
            assert chosen.counters(min(rows or 512, 512), out_features) <= 1 << 16


def test_tiles_have_fewer_rows_where_a_gpu_has_no_room_for_more():
    def most(major, *kind):
        return tiled_config(64, 4096, 4096, layout_of(*kind), 132, major=major).block_m

    assert [most(major, "s4", 32) for major in (8, 9, 10, 12)] == [64, 64, 32, 32]
    assert [most(major, "s8", 0) for major in (8, 9, 10, 12)] == [64] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize(
    "name", ["int8", "int4 by 128 with zeros", "fp8 by 128", "fp4", "Q4_K", "Q5_K", "Q6_K", "Q8_0"]
)
def test_replays_give_the_bits_of_eager_runs(name, rows):
    """Law: replay is eager. Many programs race for the last place here."""
    tiles, weight = weight_of(name, 2048, 1024)
    tiles = on("cuda", tiles)
    x = activations(rows, 1024, torch.bfloat16, "cuda")
    major = torch.cuda.get_device_capability()[0]
    chosen = tiled_config(rows, 2048, 1024, tiles.layout, 132, major >= 9, major=major)
    counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
    outs = [torch.zeros(rows, 2048, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    tiled_linear(outs[0], x, tiles, None, counters, chosen)
    check(outs[0], x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs[1:]:
            tiled_linear(out, x, tiles, None, counters, chosen)
    for _ in range(100):
        graph.replay()
        assert all(torch.equal(out, outs[0]) for out in outs[1:])
    assert not counters.any()


IDS = [3, 49, 0, -1, 50, 1 << 40, 7, 9]  # three that no row has
LIVE_IDS = 7
READ_ROWS = [3, 49, 0, 0, 0, 0, 7, 0]


def expected_rows(weight, hidden, dtype, scale):
    return (weight[READ_ROWS, :hidden].to(dtype).float() * scale).to(dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_dequantized_as_they_are_gathered(name, device):
    tiles, weight = weight_of(name, 50, 300)
    tokens, live = torch.tensor(IDS, device=device), torch.tensor([LIVE_IDS], dtype=torch.int32, device=device)
    out = torch.full((len(IDS), 290), torch.nan, device=device)
    tiles = on(device, tiles)
    tiled_embedding_triton(out, tokens, tiles, live, 3.0)
    torch.testing.assert_close(out.cpu(), expected_rows(weight, 290, torch.float32, 3.0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["int8", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_torch_version_gathers_the_same(name, dtype):
    tiles, weight = weight_of(name, 50, 300)
    out = torch.full((len(IDS), 290), torch.nan, dtype=dtype)
    tiled_embedding(out, torch.tensor(IDS), tiles, torch.tensor([LIVE_IDS], dtype=torch.int32), 1.5)
    torch.testing.assert_close(out, expected_rows(weight, 290, dtype, 1.5), rtol=1e-6, atol=1e-7)


EXPERTS, SLOTS, NOBODYS = 4, 2, 2
KINDS = ["fp4", "MXFP4", "int4 by 128", "int4 by 64 with zeros", "int8", "fp8 by 128", "Q4_0", "Q8_0", "Q4_K", "Q6_K"]
CASES = [(name, *case) for name in KINDS for case in (("none", 8), ("swiglu_clamped", 16))]
CASES += [("Q4_0", "swiglu_clamped", 32), ("Q4_K", "swiglu_clamped", 8), ("int8", "none", 64)]


def experts_of(name, width, depth):
    """Return the tiles of all experts and their values in float64; of the one where nobody goes they are no numbers."""
    made = [weight_of(name, width + expert, depth) for expert in range(EXPERTS)]  # seeded by their sizes
    rows = [(tiles._replace(words=tiles.words[:, :width]), weight[:width]) for tiles, weight in made]
    parts = [
        tiles._replace(
            high=None if tiles.high is None else tiles.high[:, :width],
            scales=tiles.scales[:, :width] if tiles.scales.shape[1] > 1 else tiles.scales,
            seconds=None if tiles.seconds is None else tiles.seconds[:, :width],
        )
        for tiles, _ in rows
    ]
    return joined_tiles(parts), torch.stack([weight for _, weight in rows])


@pytest.mark.parametrize(("name", "gate", "block_m"), CASES)
def test_an_experts_product_is_that_of_its_values(name, gate, block_m, device):
    halves, width, depth, rows = 1 + (gate != "none"), 20, 300, 7
    config = SmallLinearConfig("dot", 32, 0, 1, num_warps=2, num_stages=2, pdl=False, block_m=block_m)
    tiles, weight = experts_of(name, width * halves, depth)
    depth = weight.shape[2]  # whole blocks
    bias = random(EXPERTS, width * halves, seed=3)
    x = random(rows, depth + 3, seed=4)[:, 1:-2]
    logits = random(rows, EXPERTS, seed=5)
    logits[:, NOBODYS] = -9.0
    ids, _, order, offsets = routed("torch", logits, SLOTS, rows - 1)
    outs = [torch.full((rows * SLOTS, width), torch.nan, device=device) for _ in range(2)]
    moved = on(device, tiles)
    added = random(rows * SLOTS, width * halves, seed=6)
    pairs = Routed(order.to(device), offsets.to(device), SLOTS, gate, ALPHA, LIMIT, added.to(device))
    for version, out in zip((tiled_expert_linear_triton, tiled_expert_linear), outs, strict=True):
        version(out, x.to(device), moved, bias.to(device), pairs, config)
    chosen = ids.view(-1).tolist()
    assert NOBODYS not in chosen
    for out in outs:
        for pair, expert in enumerate(chosen):
            if expert < 0:
                assert out[pair].isnan().all()
                continue
            expected = product(x[pair // SLOTS], weight[expert], bias[expert] + added[pair], gate)
            torch.testing.assert_close(out[pair].double().cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", WEIGHTS)
def test_by_the_model_many_rows_cost_at_most_a_tenth_more_than_in_bf16(name):
    assert times_bf16(name, 4096)["dequantized"] <= 1.1
    for rows in (128, 512, 2048):
        modelled = times_bf16(name, rows)
        assert modelled["dequantized"] < modelled["tiles"]
