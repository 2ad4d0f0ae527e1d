"""The CUDA C++ products of 9 to 64 rows, by fibers: against float64, with no race, the same bits beside other rows."""

import pytest
import torch
from fibers import Order, needs_compiler
from product_cases import BFLOAT16, FLOAT16, Case, assert_right, launch
from tiled_weights import FORMATS

from graphdecode.kernels.linear.wide_linear import WideConfig

pytestmark = needs_compiler

CASES = {
    "plain": Case(rows=9, width=37, has_bias=True, is_normed=True, config=WideConfig(1, 2, 1, 2, 64)),
    "cluster": Case(depth=320, rows=16, epilogue="add", config=WideConfig(1, 1, 2, 1, 64)),
    "gate": Case(depth=192, rows=17, dtype=FLOAT16, epilogue="silu", is_normed=True, config=WideConfig(1, 2, 1, 1, 64)),
    "int4": Case(
        "int4 by 128 with zeros", depth=360, rows=15, epilogue="gelu_tanh", is_normed=True, in_floats=True,
        config=WideConfig(1, 1, 2, 3, 128),
    ),
    "Q4_K": Case("Q4_K", depth=768, rows=63, dtype=FLOAT16, epilogue="add", config=WideConfig(1, 1, 1, 2, 64)),
    "Q6_K": Case("Q6_K", depth=512, rows=64, has_bias=True, is_normed=True, config=WideConfig(1, 2, 1, 4, 64)),
}  # fmt: skip
LARGE = {  # several blocks and clusters, groups of warps with fewer steps than others
    "plain": Case(width=150, depth=1088, rows=33, is_normed=True, epilogue="silu", config=WideConfig(2, 2, 2, 3, 64)),
    "Q5_1": Case("Q5_1", width=100, depth=1152, rows=24, epilogue="add", config=WideConfig(3, 1, 4, 4, 128)),
}
EVERY_FORMAT = {
    f"{kind}-{rows}": Case(
        kind, depth=1024, rows=rows, dtype=dtype, is_normed=rows == 64, epilogue="gelu",
        config=WideConfig(1, 2, 1, 3, chunk),
    )
    for kind in FORMATS
    for rows, dtype, chunk in ((16, BFLOAT16, 128), (64, FLOAT16, 64))
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 103), marks=pytest.mark.slow)], ids=["3", "100"])
def test_products_are_those_of_float64_in_any_order_of_threads(name: str, seeds: range) -> None:
    assert_right(CASES[name], seeds)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_blocks_and_clusters_share_a_weight(name: str) -> None:
    assert_right(LARGE[name], range(10))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_every_format_is_multiplied_as_it_is_stored(name: str) -> None:
    assert_right(EVERY_FORMAT[name], range(2))


@pytest.mark.parametrize("name", ["cluster", "gate", pytest.param("plain", marks=pytest.mark.slow)])
def test_each_call_that_orders_is_missed_when_it_is_left_out(name: str) -> None:
    sites = [site for site in launch(CASES[name])[0].sites if site.order != Order.WAIT]  # of a chain: below
    assert {Order.ASYNC_WAIT, Order.NAMED_BARRIER, Order.BLOCK_BARRIER} <= {site.order for site in sites}
    for site in sites:
        assert any(launch(CASES[name], seed, site)[0].faults for seed in range(5)), site


def test_a_chain_of_early_launches_reads_what_the_one_before_wrote() -> None:
    case = Case(width=128, depth=128, rows=10, config=WideConfig(2, 1, 1, 1, 64))
    for seed in range(3):
        assert launch(case, seed, launches=2)[0].faults == []
    (wait,) = [site for site in launch(case, launches=2)[0].sites if site.order == Order.WAIT]
    assert any(launch(case, seed, wait, launches=2)[0].faults for seed in range(5))


@pytest.mark.parametrize("name", ["int4", pytest.param("Q6_K", marks=pytest.mark.slow)])
def test_a_row_has_the_bits_that_it_has_beside_others(name: str) -> None:
    case = CASES[name]._replace(rows=40)
    whole = launch(case)[1]
    for rows in (slice(7, 8), slice(0, 17), slice(31, 40)):
        assert torch.equal(launch(case, rows=rows)[1], whole[rows])
