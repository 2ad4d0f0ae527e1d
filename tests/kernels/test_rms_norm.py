"""Norms and gates: each version is the formula, and a hostile row spoils no other."""

import math

import pytest
import torch
from compiled_kernels import NATIVE

from graphdecode.kernels.model.act_mul import ACTIVATIONS, act_mul, act_mul_triton
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.norm.rms_norm import add_rms_norm, add_rms_norm_triton, rms_norm, rms_norm_triton

add_rms_norm_torch = versions("add_rms_norm").torch
rms_norm_torch = versions("rms_norm").torch

# The interpreter truncates where it stores bf16: one unit in the last place more than rounding.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NATIVE_TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS = 1e-5


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * weight.double()


def native_rms_norm(*given):
    versions("rms_norm").native(*given)()


def native_add_rms_norm(*given):
    versions("add_rms_norm").native(*given)()


@pytest.fixture(params=["torch", NATIVE, "triton"])
def version(request, device):
    """(rms_norm, add_rms_norm, where, tolerance) of one of the versions."""
    if request.param == "torch":
        return rms_norm_torch, add_rms_norm_torch, "cpu", TOLERANCE
    if request.param == "native":
        return native_rms_norm, native_add_rms_norm, "cpu", NATIVE_TOLERANCE
    return rms_norm_triton, add_rms_norm_triton, device, TOLERANCE


def inputs(rows, hidden, dtype, where):
    generator = torch.Generator().manual_seed(rows * 1000 + hidden)
    x, residual = torch.randn(2, rows, hidden, generator=generator) * 3
    weight = torch.randn(hidden, generator=generator)
    return x.to(dtype).to(where), residual.to(dtype).to(where), weight.to(where)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hidden", [1, 15, 16, 33, 100, 768, 1024])
def test_the_norm_is_the_formula(version, dtype, hidden):
    norm, _, where, tolerances = version
    x, _, weight = inputs(3, hidden, dtype, where)
    out, tolerance = torch.full_like(x, torch.nan), tolerances[dtype]
    norm(out, x, weight, EPS)
    torch.testing.assert_close(out.double(), reference(x, weight), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hidden", [1, 15, 16, 33, 100, 768])
def test_the_residual_holds_the_sum_and_the_norm_is_of_it(version, dtype, hidden):
    _, add_norm, where, tolerances = version
    x, residual, weight = inputs(3, hidden, dtype, where)
    total = x.double() + residual.double()
    out, tolerance = torch.full_like(x, torch.nan), tolerances[dtype]
    add_norm(out, residual, x, weight, EPS, None, 0.0, 1.0)
    torch.testing.assert_close(residual.double(), total, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.double(), reference(residual, weight), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hidden", [1, 15, 16, 33, 100, 768])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("has_post", [False, True])
def test_what_is_added_may_be_normed_and_scaled_and_the_sum_be_left_as_it_is(
    version, dtype, hidden, is_normed, has_post
):
    _, add_norm, where, tolerances = version
    x, residual, weight = inputs(3, hidden, dtype, where)
    post = weight.flip(0).contiguous() if has_post else None
    total = residual.double() + 0.7 * (reference(x, post) if has_post else x.double())
    out, tolerance = torch.full_like(x, torch.nan), tolerances[dtype]
    add_norm(out, residual, x, weight if is_normed else None, EPS, post, EPS, 0.7)
    torch.testing.assert_close(residual.double(), total, rtol=tolerance, atol=tolerance)
    expected = reference(residual, weight) if is_normed else residual.double()
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_rows_of_the_input_may_be_strided(version):
    norm, _, where, _ = version
    wide, _, weight = inputs(4, 60, torch.float32, where)
    out = torch.zeros(4, 20, device=where)
    norm(out, wide[:, 10:30], weight[:20].contiguous(), EPS)
    torch.testing.assert_close(out.double(), reference(wide[:, 10:30], weight[:20]), rtol=1e-5, atol=1e-5)


def test_a_hostile_row_changes_no_other(version):
    """Law: padding is inert."""
    norm, _, where, _ = version
    x, _, weight = inputs(4, 64, torch.float32, where)
    calm, hostile = torch.zeros_like(x), torch.zeros_like(x)
    norm(calm, x, weight, EPS)
    x[2] = torch.nan
    norm(hostile, x, weight, EPS)
    assert torch.equal(calm[[0, 1, 3]], hostile[[0, 1, 3]])


def test_a_row_of_zeros_gives_zeros(version):
    norm, _, where, _ = version
    out = torch.full((1, 16), torch.nan, device=where)
    norm(out, torch.zeros(1, 16, device=where), torch.ones(16, device=where), EPS)
    assert (out == 0).all()


def test_the_operators_pass_opcheck(device):
    x, residual, weight = inputs(2, 16, torch.float32, device)
    out = torch.zeros_like(x)
    torch.library.opcheck(torch.ops.graphdecode.rms_norm.default, (out, x, weight, EPS))
    given = (out, residual, x, weight, EPS, weight.clone(), EPS, 0.5)
    torch.library.opcheck(torch.ops.graphdecode.add_rms_norm.default, given)
    rms_norm(out, x, weight, EPS)
    torch.testing.assert_close(out.double(), reference(x, weight), rtol=1e-5, atol=1e-5)
    add_rms_norm(out, residual, x, weight, EPS)
    torch.testing.assert_close(out.double(), reference(residual, weight), rtol=1e-5, atol=1e-5)


act_mul_torch = versions("act_mul").torch

ACT_TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if activation == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


@pytest.mark.parametrize("version", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_the_formula(version, dtype, activation, device):
    where = device if version == "triton" else "cpu"
    gate_up = (torch.randn(3, 2 * 2100, generator=torch.Generator().manual_seed(1)) * 3).to(dtype).to(where)
    gate_up[0, :4] = torch.tensor([-40.0, 40.0, 0.0, -9.0])  # the tails must neither overflow nor be NaN
    out = torch.full((3, 2100), torch.nan, dtype=dtype, device=where)
    (act_mul_triton if version == "triton" else act_mul_torch)(out, gate_up, activation)
    torch.testing.assert_close(
        out.double(), gated(gate_up, activation), rtol=ACT_TOLERANCE[dtype], atol=ACT_TOLERANCE[dtype]
    )


def test_rows_may_be_strided(device):
    wide = torch.randn(4, 50, device=device)
    out = torch.zeros(4, 10, device=device)
    act_mul(out, wide[:, 5:25], "silu")
    torch.testing.assert_close(out.double(), gated(wide[:, 5:25], "silu"), rtol=1e-5, atol=1e-6)


def test_a_hostile_row_changes_no_other_gated_row(device):
    gate_up = torch.randn(3, 40, device=device)
    calm, hostile = torch.zeros(3, 20, device=device), torch.zeros(3, 20, device=device)
    act_mul(calm, gate_up, "silu")
    gate_up[1] = torch.nan
    act_mul(hostile, gate_up, "silu")
    assert torch.equal(calm[[0, 2]], hostile[[0, 2]])


def test_an_unknown_activation_is_refused(device):
    with pytest.raises(ValueError, match=r"activation is 'relu'; it must be one of silu, gelu_tanh, gelu"):
        act_mul(torch.zeros(1, 2), torch.zeros(1, 4), "relu")


def test_the_operator_passes_opcheck(device):
    arguments = (torch.zeros(2, 8, device=device), torch.randn(2, 16, device=device), "silu")
    torch.library.opcheck(torch.ops.graphdecode.act_mul.default, arguments)
