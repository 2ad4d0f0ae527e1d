"""The product of a few rows: both kernels against float64, and what a batch-invariant step relies on."""

import os

import numpy as np
import pytest
import torch

from graphdecode.kernels.linear import small_linear as kernels
from graphdecode.kernels.linear import small_linear as module
from graphdecode.kernels.linear.small_linear import (
    GEMV_ROWS,
    SmallLinearConfig,
    candidates,
    fixed_config,
    small_linear,
    small_linear_triton,
)
from graphdecode.kernels.native.registration import versions

small_linear_torch = versions("small_linear").torch

pytest.importorskip("triton")
interpreted = os.environ.get("TRITON_INTERPRET") == "1"
ROWS = [1, 2, 3, 4, 5, 8, 16, 33]
EPS = 1e-5
SHAPES = [(64, 256), (50, 130), (7, 33)]  # out_features, in_features: the blocks divide the first alone
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def config(kind="dot", splits=1, pdl=False, block_n=32, block_k=64):
    return SmallLinearConfig(kind, block_n, block_k, splits, num_warps=4, num_stages=2, pdl=pdl)


def inputs(rows, out_features, in_features, dtype, where, with_bias=True):
    generator = torch.Generator().manual_seed(rows * 1000 + in_features)
    x = torch.randn(rows, in_features, generator=generator).to(dtype).to(where)
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(dtype).to(where)
    bias = torch.randn(out_features, generator=generator).to(dtype).to(where) if with_bias else None
    return x, weight, bias


def launch(chosen, x, weight, bias, counters=None, gain=None, epilogue="store", residual=None, scale=1.0):
    """The Triton version, over workspaces that hold garbage where they may."""
    rows, out_features = x.shape[0], weight.shape[0]
    width = out_features if epilogue in ("store", "add") else out_features // 2
    out = torch.full((rows, width), torch.nan, dtype=x.dtype, device=x.device)
    if residual is not None:
        out.copy_(residual)
    if counters is None:
        counters = torch.zeros(max(chosen.counters(rows, out_features), 1), dtype=torch.int32, device=x.device)
    columns = -(-out_features // chosen.block_n) * (chosen.block_n + 1)
    partial = torch.full((chosen.splits, rows, columns), torch.nan, device=x.device)
    small_linear_triton(out, x, weight, bias, gain, partial, counters, EPS, epilogue, scale, chosen)
    assert not counters.any(), "the counters are not ready for the next product"
    return out


def exact(x, weight, bias):
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("rows", ROWS)
def test_the_dot_kernel_is_the_product(rows, splits, out_features, in_features, dtype, device):
    x, weight, bias = inputs(rows, out_features, in_features, dtype, device, with_bias=splits == 3)
    out = launch(config("dot", splits), x, weight, bias)
    torch.testing.assert_close(out.double(), exact(x, weight, bias), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("rows", range(1, GEMV_ROWS + 1))
def test_the_gemv_kernel_is_the_product(rows, splits, out_features, in_features, dtype, device):
    x, weight, bias = inputs(rows, out_features, in_features, dtype, device, with_bias=splits == 3)
    out = launch(config("gemv", splits, block_n=8), x, weight, bias)
    torch.testing.assert_close(out.double(), exact(x, weight, bias), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("rows", ROWS[1:])
def test_a_row_has_the_bits_that_it_has_alone(rows, splits, device):
    x, weight, bias = inputs(rows, 50, 130, torch.float16, device)
    together = launch(config("dot", splits), x, weight, bias)
    for row in range(rows):
        alone = launch(config("dot", splits), x[row : row + 1], weight, bias)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(("kind", "rows"), [("dot", 4), ("gemv", 2)])
def test_a_hostile_row_changes_no_other(kind, rows, device):
    """Law: padding is inert."""
    x, weight, bias = inputs(rows, 50, 130, torch.float32, device)
    calm = launch(config(kind, 2), x, weight, bias)
    x[1] = torch.nan
    hostile = launch(config(kind, 2), x, weight, bias)
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(calm[others], hostile[others])
    assert hostile[1].isnan().all()


@pytest.mark.parametrize("kind", ["dot", "gemv"])
def test_rows_of_the_input_may_be_strided(kind, device):
    x, weight, bias = inputs(2, 50, 300, torch.float32, device)
    weight = weight[:, :130].contiguous()
    out = launch(config(kind, 2), x[:, 20:150], weight, bias)
    torch.testing.assert_close(out.double(), exact(x[:, 20:150], weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_a_grid_holds_any_vocabulary(rows, vocab, monkeypatch):
    """A grid has up to 2^31 - 1 programs along its first axis, and 65,535 along the others."""
    grids = []

    class Noting:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_arguments, **_options: None

    for name in ("dot_linear_kernel", "gemv_linear_kernel"):
        monkeypatch.setattr(module, name, Noting())
    x, weight = (torch.empty(count, 2048, dtype=torch.bfloat16, device="meta") for count in (rows, vocab))
    chosen = candidates(vocab, 2048, 2, rows, 132)
    for one in chosen:
        small_linear_triton(x.new_empty(rows, vocab), x, weight, None, None, None, None, 0.0, "store", 1.0, one)
    assert len(grids) == len(chosen) >= 1
    assert all(first < 2**31 and max(others, default=1) <= 65_535 for first, *others in grids), grids


def test_products_share_their_counters(device):
    counters = torch.zeros(64, dtype=torch.int32, device=device)
    for rows, out_features, in_features in ((1, 64, 256), (16, 50, 130), (33, 64, 130)):
        x, weight, bias = inputs(rows, out_features, in_features, torch.float32, device)
        out = launch(config("dot", 2), x, weight, bias, counters)
        torch.testing.assert_close(out.double(), exact(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not interpreted, reason="watches the order of loads in the interpreter")
@pytest.mark.parametrize("kind", ["dot", "gemv"])
@pytest.mark.parametrize("splits", [1, 2])
def test_an_early_start_waits_before_it_reads_activations(kind, splits, monkeypatch):
    """The kernel before it may still be writing `x`: here it writes when it is waited for. The weight is asked for."""
    x, weight, bias = inputs(2, 64, 256, torch.float32, "cpu")
    ready = x.clone()
    x.fill_(torch.nan)
    calls, lines = [], []

    class Gdc:
        @staticmethod
        def gdc_wait():
            calls.append("wait")
            x.copy_(ready)

        @staticmethod
        def gdc_launch_dependents():
            calls.append("launch")

    monkeypatch.setattr(kernels.tl.extra, "cuda", Gdc, raising=False)

    def prefetch(places, is_wanted):
        calls.append("prefetch")
        wanted = np.broadcast_to(is_wanted.handle.data.astype(bool), places.handle.data.shape)
        lines.extend((places.handle.data[wanted] - weight.data_ptr()) // 128)

    monkeypatch.setattr(kernels, "prefetch", prefetch)
    pdl_config = config(kind, splits, pdl=True)
    out = launch(pdl_config, x, weight, bias)
    torch.testing.assert_close(out.double(), exact(ready, weight, bias), rtol=1e-5, atol=1e-5)
    assert sorted(lines) == list(range(weight.nbytes // 128)), "each line of the weight is asked for once"
    blocks = 64 // pdl_config.block_n
    assert calls == ["prefetch", "wait", "launch"] * (blocks * splits), "each program waits once, whatever it does"
    assert torch.equal(out, launch(config(kind, splits), ready, weight, bias))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_torch_version_is_the_product(rows, with_bias):
    x, weight, bias = inputs(rows, 50, 130, torch.float32, "cpu", with_bias)
    out = torch.full((rows, 50), torch.nan)
    small_linear_torch(out, x, weight, bias, None, None, None, 0.0, "store", 1.0, *config())
    torch.testing.assert_close(out.double(), exact(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 128), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (9, 7)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_candidate_gives_each_program_work(shape, itemsize):
    for rows, is_normed in ((1, False), (1, True), (GEMV_ROWS, False), (16, True)):
        found = candidates(*shape, itemsize, rows, 132, is_normed)
        assert len(set(found)) == len(found) >= 2
        assert {chosen.kind for chosen in found} == ({"dot", "gemv"} if rows <= GEMV_ROWS else {"dot"})
        for chosen in [*found, fixed_config(*shape, itemsize)]:
            tiles = -(-shape[1] // chosen.block_k)
            assert tiles >= chosen.splits
            assert chosen.kind == "dot" or not is_normed or chosen.block_n >= 16
            if shape[0] >= 2048 and chosen in found:
                assert -(-shape[0] // chosen.block_n) * chosen.splits >= 116, "multiprocessors stand idle"
            assert chosen.counters(512, shape[0]) <= 1 << 16


@pytest.mark.parametrize(
    ("rows", "changes", "counters", "match"),
    [
        (3, {"kind": "gemv"}, 8, r"x has 3 rows; .* 1\.\.2"),
        (2, {"kind": "gem"}, 8, "config.kind is 'gem'"),
        (33, {"splits": 2}, 5, "counters holds 5; 6"),
        (1, {"splits": 2}, None, "counters holds 0; 2"),
    ],
)
def test_invalid_rows_kinds_and_counters_are_refused(rows, changes, counters, match):
    x, weight, bias = inputs(rows, 50, 130, torch.float32, "cpu")
    held = None if counters is None else torch.zeros(counters, dtype=torch.int32)
    out = torch.zeros(rows, 50)
    with pytest.raises(ValueError, match=match):
        small_linear(out, x, weight, bias, held, config(**changes))
    assert not out.any()


@pytest.mark.parametrize("splits", [1, 2])
def test_the_operator_passes_opcheck(splits, device):
    x, weight, bias = inputs(2, 50, 130, torch.float32, device)
    out = torch.zeros(2, 50, device=device)
    partial = torch.zeros(splits, 2, 2 * 33, device=device) if splits > 1 else None
    counters = torch.zeros(2, dtype=torch.int32, device=device) if splits > 1 else None
    arguments = (out, x, weight, bias, None, partial, counters, 0.0, "store", 1.0, *config(splits=splits))
    torch.library.opcheck(torch.ops.graphdecode.small_linear.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("kind", "rows"), [("dot", 1), ("dot", 16), ("gemv", 1), ("gemv", 2)])
def test_replays_give_the_bits_of_eager_runs(kind, rows, pdl):
    """Law: replay is eager. Many programs race for the last place here."""
    if pdl and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs sm_90")
    x, weight, bias = inputs(rows, 4096, 2048, torch.bfloat16, "cuda")
    chosen = config(kind, 8, pdl, block_n=32 if kind == "dot" else 4, block_k=128)
    counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
    outs = [torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    small_linear(outs[0], x, weight, bias, counters, chosen)
    torch.testing.assert_close(outs[0].double(), exact(x, weight, bias), rtol=1.6e-2, atol=1.6e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs[1:]:
            small_linear(out, x, weight, bias, counters, chosen)
    for _ in range(100):
        graph.replay()
        assert all(torch.equal(out, outs[0]) for out in outs[1:])
    assert not counters.any()
