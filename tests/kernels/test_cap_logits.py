"""The soft cap is the formula, in all versions, from the smallest logits to those far past the cap."""

import pytest
import torch

from graphdecode.kernels.model.cap_logits import cap_logits, cap_logits_triton
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.registration import versions

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}  # of the cap
CAP = 30.0


@pytest.mark.parametrize("version", ["torch", "triton", "native"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 16, 2100])
def test_it_is_the_formula(version, dtype, width, device):
    if version == "native" and native.library() is None:
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(1)) * 40
    logits[0] = 1e-3
    logits[1, 0], logits[2, -1] = 1e4, -1e4
    logits = logits.to(dtype)
    expected = CAP * torch.tanh(logits.double() / CAP)
    run = {
        "torch": versions("cap_logits").torch,
        "triton": cap_logits_triton,
        "native": lambda *given: versions("cap_logits").native(*given)(),
    }[version]
    given = logits.to(device if version == "triton" else "cpu")
    run(given, CAP)
    torch.testing.assert_close(given.double().cpu(), expected, rtol=TOLERANCE[dtype], atol=CAP * TOLERANCE[dtype])


def test_the_operator_passes_opcheck(device):
    torch.library.opcheck(torch.ops.graphdecode.cap_logits.default, (torch.randn(2, 16, device=device), CAP))
    logits = torch.full((1, 4), 1e9, device=device)
    cap_logits(logits, CAP)
    assert (logits == CAP).all()
