"""Products of the CUDA C++ kernels by fibers: a case, its launches, and its values in float64."""

from typing import NamedTuple

import torch
from fibers import CallSite, Memory, Outcome, build, run
from tiled_weights import weight_of
from torch import Tensor
from torch.nn import functional

from graphdecode.kernels.linear.skinny_linear import (
    SkinnyConfig,
    grid_and_shared_bytes,
    macros,
    skinny_configs,
    weight_tensors,
)
from graphdecode.kernels.linear.weight_tiles import WeightTiles
from graphdecode.kernels.linear.wide_linear import WideConfig, shared_bytes, wide_blocks, wide_macros

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
    config: SkinnyConfig | WideConfig | None = None


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
    if isinstance(config, WideConfig):
        kernel, defines = "wide_linear", wide_macros(out, x, weight, config, **forms)
        blocks, nbytes = wide_blocks(out, config, case.epilogue), shared_bytes(weight, len(x), config)
    else:
        kernel, defines = "skinny_linear", macros(out, x, weight, config, **forms)
        blocks, nbytes = grid_and_shared_bytes(out, x, weight, config, **forms)
    library = build(f"{kernel}.cpp", *(f"{name}={value}" for name, value in defines.items()))
    parts = weight_tensors(weight)
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
    numbers = [blocks, nbytes, x.shape[0], stride, out.stride(0), 11, 1 << 19]
    numbers += [bias is not None, gain is not None, launches - 1]
    outcome = run(library, f"run_{kernel}", memory, numbers, seed=seed, left_out=left_out)
    return outcome, out, expected(case, x, values, bias, gain, old)


def assert_right(case: Case, seeds: range) -> None:
    """Run a case in some orders of threads: nothing is reported, and the result is that of float64."""
    for seed in seeds:
        outcome, out, wanted = launch(case, seed)
        assert outcome.faults == [], seed
        assert_near(out, wanted, case.dtype)


def assert_near(out: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    largest = wanted.abs().max().item()
    assert (out.double() - wanted).abs().max().item() <= {BFLOAT16: 1e-2, FLOAT16: 2e-3}[dtype] * largest
