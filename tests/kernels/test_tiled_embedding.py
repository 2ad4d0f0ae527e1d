"""Rows of an embedding in tiles of few bits: those of the values that others make of the same bytes."""

import pytest
import torch
from test_tiled_linear import FORMATS, on, weight_of

from graphdecode.kernels.model.embedding import tiled_embedding, tiled_embedding_triton

pytest.importorskip("triton")
IDS = [3, 49, 0, -1, 50, 1 << 40, 7, 9]  # three that no row has
LIVE = 7
ROWS = [3, 49, 0, 0, 0, 0, 7, 0]


def expected(weight, hidden, dtype, scale):
    return (weight[ROWS, :hidden].to(dtype).float() * scale).to(dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_undone_as_they_are_gathered(name, device):
    tiles, weight = weight_of(name, 50, 300)
    tokens, live = torch.tensor(IDS, device=device), torch.tensor([LIVE], dtype=torch.int32, device=device)
    out = torch.full((len(IDS), 290), torch.nan, device=device)
    tiles = on(device, tiles)
    tiled_embedding_triton(out, tokens, tiles, live, 3.0)
    torch.testing.assert_close(out.cpu(), expected(weight, 290, torch.float32, 3.0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["int8", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_torch_version_gathers_the_same(name, dtype):
    tiles, weight = weight_of(name, 50, 300)
    out = torch.full((len(IDS), 290), torch.nan, dtype=dtype)
    tiled_embedding(out, torch.tensor(IDS), tiles, torch.tensor([LIVE], dtype=torch.int32), 1.5)
    torch.testing.assert_close(out, expected(weight, 290, dtype, 1.5), rtol=1e-6, atol=1e-7)
