"""The CUDA C++ products of few rows, by fibers: against float64, with no race, and the same bits beside other rows."""

import ctypes
from typing import NamedTuple

import pytest
import torch
from fibers import CallSite, Memory, Order, Outcome, build, needs_compiler, run
from tiled_weights import FORMATS, weight_of
from torch import Tensor
from torch.nn import functional

from graphdecode.kernels.linear.code_words import CODES, values_of
from graphdecode.kernels.linear.skinny_linear import SkinnyConfig, grid_and_shared_bytes, macros, skinny_configs
from graphdecode.kernels.linear.weight_tiles import WeightTiles

pytestmark = needs_compiler

EPS, FACTOR = 11 / 2**20, 0.5
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
NOTHING = torch.zeros(1)


class Case(NamedTuple):
    """A product: what is fused with it, its sizes, and its launch; None: the likeliest."""

    kind: str = "plain"  # or a kind of tiles
    width: int = 24  # rows of the weight
    depth: int = 512
    rows: int = 3
    dtype: torch.dtype = BFLOAT16
    epilogue: str = "store"
    is_normed: bool = False
    has_bias: bool = False
    in_floats: bool = False
    config: SkinnyConfig | None = None


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


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def operands(case: Case) -> tuple[Tensor | WeightTiles, Tensor, Tensor]:
    """The weight, its values in float64, and the activations, whose rows lie apart."""
    if case.kind == "plain":
        weight: Tensor | WeightTiles = (drawn(case.width, case.depth) / 20).to(case.dtype)
        values = weight.double()  # type: ignore[union-attr]
    else:
        weight, values = weight_of(case.kind, case.width, case.depth)
    return weight, values, drawn(case.rows, case.depth + 8, seed=1).to(case.dtype)[:, : case.depth]


def expected(case: Case, x: Tensor, values: Tensor, bias: Tensor | None, gain: Tensor | None, old: Tensor) -> Tensor:
    wide = x.double()
    if gain is not None:
        wide = wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt() * gain.double()
    product = wide @ values.T + (0 if bias is None else bias.double())
    if case.epilogue in ("store", "add"):
        return product if case.epilogue == "store" else old.double() + FACTOR * product
    gate, up = product.chunk(2, dim=1)
    if case.epilogue == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if case.epilogue == "gelu_tanh" else "none") * up


def launch(
    case: Case, seed: int = 0, left_out: CallSite | None = None, rows: slice = slice(None), launches: int = 1
) -> tuple[Outcome, Tensor, Tensor]:
    """Return the outcome, the result, and what it should be."""
    weight, values, x = operands(case)
    x = x[rows] if launches == 1 else x.contiguous()  # as the result that the second launch reads
    gated = case.epilogue not in ("store", "add")
    old = drawn(case.rows, case.width // (1 + gated))[rows].to(torch.float32 if case.in_floats else case.dtype)
    out = old.clone() if case.epilogue == "add" else torch.full_like(old, torch.nan)
    bias = drawn(case.width).to(case.dtype) if case.has_bias else None
    gain = 1 + drawn(case.depth) / 4 if case.is_normed else None
    config = case.config or skinny_configs(weight, case.rows, True)[0]
    forms = {"is_normed": case.is_normed, "epilogue": case.epilogue}
    defines = macros(out, x, weight, config, **forms)
    blocks, shared_bytes = grid_and_shared_bytes(out, x, weight, config, **forms)
    library = build("skinny_linear.cpp", *(f"{name}={value}" for name, value in defines.items()))
    parts = (weight, None, None, None) if isinstance(weight, Tensor) else weight[:4]
    constants = dict(zip(("words", "high", "scales", "seconds"), parts, strict=True), bias=bias, gain=gain)
    stride = x.stride(0)
    memory: dict[str, Memory | Tensor] = {
        "out": Memory(out, is_written=case.epilogue == "add"),
        "x": torch.as_strided(x, ((x.shape[0] - 1) * stride + case.depth,), (1,), x.storage_offset()),
        **{
            name: Memory(NOTHING.clone() if part is None else part, is_constant=True)
            for name, part in constants.items()
        },
        "again": Memory(torch.full_like(out, torch.nan), is_written=False),
    }
    numbers = [blocks, shared_bytes, x.shape[0], stride, out.stride(0), 11, 1 << 19]
    numbers += [bias is not None, gain is not None, launches - 1]
    outcome = run(library, "run_skinny_linear", memory, numbers, seed=seed, left_out=left_out)
    return outcome, out, expected(case, x, values, bias, gain, old)


def assert_near(out: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    largest = wanted.abs().max().item()
    assert (out.double() - wanted).abs().max().item() <= {BFLOAT16: 1e-2, FLOAT16: 2e-3}[dtype] * largest


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 103), marks=pytest.mark.slow)], ids=["3", "100"])
def test_products_are_those_of_float64_in_any_order_of_threads(name: str, seeds: range) -> None:
    for seed in seeds:
        outcome, out, wanted = launch(CASES[name], seed)
        assert outcome.faults == [], seed
        assert_near(out, wanted, CASES[name].dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_every_format_is_multiplied_as_it_is_stored(name: str) -> None:
    for seed in range(3):
        outcome, out, wanted = launch(EVERY_FORMAT[name], seed)
        assert outcome.faults == []
        assert_near(out, wanted, EVERY_FORMAT[name].dtype)


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
