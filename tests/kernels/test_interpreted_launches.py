"""The strict interpreter finds what was planted: wrong addresses, an order that is relied on, reads before a wait."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is not in use", allow_module_level=True)

import triton
import triton.language as tl
from interpreted_launches import early_starts
from triton.runtime.interpreter import InterpreterError

from graphdecode.kernels.linear.small_linear import SmallLinearConfig, small_linear_triton


@triton.jit
def copy_kernel(out, x, size, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + SHIFT, mask=at < size, other=0.0), mask=at < size)


@triton.jit
def count_kernel(counter):
    tl.atomic_add(counter + 1, 1)


@triton.jit
def chain_kernel(x, LAST_ARRIVER: tl.constexpr, counter):
    """Each program adds its number to the sum of those before it, which nothing makes it wait for."""
    place = tl.program_id(0)
    if LAST_ARRIVER:
        tl.store(x + place, place)
        if tl.atomic_add(counter, 1) == tl.num_programs(0) - 1:
            total = 0
            for each in range(tl.num_programs(0)):
                total += tl.load(x + each)
                tl.store(x + each, total)
    else:
        before = tl.load(x + place - 1, mask=place > 0, other=0)
        tl.store(x + place, before + place)


@triton.jit
def fill_kernel(x, value, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), value)


@triton.jit
def add_kernel(out, x, weight, BLOCK: tl.constexpr, WAITS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(weight + at)
    if WAITS:
        tl.extra.cuda.gdc_wait()
        value = tl.load(x + at)
    else:
        value = tl.load(x + at)
        tl.extra.cuda.gdc_wait()
    tl.store(out + at, value + w)


def test_what_lies_inside_is_let_through():
    x, out = torch.arange(100.0), torch.zeros(100)
    copy_kernel[(4,)](out, x, 100, SHIFT=0, BLOCK=32)
    assert torch.equal(out, x)


@pytest.mark.parametrize(("shift", "size"), [(1, 100), (-1, 100), (0, 101), (1 << 20, 1)])
def test_a_load_or_a_store_outside_of_the_tensors_is_refused(shift, size):
    x, out = torch.arange(100.0), torch.zeros(100)
    with pytest.raises(InterpreterError, match=r"WrongAddress.*masked_(load|store) of 4 bytes, \d+ bytes from"):
        copy_kernel[(4,)](out, x, size, SHIFT=shift, BLOCK=32)


def test_an_atomic_operation_behind_the_end_is_refused():
    with pytest.raises(InterpreterError, match=r"WrongAddress.*atomic_rmw of 4 bytes, 0 bytes from"):
        count_kernel[(1,)](torch.zeros(1, dtype=torch.int32))


def test_an_order_that_is_relied_on_shows_and_a_last_arriver_may_be_anybody(strict_launches):
    expected = torch.arange(16, dtype=torch.int32).cumsum(0).int()
    wrong = 0
    for seed in range(5):
        for last_arriver in (False, True):
            x, counter = torch.zeros(2, 16, dtype=torch.int32)
            strict_launches.draw.seed(seed)
            chain_kernel[(16,)](x, last_arriver, counter)
            if last_arriver:
                assert torch.equal(x, expected)
            else:
                wrong += not torch.equal(x, expected)
    assert wrong == 5


@pytest.mark.parametrize("early_fill", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_read_before_the_wait_sees_what_was_there_before_the_kernel_in_front(waits, early_fill, strict_launches):
    x, weight, out = torch.full((64,), torch.nan), torch.ones(64), torch.zeros(64)
    with early_starts(strict_launches):
        options = {"launch_pdl": True} if early_fill else {}
        fill_kernel[(4,)](x, 2.0, BLOCK=16, PDL=early_fill, **options)
        add_kernel[(4,)](out, x, weight, BLOCK=16, WAITS=waits, launch_pdl=True)
        fill_kernel[(4,)](weight, 5.0, BLOCK=16, PDL=True, launch_pdl=True)
    assert torch.equal(out, torch.full((64,), 3.0)) is waits
    assert torch.equal(x, torch.full((64,), 2.0))
    assert torch.equal(weight, torch.full((64,), 5.0))


@pytest.mark.parametrize("kind", ["dot", "gemv"])
@pytest.mark.parametrize("splits", [1, 2])
def test_small_products_that_begin_early_one_after_another_are_the_products(kind, splits, strict_launches):
    """Each reads what the one before it writes, and asks for its weight before that one has begun."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(2, 64, generator=draw)
    weights = [torch.randn(64, 64, generator=draw) / 8 for _ in range(3)]
    outs = [torch.full((2, 64), torch.nan) for _ in weights]
    partials = [torch.full((splits, 2, 4 * (16 + 1)), torch.nan) for _ in weights]  # a block has a column more
    counters = torch.zeros(16, dtype=torch.int32)
    with early_starts(strict_launches):
        for given, weight, out, partial in zip([x, *outs], weights, outs, partials, strict=False):
            fused = (None, partial, counters, 1e-5, "store", 1.0)
            config = SmallLinearConfig(kind, 16, 32, splits, 4, 2, True, 16)
            small_linear_triton(out, given, weight, None, *fused, config)
    expected = x.double()
    for weight, out in zip(weights, outs, strict=True):
        expected = expected @ weight.double().T
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    assert not counters.any()
