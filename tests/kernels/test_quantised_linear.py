"""Products with weights of few bits as they are stored: against float64 of what they stand for, and for any groups."""

import gguf
import numpy as np
import pytest
import torch

from graphdecode.kernels.linear.quantised_linear import Numbers, quantised_linear, quantised_panels, undone
from graphdecode.kernels.native import library as native
from graphdecode.linear.gguf_blocks import GGUF_BLOCKS, gguf_panels

compiled = pytest.mark.skipif(native.library() is None, reason="needs compiled kernels")
SHAPES = [(70, 512), (1, 256), (257, 1280)]  # no whole panels, and in_features of one chunk of the kernel and of some
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)} | dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2))


def stored_weight(block_type, shape, seed=0):
    """Return a weight as bytes of a block type, and its values in float64 as the gguf library undoes them."""
    kind = gguf.GGMLQuantizationType[block_type]
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng([seed, *shape])
    stored = rng.integers(0, 256, (shape[0], shape[1] // values, nbytes), dtype=np.uint8)
    if block_type == "MXFP4":
        stored[..., 0] = rng.integers(118, 130, stored.shape[:2])
    else:
        for at in HALVES.get(block_type, (0,)):
            scales = rng.normal(0, 0.02, (*stored.shape[:2], 1)).astype(np.float16)
            stored[..., at : at + 2] = scales.view(np.uint8)
    stored = stored.reshape(shape[0], -1)
    return torch.from_numpy(stored), torch.from_numpy(gguf.quants.dequantize(stored, kind)).double()


def product(x, held, out_features, bias=None):
    out = torch.full((len(x), out_features), torch.nan, dtype=x.dtype)
    quantised_linear(out, x, held, bias)
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
@pytest.mark.parametrize("block_type", sorted(GGUF_BLOCKS))
def test_no_weight_is_rounded_for_any_number_of_rows(block_type, shape, dtype):
    stored, weight = stored_weight(block_type, shape)
    held = gguf_panels(stored, block_type)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    for rows in [*range(1, 34), 70]:
        x = torch.randn(rows, shape[1], generator=generator).to(dtype)
        given = bias if rows % 2 else None
        check(product(x, held, shape[0], given), x, weight, given)


@pytest.mark.parametrize("block_type", sorted(GGUF_BLOCKS))
def test_torch_computes_the_same_without_a_compiler(block_type):
    stored, weight = stored_weight(block_type, (70, 512))
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(2))
    with native.switched_off():
        out = product(x, gguf_panels(stored, block_type), 70)
    check(out, x, weight)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_type", ["Q8_0", "Q4_1", "Q6_K", "Q4_K"])
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(block_type, dtype):
    stored, _ = stored_weight(block_type, (1030, 768))
    held = gguf_panels(stored, block_type)
    wide = torch.randn(700, 1024, generator=torch.Generator().manual_seed(3)).to(dtype)
    x = wide[:, 128:896]  # rows that are apart
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = product(x, held, 1030)
        torch.set_num_threads(3)
        assert torch.equal(product(x, held, 1030), expected)
    finally:
        torch.set_num_threads(threads)
    for rows in (1, 2, 7, 16, 17, 33, 70):
        assert torch.equal(product(x[:rows], held, 1030), expected[:rows]), f"{rows} rows"


def integer_weight(bits, groups, dtype, zero_points, shape=(70, 384)):
    """Return codes as formats of integers have them, with their scales and least values, and the values in float64."""
    generator = torch.Generator().manual_seed(bits * groups)
    codes = torch.randint(0, 1 << bits, shape, generator=generator)
    scales = torch.randn(shape[0], groups, generator=generator).to(dtype)
    zeros = torch.randint(-8, 8, scales.shape, generator=generator) if zero_points else None
    integers = codes.where(codes < 128, codes - 256) if bits == 8 else codes - (1 << bits - 1)
    by_group = integers.view(*scales.shape, -1).double() - (0 if zeros is None else zeros[..., None])
    mins = None if zeros is None else Numbers(-zeros.to(torch.int8), scales)  # a multiple of the scales
    table = None if bits == 8 else torch.arange(-(1 << bits - 1), 1 << bits - 1, dtype=torch.int8)
    held = quantised_panels(codes.to(torch.uint8), bits, table, Numbers(scales), mins)
    return held, (by_group * scales.double()[..., None]).flatten(1)


@compiled
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [1, 3, 4, 6, 12, 24])  # of 384, 128, 96, 64, 32 and 16 input features
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_integers_may_have_groups_of_any_size_and_zero_points(bits, groups, scale_dtype, zero_points):
    held, weight = integer_weight(bits, groups, scale_dtype, zero_points)
    assert torch.equal(undone(held)[:70].double(), weight) or scale_dtype == torch.float32
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(37, 384, generator=torch.Generator().manual_seed(4)).to(dtype)
        for rows in (1, 9, 37):
            check(product(x[:rows], held, 70), x[:rows], weight)


@compiled
@pytest.mark.parametrize("groups", [1, 3, 24])
def test_float8_keeps_each_of_its_values(groups):
    codes = torch.arange(256).to(torch.uint8).repeat(70, 2)[:, :384].clone()
    codes[codes & 127 == 127] = 0  # not a number
    floats = codes.view(torch.float8_e4m3fn)
    scales = torch.rand(70, groups, generator=torch.Generator().manual_seed(6))
    held = quantised_panels(floats, 8, None, Numbers(scales))
    weight = (floats.double().view(70, groups, -1) * scales.double()[..., None]).flatten(1)
    torch.testing.assert_close(undone(held)[:70].double(), weight, rtol=1e-7, atol=0)
    eye = torch.eye(384)
    assert torch.equal(product(eye, held, 70).T, undone(held)[:70])
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(37, 384, generator=torch.Generator().manual_seed(4)).to(dtype)
        for rows in (1, 9, 37):
            check(product(x[:rows], held, 70), x[:rows], weight)
    with native.switched_off():
        check(product(x, held, 70), x, weight)


def test_parts_of_a_row_that_are_written_leave_the_rest_alone():
    stored, weight = stored_weight("Q4_K", (70, 256))
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(5))
    wide = torch.full((40, 100), 7.0)
    quantised_linear(wide[:, 20:90], x, gguf_panels(stored, "Q4_K"))
    check(wide[:, 20:90], x, weight)
    assert (wide[:, :20] == 7).all()
    assert (wide[:, 90:] == 7).all()


# those whose scales of few bits are kept in bytes
LARGER = {"Q2_K": (100, 84), "Q3_K": (114, 110), "MXFP4": (18, 17), "Q4_K": (148, 144), "Q5_K": (180, 176)}
LARGER["IQ4_XS"] = (138, 136)


@pytest.mark.parametrize("block_type", sorted(GGUF_BLOCKS))
def test_a_panel_holds_hardly_more_bytes_than_the_file(block_type):
    stored, _ = stored_weight(block_type, (64, 1024))
    held = gguf_panels(stored, block_type)._replace(table=None)
    nbytes, of_file = LARGER.get(block_type, (1, 1))
    assert sum(part.nbytes for part in held if isinstance(part, torch.Tensor)) * of_file == stored.nbytes * nbytes
