import math

import pytest
import torch

from graphdecode.kernels.model.act_mul import ACTIVATIONS, act_mul, act_mul_triton
from graphdecode.kernels.native.registration import versions

act_mul_torch = versions("act_mul").torch

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
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
        out.double(), reference(gate_up, activation), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_rows_may_be_strided(device):
    wide = torch.randn(4, 50, device=device)
    out = torch.zeros(4, 10, device=device)
    act_mul(out, wide[:, 5:25], "silu")
    torch.testing.assert_close(out.double(), reference(wide[:, 5:25], "silu"), rtol=1e-5, atol=1e-6)


def test_a_hostile_row_changes_no_other(device):
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
