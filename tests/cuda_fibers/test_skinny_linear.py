"""The CUDA C++ products of few rows, by fibers: against float64, with no race, and the same bits beside other rows."""

import ctypes

import pytest
import torch
from fibers import Order, build, needs_compiler
from product_cases import BFLOAT16, FLOAT16, Case, assert_right, launch
from tiled_weights import FORMATS

from graphdecode.kernels.linear.code_words import CODES, values_of
from graphdecode.kernels.linear.skinny_linear import SkinnyConfig

pytestmark = needs_compiler

CASES = {
    "plain": Case(rows=3, width=21, has_bias=True, is_normed=True),
    "narrow-steps": Case(
        depth=576, rows=2, dtype=FLOAT16, epilogue="silu", is_normed=True, config=SkinnyConfig(4, 2, 1)
    ),
    "ring": Case(depth=2560, rows=8, epilogue="add", config=SkinnyConfig(2, 1, 2)),
    "int4": Case("int4 by 128 with zeros", depth=640, rows=1, epilogue="gelu_tanh", is_normed=True, in_floats=True),
    "Q4_K": Case("Q4_K", depth=768, rows=5, dtype=FLOAT16, epilogue="add"),
    "Q6_K": Case("Q6_K", depth=512, rows=4, has_bias=True, is_normed=True, config=SkinnyConfig(1, 2, 1)),
}
EVERY_FORMAT = {
    f"{kind}-{rows}": Case(kind, depth=1024, rows=rows, dtype=dtype, is_normed=rows == 8, epilogue="gelu")
    for kind in FORMATS
    for rows, dtype in ((1, BFLOAT16), (8, FLOAT16))
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 103), marks=pytest.mark.slow)], ids=["3", "100"])
def test_products_are_those_of_float64_in_any_order_of_threads(name: str, seeds: range) -> None:
    assert_right(CASES[name], seeds)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_every_format_is_multiplied_as_it_is_stored(name: str) -> None:
    assert_right(EVERY_FORMAT[name], range(3))


@pytest.mark.parametrize("name", ["plain", "ring", "Q4_K"])
def test_each_call_that_orders_is_missed_when_it_is_left_out(name: str) -> None:
    sites = [site for site in launch(CASES[name])[0].sites if site.order != Order.WAIT]  # of a chain: below
    assert len(sites) >= 2
    for site in sites:
        assert any(launch(CASES[name], seed, site)[0].faults for seed in range(5)), site


def test_a_chain_of_early_launches_reads_what_the_one_before_wrote() -> None:
    case = Case(width=128, depth=128, rows=2, config=SkinnyConfig(1, 1, 1))
    for seed in range(3):
        assert launch(case, seed, launches=2)[0].faults == []
    (wait,) = [site for site in launch(case, launches=2)[0].sites if site.order == Order.WAIT]
    assert any(launch(case, seed, wait, launches=2)[0].faults for seed in range(5))


@pytest.mark.parametrize("name", ["plain", "Q4_K"])
def test_a_row_has_the_bits_that_it_has_beside_others(name: str) -> None:
    case = CASES[name]._replace(config=SkinnyConfig(2, 1, 1))
    whole = launch(case)[1]
    for row in (0, 2):
        assert torch.equal(launch(case, rows=slice(row, row + 1))[1], whole[row : row + 1])


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("code", CODES)
def test_codes_become_their_values(code: str, dtype: torch.dtype) -> None:
    library = build("numbers.cpp")
    kind = CODES[code]
    step, count = 16 // kind.per_word, 1 << 12
    draw = torch.Generator().manual_seed(1)
    words, high = (torch.randint(0, 1 << 32, (count,), generator=draw).to(torch.uint32) for _ in range(2))
    places = kind.spans_of_high or kind.per_word
    found = torch.empty(count, places, 2)
    arguments = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (words, high, found)]
    library.values_of_codes([*CODES].index(code), dtype == BFLOAT16, *arguments, ctypes.c_int64(count))
    halves = torch.stack((words.long() & 0xFFFF, words.long() >> 16), dim=1)
    above = torch.stack((high.long() & 0xFFFF, high.long() >> 16), dim=1)
    codes = torch.stack([halves >> place % kind.per_word * step & (1 << step) - 1 for place in range(places)], 1)
    if kind.spans_of_high:
        width = kind.bits - 4
        codes |= torch.stack([above >> place * width & (1 << width) - 1 for place in range(places)], 1) << 4
    assert torch.equal(found, values_of(code)[codes])
