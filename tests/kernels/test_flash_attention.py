"""The plain version of torch's fused attention for CPUs, beside the fused one."""

import pytest
import torch

from graphdecode.kernels.attention.attention_torch import flash_attention, plain_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "keys", "options"), [(1, 37, {}), (9, 9, {"is_causal": True}), (5, 23, {"mask": 1})]
)
def test_the_plain_version_returns_what_the_fused_one_does(dtype, queries, keys, options):
    torch.manual_seed(0)
    q = torch.randn(2, 3, queries, 32).to(dtype)
    k, v = torch.randn(2, 2, 3, keys, 32).to(dtype)
    if "mask" in options:
        options = {"attn_mask": torch.randn(queries, keys).to(dtype)}
    fused, plain = (attend(q, k, v, scale=0.2, **options) for attend in (flash_attention, plain_attention))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(plain, fused, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
