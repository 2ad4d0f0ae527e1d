"""What is float32 where the rest has 16 bits, as the residual stream, logits and a product's sums are: nothing of it is
rounded, in any version of an operator.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from graphdecode.kernels.linear.linear import to_panels
from graphdecode.kernels.linear.quantized_linear import Numbers, quantized_panels
from graphdecode.kernels.linear.small_linear import SmallLinearConfig
from graphdecode.kernels.moe.expert_linear import expert_panels
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.registration import versions

DTYPES = [torch.bfloat16, torch.float16]
ROWS, SLOTS, EPS = 5, 2, 1e-5
LIVE = torch.tensor([ROWS], dtype=torch.int32)


class Case(NamedTuple):
    """The arguments of an operator, and which of them are floats beside elements; all tensors are given in float32.

    Attributes:
        arguments: as the dispatcher has them.
        elements: places of those that have 16 bits; integers and other float32 stay what they are.
        results: places of those that are written.
        versions: that there are.
        packed: takes a weight of 16 bits, as `arguments` has it, and returns it as the compiled kernel reads it.
    """

    arguments: list[Any]
    elements: tuple[int, ...]
    results: tuple[int, ...] = (0,)
    versions: tuple[str, ...] = ("torch", "triton", "native")
    packed: tuple[int, Callable[[Tensor], Tensor]] | None = None


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape) + sum(shape))) * scale


def unwritten(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


def rope() -> Case:
    dim, pages, page_size = 32, 4, 8
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    places = [torch.tensor(given, dtype=torch.int32) for given in ([0, 0, 1, 1, 1], [0, 9, 3, 4, 15])]
    caches = [torch.zeros(pages, page_size, 2, dim) for _ in range(2)]
    gains = [random(dim, seed=seed) for seed in (1, 2)]
    given = [unwritten(ROWS, 3, dim), *caches, random(ROWS, 7 * dim), *places, LIVE, table, random(16, 2, 8)]
    return Case([*given, *gains, EPS, 1.0, 1.0, None, None], (0, 1, 2), (0, 1, 2))


def experts(gate: str) -> Case:
    weight = random(3, 2 * 40 if gate == "silu" else 40, 64, scale=0.2)
    order, offsets = torch.arange(2 * ROWS, dtype=torch.int32), torch.tensor([0, 3, 3, 2 * ROWS], dtype=torch.int32)

    def packed(weight: Tensor) -> Tensor:
        return torch.cat([expert_panels(own, gate == "silu") for own in weight])

    given = [unwritten(2 * ROWS, 40), random(ROWS, 64), weight, random(3, weight.shape[1], seed=1)]
    return Case([*given, order, offsets, SLOTS, gate, 1.0, 0.0, None, False], (1, 2, 3), packed=(2, packed))


def combined(*elements: int, has_gate: bool) -> Case:
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [-1, -1], [0, 2]], dtype=torch.int32)
    gate = random(ROWS, 1, seed=3) if has_gate else None
    given = [random(ROWS, 90), random(ROWS * SLOTS, 90), ids, random(ROWS, SLOTS, seed=2), gate]
    return Case(given, elements)


def few_bits(out_features: int) -> Case:
    codes = torch.randint(0, 16, (out_features, 64), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    table = torch.arange(-8, 8, dtype=torch.int8)
    held = quantized_panels(codes, 4, table, Numbers(random(out_features, 2, seed=5, scale=0.1)))
    given = [unwritten(ROWS, out_features), random(ROWS, 64), *held, random(out_features)]
    return Case([*given, False], (1, 10), versions=("torch", "native"))


def small(kind: str, epilogue: str) -> Case:
    rows = 2 if kind == "gemv" else ROWS
    out = random(rows, 70) if epilogue == "add" else unwritten(rows, 35 if epilogue == "silu" else 70)
    given = [out, random(rows, 64), random(70, 64, scale=0.1), random(70), None, None, None]
    config = SmallLinearConfig(kind, 8 if kind == "gemv" else 32, 64, 1, 4, 2)
    return Case([*given, EPS, epilogue, 0.7, *config], (1, 2, 3), versions=("torch", "triton"))


TOKENS = torch.tensor([3, 0, 10, 3, 99])
CASES: dict[str, Callable[[], Case]] = {
    "rms_norm": lambda: Case([unwritten(ROWS, 70), random(ROWS, 70), random(70), EPS], (0,)),
    "add_rms_norm": lambda: Case(
        [unwritten(ROWS, 70), random(ROWS, 70), random(ROWS, 70, seed=1), random(70), EPS, None, 0.0, 1.0], (0,), (0, 1)
    ),
    "add_rms_norm of an element": lambda: Case(
        [unwritten(ROWS, 70), random(ROWS, 70), random(ROWS, 70, seed=1), random(70), EPS, random(70), EPS, 0.7],
        (0, 2),
        (0, 1),
    ),
    "add_rms_norm alone": lambda: Case(
        [unwritten(ROWS, 70), random(ROWS, 70), random(ROWS, 70, seed=1), None, EPS, None, 0.0, 0.7], (0,), (0, 1)
    ),
    "act_mul": lambda: Case([unwritten(ROWS, 35), random(ROWS, 70, scale=3.0), "silu"], (0,)),
    "embedding": lambda: Case([unwritten(ROWS, 70), TOKENS, random(11, 70), LIVE, 1.0], (2,)),
    "embedding scaled": lambda: Case([unwritten(ROWS, 70), TOKENS, random(11, 70), LIVE, 11.3], (2,)),
    "embedding_norm": lambda: Case(
        [unwritten(ROWS, 70), unwritten(ROWS, 70), TOKENS, random(11, 70), LIVE, random(70, seed=1), 11.3, EPS],
        (0, 3),
        (0, 1),
    ),
    "rope_append": rope,
    "expert_linear": lambda: experts("none"),
    "expert_linear gated": lambda: experts("silu"),
    "moe_combine": lambda: combined(has_gate=False),
    "moe_combine of elements": lambda: combined(1, has_gate=True),
    "moe_combine into elements": lambda: combined(0, 4, has_gate=True),
    "linear": lambda: Case(
        [unwritten(ROWS, 70), random(ROWS, 64), random(70, 64, scale=0.1), random(70)], (1, 2, 3), versions=("torch",)
    ),
    "native_linear": lambda: Case(
        [unwritten(ROWS, 70), random(ROWS, 64), random(70, 64, scale=0.1), random(70)],
        (1, 2, 3),
        versions=("native",),
        packed=(2, to_panels),
    ),
    "quantized_linear": lambda: few_bits(70),
    "quantized_linear in whole panels": lambda: few_bits(64),
    **{
        f"small_linear {kind} {epilogue}": lambda kind=kind, epilogue=epilogue: small(kind, epilogue)
        for kind in ("dot", "gemv")
        for epilogue in ("store", "add", "silu")
    },
}


def bare(name: str) -> str:
    return name.partition(" ")[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "version"), [(name, version) for name, make in CASES.items() for version in make().versions]
)
def test_what_is_float32_is_not_rounded_whatever_stands_beside_it(name, version, dtype, device):
    """The same, all in float32, is the oracle: torch's version of it, over the same values."""
    if version == "native" and native.library() is None:
        pytest.skip(f"no compiled kernels: {native.unavailable_reason()}")
    case = CASES[name]()
    where = device if version == "triton" else "cpu"
    given, wide = [], []
    for place, argument in enumerate(case.arguments):
        is_element = place in case.elements and argument is not None
        own = argument.to(dtype) if is_element else argument
        wide.append(own.float() if is_element else own.clone() if isinstance(own, Tensor) else own)
        given.append(own.to(where) if isinstance(own, Tensor) else own)
    if case.packed is not None:
        place, pack = case.packed
        wide[place] = pack(wide[place]) if bare(name) == "native_linear" else wide[place]
        given[place] = pack(given[place]) if version == "native" else given[place]
    run = getattr(versions(bare(name)), version)
    if version == "native":
        call = run(*given)
        assert call is not None, "the compiled kernel does not serve this"
        call()
    else:
        run(*given)
    versions(bare(name)).torch(*wide)
    for place in case.results:
        # the interpreter truncates where it stores bf16
        loose = 2 * torch.finfo(dtype).eps if place in case.elements else 2e-6
        actual, expected = given[place].cpu().float(), wide[place]
        if (bare(name), version, dtype.itemsize) == ("quantized_linear", "native", 2):
            loose = 1e-3  # activations are taken as integers, to 2^-16 of the largest
            assert not torch.equal(actual, actual.to(dtype).float())
        torch.testing.assert_close(actual, expected, rtol=loose, atol=loose, msg=lambda told, at=place: f"{at}: {told}")
