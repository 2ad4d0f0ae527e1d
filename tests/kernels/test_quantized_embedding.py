"""Rows of an embedding in blocks of few bits: those of the undone table, bit for bit, for live and dead tokens."""

import pytest
import torch
from quantized_weights import stored_weight

from graphdecode.kernels.model.embedding import embedding, quantized_embedding
from graphdecode.kernels.native import library as native
from graphdecode.linear.gguf_blocks import GGUF_BLOCKS, GgufBlocks

TOKENS = torch.tensor([0, 69, 31, 32, -1, 70, 2**40, 5, 33, 33, 68])
LIVE = torch.tensor([9], dtype=torch.int32)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_type", sorted(GGUF_BLOCKS))
def test_rows_are_those_of_the_undone_table(block_type, dtype, is_compiled):
    if is_compiled and native.library() is None:
        pytest.skip("needs compiled kernels")
    stored, weight = stored_weight(block_type, (70, 512))
    held = GgufBlocks(stored, block_type).panels()
    for scale in (1.0, 22.5):
        found, expected = torch.full((2, len(TOKENS), 512), torch.nan, dtype=dtype)
        embedding(expected, TOKENS, weight.to(dtype), LIVE, scale)
        if is_compiled:
            quantized_embedding(found, TOKENS, held, LIVE, 70, scale)
        else:
            with native.switched_off():
                quantized_embedding(found, TOKENS, held, LIVE, 70, scale)
        torch.testing.assert_close(found, expected, rtol=2e-7 if dtype == torch.float32 else 2**-8, atol=1e-7)
        assert (found == expected).float().mean() > 0.99  # a fused multiplication and addition rounds once
