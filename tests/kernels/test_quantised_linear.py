"""Products with GGUF's blocks as they are stored: against float64 of what the gguf library makes of the same bytes."""

import gguf
import numpy as np
import pytest
import torch

from graphdecode.kernels.linear.quantised_linear import BLOCK_TYPES, quantised_linear, quantised_panels
from graphdecode.kernels.native import library as native

compiled = pytest.mark.skipif(native.library() is None, reason="needs compiled kernels")
SHAPES = [(70, 96), (32, 256), (1, 32), (257, 320)]  # whole panels, and some that are not; in_features beside powers


def stored_weight(block_type, shape, seed=0):
    """Return a weight as bytes of a block type, and its values in float64."""
    kind = gguf.GGMLQuantizationType[block_type]
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng([seed, *shape])
    stored = rng.integers(0, 256, (shape[0], shape[1] // values, nbytes), dtype=np.uint8)
    halves = 2 if block_type.endswith("_1") else 1
    scales = rng.normal(0, 0.02, (*stored.shape[:2], halves)).astype(np.float16)
    stored[..., : 2 * halves] = scales.view(np.uint8).reshape(*stored.shape[:2], -1)
    stored = stored.reshape(shape[0], -1)
    return torch.from_numpy(stored), torch.from_numpy(gguf.quants.dequantize(stored, kind)).double()


def product(x, held, out_features, bias=None):
    out = torch.full((len(x), out_features), torch.nan, dtype=x.dtype)
    quantised_linear(out, x, *held, bias)
    return out


def check(out, x, weight, bias=None):
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    sizes = x.double().abs() @ weight.abs().T  # of what is summed up: sums in float32 err by so much of it
    rounding = 0 if out.dtype == torch.float32 else 2**-8
    allowed = 2e-6 * sizes + rounding * expected.abs() + 1e-6
    assert ((out.double() - expected).abs() <= allowed).all()


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_type", sorted(BLOCK_TYPES))
def test_no_weight_is_rounded_for_any_number_of_rows(block_type, shape, dtype):
    stored, weight = stored_weight(block_type, shape)
    held = quantised_panels(stored, block_type)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    for rows in [*range(1, 34), 70]:
        x = torch.randn(rows, shape[1], generator=generator).to(dtype)
        given = bias if rows % 2 else None
        check(product(x, held, shape[0], given), x, weight, given)


@pytest.mark.parametrize("block_type", sorted(BLOCK_TYPES))
def test_torch_computes_the_same_without_a_compiler(block_type):
    stored, weight = stored_weight(block_type, (70, 96))
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    with native.switched_off():
        out = product(x, quantised_panels(stored, block_type), 70)
    check(out, x, weight)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_type", sorted(BLOCK_TYPES))
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(block_type, dtype):
    stored, _ = stored_weight(block_type, (1030, 256))
    held = quantised_panels(stored, block_type)
    wide = torch.randn(70, 512, generator=torch.Generator().manual_seed(3)).to(dtype)
    x = wide[:, 128:384]  # rows that are apart
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = product(x, held, 1030)
        torch.set_num_threads(3)
        assert torch.equal(product(x, held, 1030), expected)
    finally:
        torch.set_num_threads(threads)
    for rows in (1, 2, 7, 16, 17, 33):
        assert torch.equal(product(x[:rows], held, 1030), expected[:rows]), f"{rows} rows"


@pytest.mark.parametrize("block_type", sorted(BLOCK_TYPES))
def test_a_panel_holds_no_more_bytes_than_the_file_but_for_five_bits(block_type):
    stored, _ = stored_weight(block_type, (64, 256))
    held = [tensor for tensor in quantised_panels(stored, block_type) if tensor is not None]
    in_bytes = {"Q5_0": 34 / 22, "Q5_1": 36 / 24}  # what Q8_0 takes, and that with a least value, of what the file has
    assert sum(tensor.nbytes for tensor in held) == round(stored.nbytes * in_bytes.get(block_type, 1))
