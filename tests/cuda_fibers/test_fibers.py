"""The machine that runs CUDA C++ on a CPU sees every planted fault, and none in what is right."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from fibers import CallSite, Memory, Order, Outcome, build, needs_compiler, run
from torch import Tensor

pytestmark = needs_compiler


class Case(NamedTuple):
    """A small kernel, or chain of them: what it is given, and what it returns in its first tensor."""

    x: Tensor
    expected: Tensor
    scratch: int = 0  # values that it keeps, and a counter
    numbers: Sequence[int] = ()
    unneeded: Sequence[Order] = ()  # what it is right without


def _values(count: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(count).integers(-99, 99, count).astype(np.float32))


X = _values(128)
CASES = {
    "sum_of_block": Case(_values(192), _values(192).view(3, 64).sum(1)),
    "pass_on": Case(X[:64], X[:64][torch.arange(1, 33) % 32].repeat(2)),
    "sum_of_grid": Case(X[:4], X[:4].sum()[None], 4),
    "hop": Case(X[:96], 2 * X[:96].roll(-32), 96),
    "fenced_hop": Case(X[:96], 2 * X[:96].roll(-32), 96),
    "sum_of_cluster": Case(X, X.view(2, 2, 32).sum(1, keepdim=True).expand(2, 2, 32).flatten()),
    "shift_in_cluster": Case(X, X.view(2, 2, 32).flip(1).flatten()),
    "sum_of_ring": Case(_values(160), _values(160).view(5, 32).sum(0), 0, [5]),
    "sum_of_copies": Case(_values(160), _values(160).view(5, 32).sum(0).roll(-1), 0, [5]),
    "copy_over_zeros": Case(X[:16], torch.cat((X[:16], torch.zeros(16))), 0, [1]),
}
SMALL = "small_kernels.cpp"


def run_case(name: str, seed: int, left_out: CallSite | None = None) -> tuple[Outcome, Tensor]:
    case = CASES[name]
    out = torch.full_like(case.expected, torch.nan)
    memory: dict[str, Memory | Tensor] = {"out": Memory(out, is_written=False)}
    if case.scratch:
        memory["parts"] = Memory(torch.zeros(case.scratch), is_written=False)
        memory["count"] = torch.zeros(1, dtype=torch.int32)
    memory["x"] = case.x.clone()
    return run(build(SMALL), "run_small", memory, case.numbers, case=name, seed=seed, left_out=left_out), out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 103), marks=pytest.mark.slow)], ids=["3", "100"])
def test_right_kernels_have_no_faults(name: str, seeds: range) -> None:
    for seed in seeds:
        outcome, out = run_case(name, seed)
        assert outcome.faults == [], seed
        assert torch.equal(out, CASES[name].expected), seed


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 103), marks=pytest.mark.slow)], ids=["3", "100"])
def test_each_call_that_orders_is_missed_when_it_is_left_out(name: str, seeds: range) -> None:
    sites = run_case(name, 0)[0].sites
    assert sites
    for site in sites:
        for seed in seeds:
            assert run_case(name, seed, site)[0].faults, (site, seed)


def _chain(
    case: str, numbers: Sequence[int] = (), seed: int = 0, left_out: CallSite | None = None
) -> tuple[Outcome, list[Tensor]]:
    tensors = [X[:64].clone(), *(torch.zeros(64) for _ in range(3)), X[64:].clone()]
    memory: dict[str, Memory | Tensor] = {"x": tensors[0], "a": tensors[1], "b": tensors[2], "c": tensors[3]}
    memory["weights"] = Memory(tensors[4], is_constant=True)
    return run(build(SMALL), "run_small", memory, numbers, case=case, seed=seed, left_out=left_out), tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_a_warp_are_those_of_matrices(dtype: torch.dtype) -> None:
    numbers = (torch.arange(384) % 13 - 6).to(dtype)
    a, b = numbers[:256].view(16, 16), numbers[256:].view(8, 16).T
    out = torch.zeros(16, 8)
    name = str(dtype).removeprefix("torch.")
    assert run(build(SMALL), "run_small", {"out": out, "numbers": numbers}, case=name).faults == []
    assert torch.equal(out.double(), 1 + a.double() @ b.double())


def test_early_kernels_see_what_they_wait_for() -> None:
    for seed in range(20):
        outcome, (x, _, _, c, weights) = _chain("chain", seed=seed)
        assert outcome.faults == [], seed
        assert torch.equal(c, x + 3 * weights), seed


def test_an_early_kernel_that_does_not_wait_is_a_race() -> None:
    for seed in range(20):
        faults = _chain("chain", seed=seed, left_out=_chain("chain")[0].sites[0])[0].faults
        assert any(fault.startswith("race: a written") for fault in faults), seed


def test_what_was_written_two_kernels_before_may_be_read_early_only_behind_a_fenced_kernel() -> None:
    for seed in range(20):
        assert _chain("chain_with_old", [1], seed)[0].faults == [], seed
        faults = _chain("chain_with_old", [0], seed)[0].faults
        assert faults, seed
        assert all(fault.startswith("race: a ") for fault in faults), seed


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("never_written", "unwritten: shared memory"),
        ("half_of_a_barrier", "deadlock: "),
        ("wait_without_end", "deadlock: "),
        ("too_far", "outside: "),
        ("constant_in_place", "race: out read as a constant"),
        ("copy_over_zeros", "race: shared memory"),
    ],
)
def test_faults_without_a_missing_call_are_reported(case: str, kind: str) -> None:
    for seed in range(3):
        x = X[:32].clone()
        memory = {"out": torch.zeros(32, dtype=torch.int32 if case == "wait_without_end" else torch.float32), "x": x}
        outcome = run(build(SMALL), "run_small", memory, [0], case=case, seed=seed)
        assert [fault for fault in outcome.faults if fault.startswith(kind)], (seed, outcome.faults)


def test_writes_to_constants_and_reads_of_unwritten_tensors_are_faults() -> None:
    x, out = X[:192].clone(), torch.zeros(3)
    x = _values(192)
    memory = {"out": Memory(out, is_constant=True), "x": Memory(x, is_written=False)}
    faults = run(build(SMALL), "run_small", memory, case="sum_of_block").faults
    assert {fault.split(":")[0] for fault in faults} == {"constant", "unwritten"}


def test_a_fault_names_both_places() -> None:
    site = next(each for each in run_case("sum_of_block", 0)[0].sites if each.order is Order.BLOCK_BARRIER)
    faults = [fault for seed in range(9) for fault in run_case("sum_of_block", seed, site)[0].faults]
    lines = (Path(__file__).parent / SMALL).read_text().splitlines()
    race = next(fault for fault in faults if fault.startswith("race: shared memory written at"))
    written, read = (int(number) for number in re.findall(rf"{SMALL}:(\d+)", race))
    assert "shared_store" in lines[written - 1]
    assert "shared_load" in lines[read - 1]
