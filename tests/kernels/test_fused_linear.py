"""What a product takes into its launch: the norm before it, the gate or the sum behind it, against float64."""

import math

import pytest
import torch
from covering import pairwise
from test_small_linear import EPS, TOLERANCE, config, inputs, launch

from graphdecode.kernels.linear.small_linear import GEMV_ROWS, small_linear
from graphdecode.kernels.native.registration import versions

pytest.importorskip("triton")
small_linear_torch = versions("small_linear").torch
SHAPES = [(64, 256), (50, 130)]  # out_features, in_features: the blocks divide the first alone
EPILOGUES = ["store", "add", "silu", "gelu_tanh", "gelu"]
KINDS = [("dot", 1), ("dot", 3), ("dot", 16), ("dot", 33), ("dot", 64), ("gemv", 1), ("gemv", 2)]


def gain_of(x):
    generator = torch.Generator().manual_seed(x.shape[1])
    return (torch.rand(x.shape[1], generator=generator) * 2 + 0.1).to(x.device)


def residual_of(x, out_features):
    generator = torch.Generator().manual_seed(out_features)
    return torch.randn(x.shape[0], out_features, generator=generator).to(x)


def activation(gate, name):
    if name == "silu":
        return gate / (1 + torch.exp(-gate))
    if name == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    return gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))


def exact(x, weight, bias, gain, epilogue, residual, scale):
    """The same in float64, in the order of the formulas."""
    wide = x.double()
    if gain is not None:
        wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * gain.double()
    product = wide @ weight.double().T + (0 if bias is None else bias.double())
    if epilogue == "store":
        return product
    if epilogue == "add":
        return residual.double() + scale * product
    gate, up = product.chunk(2, dim=-1)
    return activation(gate, epilogue) * up


def block_m(rows):
    return next(most for most in (16, 32, 64) if rows <= most)


OPTIONS = {"kind": tuple(KINDS), "epilogue": tuple(EPILOGUES), "shape": tuple(SHAPES), "dtype": tuple(TOLERANCE)}


@pytest.mark.parametrize("case", pairwise(OPTIONS), ids=lambda case: "-".join(map(str, case.values())))
def test_a_norm_and_an_epilogue_are_those_of_the_formulas(case, device):
    (kind, rows), epilogue, (out_features, in_features), dtype = case.values()
    splits = 1 + (rows + len(epilogue)) % 3
    x, weight, bias = inputs(rows, out_features, in_features, dtype, device, with_bias=splits == 2)
    x *= 3
    gain = None if epilogue == "add" else gain_of(x)  # as in a layer; the others are tested below
    residual = residual_of(x, out_features)
    chosen = config(kind, splits, block_n=8 if kind == "gemv" else 32)._replace(block_m=block_m(rows))
    out = launch(chosen, x, weight, bias, None, gain, epilogue, residual if epilogue == "add" else None, 0.5)
    expected = exact(x, weight, bias, gain, epilogue, residual, 0.5)
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("has_gain", [False, True])
@pytest.mark.parametrize("epilogue", ["add", "gelu_tanh", "gelu"])
def test_norm_and_epilogue_are_free_of_one_another(epilogue, has_gain, device):
    x, weight, bias = inputs(5, 50, 130, torch.float32, device)
    gain, residual = gain_of(x) if has_gain else None, residual_of(x, 50)
    given = residual if epilogue == "add" else None
    out = launch(config(splits=2), x, weight, bias, None, gain, epilogue, given, 2.0)
    expected = exact(x, weight, bias, gain, epilogue, residual, 2.0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "rows"), [("dot", 20), ("gemv", GEMV_ROWS)])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_row_has_the_bits_that_it_has_alone(kind, rows, splits, device):
    """Law: only the speed changes. One configuration gives a row the same norm, whatever the others are."""
    x, weight, _ = inputs(rows, 64, 128, torch.float16, device)
    gain = gain_of(x)
    together = launch(config(kind, splits), x, weight, None, None, gain, "silu")
    hostile = x.clone()
    hostile[: rows - 1] = torch.nan
    assert torch.equal(launch(config(kind, splits), hostile, weight, None, None, gain, "silu")[-1], together[-1])
    if kind == "dot":
        alone = launch(config(kind, splits), x[-1:], weight, None, None, gain, "silu")
        assert torch.equal(alone[0], together[-1])


@pytest.mark.parametrize("splits", [1, 2])
def test_fp16_rows_with_large_outliers_stay_in_range(splits, device):
    """A residual's outlier times its gain leaves fp16's range, though its norm is a small number."""
    x, weight, _ = inputs(2, 50, 128, torch.float16, device)
    x[0, 7], x[1, 100] = 40_000.0, -60_000.0
    gain = gain_of(x) + 4
    out = launch(config("dot", splits), x, weight, None, None, gain)
    expected = exact(x, weight, None, gain, "store", None, 1.0)
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("has_gain", [False, True])
def test_the_torch_version_is_that_of_the_formulas(epilogue, has_gain):
    x, weight, bias = inputs(3, 50, 130, torch.float32, "cpu")
    gain, residual = gain_of(x) if has_gain else None, residual_of(x, 50)
    out = residual.clone() if epilogue == "add" else torch.empty(3, 50 if epilogue == "store" else 25)
    small_linear_torch(out, x, weight, bias, gain, None, None, EPS, epilogue, 0.5, *config())
    expected = exact(x, weight, bias, gain, epilogue, residual, 0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_an_epilogue_that_is_not_known_is_refused():
    x, weight, bias = inputs(1, 50, 130, torch.float32, "cpu")
    with pytest.raises(ValueError, match="epilogue is 'relu'; it must be one of store, add, silu, gelu_tanh, gelu"):
        small_linear(torch.zeros(1, 50), x, weight, bias, None, config(), epilogue="relu")


@pytest.mark.parametrize("epilogue", ["store", "silu"])
def test_a_norm_in_a_launch_of_its_own_is_the_same_norm(epilogue, device):
    x, weight, _ = inputs(33, 64, 256, torch.float32, device)
    outs = [torch.full((33, 64 if epilogue == "store" else 32), torch.nan, device=device) for _ in range(2)]
    for out, is_apart in zip(outs, (False, True), strict=True):
        chosen = config("dot")._replace(block_m=64, separate_norm=is_apart)
        small_linear(out, x, weight, None, None, chosen, gain=gain_of(x), eps=EPS, epilogue=epilogue)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
