"""The embedding: rows are gathered exactly, and what is dead or no row has reads row 0."""

import pytest
import torch
from compiled_kernels import NATIVE
from quantized_weights import stored_weight

from graphdecode.kernels.model.embedding import (
    embedding,
    embedding_norm,
    embedding_norm_triton,
    embedding_triton,
    quantized_embedding,
)
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.registration import versions
from graphdecode.linear.quantization.gguf import BLOCKS_ON_CPU, GgufBlocks

native_embedding = versions("embedding").native
embedding_torch = versions("embedding").torch

HOSTILE_IDS = [2**62, -(2**62), -1, 11]


@pytest.fixture(params=["torch", NATIVE, "triton"])
def gather(request, device):
    where = device if request.param == "triton" else "cpu"

    def run(tokens, weight, live, scale=1.0):
        out = torch.full((len(tokens), weight.shape[1]), torch.nan, dtype=weight.dtype, device=where)
        live_tokens = torch.tensor([live], dtype=torch.int32, device=where)
        given = (out, torch.tensor(tokens, device=where), weight.to(where), live_tokens, scale)
        if request.param == "native":
            native_embedding(*given)()
        else:
            {"torch": embedding_torch, "triton": embedding_triton}[request.param](*given)
        return out.cpu()

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [1, 37, 96, 2500])
def test_rows_are_gathered_exactly(gather, dtype, hidden):
    weight = torch.randn(11, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = [3, 0, 10, 3]
    assert torch.equal(gather(tokens, weight, 4), weight[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_be_scaled(gather, dtype):
    weight = torch.randn(11, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens, tolerance = [3, 0, 10, 3], torch.finfo(dtype).eps
    given = gather(tokens, weight, 4, 11.3).double()
    torch.testing.assert_close(given, 11.3 * weight[tokens].double(), rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("live", [0, 1, 2])
def test_dead_tokens_read_row_0_whatever_they_hold(gather, live):
    """Law: padding is inert."""
    weight = torch.randn(11, 20, generator=torch.Generator().manual_seed(2))
    tokens = [7, 10][:live] + HOSTILE_IDS
    out = gather(tokens, weight, live)
    assert torch.equal(out[:live], weight[tokens[:live]])
    assert torch.equal(out[live:], weight[0].expand(len(HOSTILE_IDS), -1))


@pytest.mark.parametrize("live", [3, 5])
def test_live_ids_that_no_row_has_read_row_0(gather, live):
    weight = torch.randn(11, 20, generator=torch.Generator().manual_seed(3))
    out = gather([7, *HOSTILE_IDS], weight, live)
    assert torch.equal(out, weight[[7, 0, 0, 0, 0]])


def test_weight_rows_may_be_strided(gather):
    weight = torch.randn(11, 40)[:, :20]
    assert torch.equal(gather([4, 9], weight, 2), weight[[4, 9]])


def test_the_operator_passes_opcheck(device):
    arguments = (torch.zeros(3, 8), torch.tensor([1, 2, 3]), torch.randn(5, 8), torch.tensor([2], dtype=torch.int32))
    there = tuple(t.to(device) for t in arguments)
    torch.library.opcheck(torch.ops.graphdecode.embedding.default, (*there, 2.0))
    embedding(*there)
    assert torch.equal(there[0][1], there[2][2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "scale"), [(20, 1.0), (96, 11.3)])
def test_with_the_first_norm_the_residual_keeps_its_bits_and_the_norm_is_that_of_it(dtype, hidden, scale, device):
    draw = torch.Generator().manual_seed(3)
    table, gain = torch.randn(11, hidden, generator=draw).to(dtype), torch.rand(hidden, generator=draw)
    tokens, live = torch.tensor([7, 0, 10, *HOSTILE_IDS]), torch.tensor([3], dtype=torch.int32)
    wanted = torch.empty(len(tokens), hidden, dtype=dtype)
    embedding(wanted, tokens, table, live, scale)
    wide = wanted.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()
    for version in (embedding_norm, versions("embedding_norm").torch, embedding_norm_triton):
        where = device if version is embedding_norm_triton else "cpu"
        out, residual = (torch.full_like(wanted, torch.nan).to(where) for _ in range(2))
        version(out, residual, *(t.to(where) for t in (tokens, table, live, gain)), scale, 1e-5)
        if where == "cpu" and scale == 1.0:
            assert torch.equal(residual, wanted)
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(residual.cpu(), wanted, rtol=tolerance, atol=0.0)
        torch.testing.assert_close(out.cpu().double(), normed, rtol=tolerance, atol=tolerance)


TOKENS_OF_BLOCKS = torch.tensor([0, 69, 31, 32, -1, 70, 2**40, 5, 33, 33, 68])
LIVE = torch.tensor([9], dtype=torch.int32)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_type", sorted(BLOCKS_ON_CPU))
def test_rows_are_those_of_the_dequantized_table(block_type, dtype, is_compiled):
    if is_compiled and native.library() is None:
        pytest.skip("needs compiled kernels")
    stored, weight = stored_weight(block_type, (70, 512))
    held = GgufBlocks(stored, block_type).panels()
    for scale in (1.0, 22.5):
        found, expected = torch.full((2, len(TOKENS_OF_BLOCKS), 512), torch.nan, dtype=dtype)
        embedding(expected, TOKENS_OF_BLOCKS, weight.to(dtype), LIVE, scale)
        if is_compiled:
            quantized_embedding(found, TOKENS_OF_BLOCKS, held, LIVE, 70, scale)
        else:
            with native.switched_off():
                quantized_embedding(found, TOKENS_OF_BLOCKS, held, LIVE, 70, scale)
        torch.testing.assert_close(found, expected, rtol=2e-7 if dtype == torch.float32 else 2**-8, atol=1e-7)
        assert (found == expected).float().mean() > 0.99  # a fused multiplication and addition rounds once
