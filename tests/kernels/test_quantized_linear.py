"""Products with weights of few bits as they are stored: against float64 of what they stand for, and for any groups."""

import pytest
import torch
from compiled_kernels import compiled
from quantized_weights import check, float8_weight, integer_weight, product, stored_weight

from graphdecode.kernels.linear.pack_codes import codes_of, pack_codes
from graphdecode.kernels.linear.quantized_linear import Numbers, dequantized_panels, quantized_linear, quantized_panels
from graphdecode.kernels.native import library as native
from graphdecode.linear.quantization.gguf import BLOCKS_ON_CPU, GgufBlocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(70, 512), (1, 256), (257, 1280)]  # no whole panels, and in_features of one chunk of the kernel and of some


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_type", sorted(BLOCKS_ON_CPU))
def test_no_weight_is_rounded_for_any_number_of_rows(block_type, shape, dtype):
    stored, weight = stored_weight(block_type, shape)
    held = GgufBlocks(stored, block_type).panels()
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    for rows in [*range(1, 34), 70]:
        x = torch.randn(rows, shape[1], generator=generator).to(dtype)
        given = bias if rows % 2 else None
        check(product(x, held, shape[0], given), x, weight, given)


@pytest.mark.parametrize("block_type", sorted(BLOCKS_ON_CPU))
def test_torch_computes_the_same_without_a_compiler(block_type):
    stored, weight = stored_weight(block_type, (70, 512))
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(2))
    with native.switched_off():
        out = product(x, GgufBlocks(stored, block_type).panels(), 70)
    check(out, x, weight)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_type", ["Q8_0", "Q4_1", "Q6_K", "Q4_K"])
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(block_type, dtype):
    stored, _ = stored_weight(block_type, (1030, 768))
    held = GgufBlocks(stored, block_type).panels()
    wide = torch.randn(700, 1024, generator=torch.Generator().manual_seed(3)).to(dtype)
    x = wide[:, 128:896]  # rows that are apart
    torch.set_num_threads(1)
    expected, alone = product(x, held, 1030), product(x[:1], held, 1030)
    torch.set_num_threads(3)
    assert torch.equal(product(x, held, 1030), expected)
    assert torch.equal(product(x[:1], held, 1030), alone)
    torch.set_num_threads(1)
    assert torch.equal(product(x[:2], held, 1030)[:1], alone)
    for rows in (3, 4, 7, 8, 16, 17, 33, 70):
        assert torch.equal(product(x[:rows], held, 1030), expected[:rows]), f"{rows} rows"
    for value in (torch.nan, 30000.0):  # which integers keep poorly, with what stands beside it
        beside = x[:2].clone()
        beside[1, ::32] = value
        assert torch.equal(product(beside, held, 1030)[:1], alone)
        assert torch.equal(product(beside.flip(0), held, 1030)[1:], alone)
    beside = x.clone()
    beside[5] = torch.nan
    assert torch.equal(product(beside, held, 1030)[:5], expected[:5])
    invariant = product(x, held, 1030, batch_invariant=True)
    for rows in (1, 2, 3):
        assert torch.equal(product(x[:rows], held, 1030, batch_invariant=True), invariant[:rows]), f"{rows} rows"


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [4, 14])  # as powers of 2
def test_a_row_may_have_values_of_any_size(dtype, spread):
    stored, weight = stored_weight("Q4_K", (70, 768))
    held = GgufBlocks(stored, "Q4_K").panels()
    powers = torch.randint(-spread, spread, (2, 768), generator=torch.Generator().manual_seed(8)) - 10
    x = torch.randn(2, 768, generator=torch.Generator().manual_seed(9)) * 2.0**powers
    x[1, :256] = 0
    rows = x.to(dtype)
    check(product(rows, held, 70), rows, weight)
    assert (product(torch.zeros(1, 768, dtype=dtype), held, 70) == 0).all()
    for value in (torch.inf, -torch.inf, torch.nan):
        rows[0, 300] = value
        out = product(rows, held, 70)
        assert not out[0].isfinite().any()
        check(out[1:], rows[1:], weight)
        assert not product(rows[[0, 1, 1]], held, 70)[0].isfinite().any()


@compiled
@pytest.mark.parametrize("outlier", [10.0, 1000.0, 30000.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_outlier_leaves_its_neighbours_what_they_are(dtype, outlier):
    """Its column means nothing, so that all of the product is theirs."""
    codes = torch.randint(0, 16, (70, 384), generator=torch.Generator().manual_seed(10)).to(torch.uint8)
    codes[:, 100] = 8
    table, scales = torch.arange(-8, 8, dtype=torch.int8), torch.ones(70, 12, dtype=torch.float16)
    held = quantized_panels(codes, 4, table, Numbers(scales))
    x = (torch.randn(2, 384, generator=torch.Generator().manual_seed(11)) / 100).to(dtype)
    x[:, 100] = outlier
    check(product(x, held, 70), x, codes.double() - 8)


@compiled
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [1, 3, 4, 6, 12, 24])  # of 384, 128, 96, 64, 32 and 16 input features
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_integers_may_have_groups_of_any_size_and_zero_points(bits, groups, scale_dtype, zero_points):
    held, weight = integer_weight(bits, groups, scale_dtype, zero_points)
    assert torch.equal(dequantized_panels(held)[:70].double(), weight) or scale_dtype == torch.float32
    for dtype in DTYPES:
        x = torch.randn(37, 384, generator=torch.Generator().manual_seed(4)).to(dtype)
        for rows in (1, 2, 9, 37):
            check(product(x[:rows], held, 70), x[:rows], weight)


@compiled
@pytest.mark.parametrize("value", [253 / 128, -253 / 128])  # with a digit of -128, the largest for sums in 16 bits
@pytest.mark.parametrize("groups", [1, 3, 12])
def test_the_largest_codes_and_digits_do_not_overflow(groups, value):
    codes, table = torch.full((70, 384), 15, dtype=torch.uint8), torch.arange(-8, 8, dtype=torch.int8)
    held = quantized_panels(codes, 4, table, Numbers(torch.ones(70, groups)), None)
    for dtype in DTYPES:
        for rows in (1, 2, 9):
            x = torch.full((rows, 384), value).to(dtype)
            check(product(x, held, 70), x, torch.full((70, 384), 7.0, dtype=torch.float64))


@compiled
@pytest.mark.parametrize("groups", [1, 3, 24])
def test_float8_keeps_each_of_its_values(groups):
    held, weight = float8_weight(groups)
    torch.testing.assert_close(dequantized_panels(held)[:70].double(), weight, rtol=1e-7, atol=0)
    eye = torch.eye(384)
    assert torch.equal(product(eye, held, 70).T, dequantized_panels(held)[:70])
    for dtype in DTYPES:
        x = torch.randn(37, 384, generator=torch.Generator().manual_seed(4)).to(dtype)
        for rows in (1, 9, 37):
            check(product(x[:rows], held, 70), x[:rows], weight)
    with native.switched_off():
        check(product(x, held, 70), x, weight)


def test_parts_of_a_row_that_are_written_leave_the_rest_alone():
    stored, weight = stored_weight("Q4_K", (70, 256))
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(5))
    wide = torch.full((40, 100), 7.0)
    quantized_linear(wide[:, 20:90], x, GgufBlocks(stored, "Q4_K").panels())
    check(wide[:, 20:90], x, weight)
    assert (wide[:, :20] == 7).all()
    assert (wide[:, 90:] == 7).all()


# those whose scales of few bits are kept in bytes
LARGER = {"Q2_K": (100, 84), "Q3_K": (114, 110), "MXFP4": (18, 17), "Q4_K": (148, 144), "Q5_K": (180, 176)}
LARGER["IQ4_XS"] = (138, 136)


@pytest.mark.parametrize("block_type", sorted(BLOCKS_ON_CPU))
def test_a_panel_holds_hardly_more_bytes_than_the_file(block_type):
    stored, _ = stored_weight(block_type, (64, 1024))
    held = GgufBlocks(stored, block_type).panels()._replace(table=None)
    nbytes, of_file = LARGER.get(block_type, (1, 1))
    assert sum(part.nbytes for part in held if isinstance(part, torch.Tensor)) * of_file == stored.nbytes * nbytes


@compiled
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("shape", [(1, 1), (32, 3), (33, 1), (95, 40)])
def test_codes_are_packed_in_c_as_by_torch_and_come_back(bits: int, shape: tuple[int, int]) -> None:
    rows, blocks = shape
    codes = torch.randint(0, 2**bits, (rows, 2 * blocks, 32), dtype=torch.uint8)[:, ::2]
    words = torch.full((-(-rows // 32), blocks, 64 * bits), -1, dtype=torch.int16)
    by_torch = words.clone()
    pack_codes(words, codes, bits)
    with native.switched_off():
        pack_codes(by_torch, codes, bits)
    assert torch.equal(words, by_torch)
    assert torch.equal(codes_of(words)[:rows], codes.flatten(1).int())
    assert not codes_of(words)[rows:].any()
    if bits == 4:
        halved = torch.zeros(rows, blocks, 20, dtype=torch.uint8)
        halved[..., 4:] = codes[..., :16] | codes[..., 16:] << 4
        of_halves = words.clone().fill_(-1)
        pack_codes(of_halves, halved[..., 4:], 4)
        assert torch.equal(of_halves, words)
        with native.switched_off():
            pack_codes(of_halves.fill_(-1), halved[..., 4:], 4)
        assert torch.equal(of_halves, words)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_with_a_scale_per_row_is_right_for_any_number_of_rows(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    codes = torch.randint(-128, 128, (70, 320), generator=draw).to(torch.int8)
    scales = torch.rand(70, 1, generator=draw) / 64
    weight = quantized_panels(codes.view(torch.uint8), 8, None, Numbers(scales))
    x = torch.randn(300, 320, generator=draw).to(dtype)
    expected = x.double() @ (codes.double() * scales.double()).T
    whole = torch.empty(300, 70)
    quantized_linear(whole, x, weight, batch_invariant=True)
    for rows in (1, 2, 3, 8, 9, 17, 64, 200, 300):
        out = torch.empty(rows, 70)
        quantized_linear(out, x[:rows], weight)
        torch.testing.assert_close(out.double(), expected[:rows], rtol=2e-5, atol=2e-5 * float(expected.abs().max()))
        quantized_linear(out, x[:rows], weight, batch_invariant=True)
        assert torch.equal(out, whole[:rows]), rows
