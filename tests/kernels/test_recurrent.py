"""Operators over recurrent states against float64: rows that begin, go on, share a pass; padding; gates and norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.norm.gated_rms_norm import gated_rms_norm, gated_rms_norm_triton
from graphdecode.kernels.recurrent.causal_conv import causal_conv, causal_conv_triton
from graphdecode.kernels.recurrent.gated_delta import DeltaGates, gated_delta, gated_delta_triton
from graphdecode.kernels.recurrent.selective_scan import ScanWeights, selective_scan, selective_scan_triton
from graphdecode.kernels.recurrent.state_tokens import StateTokens

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
OPERATORS = {
    "causal_conv": (causal_conv, causal_conv_triton),
    "gated_delta": (gated_delta, gated_delta_triton),
    "selective_scan": (selective_scan, selective_scan_triton),
    "gated_rms_norm": (gated_rms_norm, gated_rms_norm_triton),
}


@dataclass(frozen=True)
class Rows:
    """Tokens of some rows in a pass: (batch row, first position, tokens), and so many tokens of padding behind."""

    runs: tuple[tuple[int, int, int], ...]
    padding: int = 0
    states: int = 5  # beside the last one, which is nobody's

    def tokens(self, where: str) -> StateTokens:
        rows = [row for row, _, count in self.runs for _ in range(count)]
        positions = [first + i for _, first, count in self.runs for i in range(count)]
        live = len(rows)
        rows, positions = rows + [0] * self.padding, positions + [7] * self.padding
        state_rows = [3, 0, 4, 1, 2]
        return StateTokens(
            *(torch.tensor(each, dtype=torch.int32, device=where) for each in (rows, positions, [live], state_rows))
        )

    @property
    def count(self) -> int:
        return sum(count for _, _, count in self.runs) + self.padding


PASSES = {
    "a step of three rows": Rows(((0, 4, 1), (1, 0, 1), (2, 9, 1)), padding=2),
    "a chunk of one row that begins": Rows(((2, 0, 6),)),
    "chunks of three rows": Rows(((1, 0, 5), (4, 3, 2), (0, 8, 1)), padding=3),
    "nothing but padding": Rows((), padding=2),
}


@pytest.fixture(params=["torch", "triton", "compiled"])
def version(request: pytest.FixtureRequest, device: str) -> Callable[[str], tuple[Callable[..., None], str]]:
    """Return a function from an operator's name to one of its versions and where it runs."""
    if request.param == "compiled" and native.library(torch.float32) is None:
        pytest.skip(str(native.unavailable_reason()))

    def of(name: str) -> tuple[Callable[..., None], str]:
        if request.param == "torch":
            flat = versions(name).torch
            return lambda *given: flat(*_flat(given)), "cpu"
        return OPERATORS[name][request.param == "triton"], device if request.param == "triton" else "cpu"

    return of


def _flat(given: tuple[Any, ...]) -> list[Any]:
    return [each for value in given for each in (value if isinstance(value, tuple) else (value,))]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def states_of(tokens: StateTokens, state: Tensor) -> Iterator[tuple[slice, int, Tensor]]:
    """Yield the tokens of each row, its state's place and the state that it begins with, in float64."""
    for begin, end, place, is_new in tokens.runs():
        yield slice(begin, end), place, torch.zeros_like(state[place]).double() if is_new else state[place].double()


def convolved(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, tokens: StateTokens
) -> tuple[Tensor, Tensor]:
    channels, width = weight.shape[1], weight.shape[0]
    out, after = torch.zeros(x.shape[0], channels).double(), state.double().clone()
    for own, place, held in states_of(tokens, state):
        given = x[own].double()
        b, c, given = given.chunk(3, 1) if x.shape[1] > channels else (1.0, 1.0, given)
        joined = torch.cat((held, b * given)).T[None]  # [1, channels, tokens]
        total = torch.nn.functional.conv1d(
            joined, weight.double().T[:, None], None if bias is None else bias.double(), groups=channels
        )
        total = torch.nn.functional.silu(total) if silu else total
        out[own], after[place] = c * total[0].T, joined[0].T[-(width - 1) :]
    return out, after


def delta_rule(
    qkv: Tensor, state: Tensor, gates: DeltaGates, tokens: StateTokens, strength: float
) -> tuple[Tensor, Tensor]:
    _, heads, key_dim, value_dim = state.shape
    key_heads = (qkv.shape[1] - heads * value_dim) // 2 // key_dim
    out, after = torch.zeros(qkv.shape[0], heads * value_dim).double(), state.double().clone()
    for own, place, held in states_of(tokens, state):
        for token in range(own.start, own.stop):
            row, ab = qkv[token].double(), gates.ab[token].double()
            for head in range(heads):
                of_key = head // (heads // key_heads) * key_dim
                q, k = row[of_key:][:key_dim], row[key_heads * key_dim + of_key :][:key_dim]
                q, k = (each / (each.square().sum() + 1e-6).sqrt() for each in (q, k))
                v = row[2 * key_heads * key_dim + head * value_dim :][:value_dim]
                rise = torch.log1p(torch.exp(ab[head] + gates.dt_bias[head].double()))
                s = held[head] * torch.exp(-gates.a_log[head].double().exp() * rise)
                held[head] = s + torch.outer(k, (v - s.T @ k) * strength * ab[heads + head].sigmoid())
                out[token, head * value_dim :][:value_dim] = held[head].T @ q / key_dim**0.5
        after[place] = held
    return out, after


def scanned(
    xbc: Tensor, state: Tensor, dt: Tensor, weights: ScanWeights, tokens: StateTokens, least: float, most: float
) -> tuple[Tensor, Tensor]:
    _, heads, states, dim = state.shape
    groups = (xbc.shape[1] - heads * dim) // 2 // states
    out, after = torch.zeros(xbc.shape[0], heads * dim).double(), state.double().clone()
    a_log, skip, bias = (each.double() for each in weights)
    for own, place, held in states_of(tokens, state):
        for token in range(own.start, own.stop):
            row = xbc[token].double()
            for head in range(heads):
                group = head // (heads // groups)
                x = row[head * dim :][:dim]
                b, c = row[heads * dim :].view(2, groups, states)[:, group]
                step = torch.log1p(torch.exp(dt[token, head].double() + bias[head])).clamp(least, most)
                held[head] = held[head] * torch.exp(-a_log[head].exp() * step) + torch.outer(b, x * step)
                out[token, head * dim :][:dim] = held[head].T @ c + skip[head] * x
        after[place] = held
    return out, after


def check(
    found: Tensor, expected: Tensor, state: Tensor, after: Tensor, tokens: StateTokens, dtype: torch.dtype
) -> None:
    live = int(tokens.live)
    torch.testing.assert_close(
        found[:live].double().cpu(), expected[:live], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert found[live:].isnan().all()  # nothing is written for padding
    torch.testing.assert_close(state.double().cpu(), after, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize(
    ("channels", "width", "gated", "silu"), [(48, 4, False, True), (19, 3, True, False), (5, 2, False, False)]
)
def test_convolution_of_each_row_goes_on_from_its_state(version, dtype, rows, channels, width, gated, silu) -> None:
    run, where = version("causal_conv")
    tokens = rows.tokens(where)
    columns = channels * (3 if gated else 1)
    x = drawn(rows.count, columns + 4, dtype=dtype)[:, :columns]  # rows that are strided
    state, weight = drawn(rows.states + 1, width - 1, channels, seed=1), drawn(width, channels, seed=2)
    bias = None if gated else drawn(channels, seed=3)
    expected, after = convolved(x, state, weight, bias, silu, rows.tokens("cpu"))
    out = torch.full((rows.count, channels), torch.nan, dtype=dtype, device=where)
    state = state.to(where)
    run(out, x.to(where), state, weight.to(where), bias if bias is None else bias.to(where), silu, tokens)
    check(out, expected, state, after, tokens, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize(("key_heads", "heads", "key_dim", "value_dim"), [(1, 2, 16, 64), (2, 2, 8, 24), (1, 3, 5, 7)])
def test_delta_rule_is_the_formula(version, dtype, rows, key_heads, heads, key_dim, value_dim) -> None:
    run, where = version("gated_delta")
    tokens = rows.tokens(where)
    qkv = drawn(rows.count, 2 * key_heads * key_dim + heads * value_dim, dtype=dtype)
    state = drawn(rows.states + 1, heads, key_dim, value_dim, seed=1)
    gates = DeltaGates(drawn(rows.count, 2 * heads, seed=2, dtype=dtype), drawn(heads, seed=3), drawn(heads, seed=4))
    expected, after = delta_rule(qkv, state, gates, rows.tokens("cpu"), 1.5)
    out = torch.full((rows.count, heads * value_dim), torch.nan, dtype=dtype, device=where)
    state = state.to(where)
    run(out, qkv.to(where), state, DeltaGates(*(each.to(where) for each in gates)), tokens, 1.5)
    check(out, expected, state, after, tokens, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize(("heads", "groups", "states", "dim"), [(2, 1, 16, 32), (4, 2, 8, 5), (3, 1, 6, 20)])
def test_selective_scan_is_the_formula(version, dtype, rows, heads, groups, states, dim) -> None:
    run, where = version("selective_scan")
    tokens = rows.tokens(where)
    xbc = drawn(rows.count, heads * dim + 2 * groups * states, dtype=dtype)
    state, dt = drawn(rows.states + 1, heads, states, dim, seed=1), drawn(rows.count, heads, seed=2, dtype=dtype)
    weights = ScanWeights(drawn(heads, seed=3), drawn(heads, seed=4), drawn(heads, seed=5))
    expected, after = scanned(xbc, state, dt, weights, rows.tokens("cpu"), 0.05, 1.5)
    out = torch.full((rows.count, heads * dim), torch.nan, dtype=dtype, device=where)
    state = state.to(where)
    run(out, xbc.to(where), state, dt.to(where), ScanWeights(*(each.to(where) for each in weights)), tokens, 0.05, 1.5)
    check(out, expected, state, after, tokens, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("weights", ["whole", "group", "none"])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_gated_norm_is_the_formula(version, dtype, norm_first, weights, sigmoid) -> None:
    run, where = version("gated_rms_norm")
    x, gate = drawn(3, 40, dtype=dtype)[:, :36], drawn(3, 40, seed=1, dtype=dtype)[:, 2:38]
    weight = {"whole": drawn(36, seed=2), "group": drawn(12, seed=2), "none": None}[weights]
    active = gate.double().sigmoid() * (1.0 if sigmoid else gate.double())
    expected = (x.double() if norm_first else x.double() * active).view(3, 3, 12)
    if weight is not None:
        expected = expected / (expected.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double().view(-1, 12)
    expected = expected.flatten(1) * (active if norm_first else 1.0)
    out = torch.full((3, 36), torch.nan, dtype=dtype, device=where)
    run(out, x.to(where), gate.to(where), None if weight is None else weight.to(where), 1e-5, 12, norm_first, sigmoid)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["causal_conv", "gated_delta", "selective_scan"])
def test_a_chunk_has_the_bits_of_its_tokens_one_by_one(version, name: str) -> None:
    run, where = version(name)
    whole = Rows(((1, 0, 6),))

    def given(begin: int, end: int, state: Tensor, kept: Any = None) -> tuple[Tensor, tuple[Any, ...]]:
        rows = replace(whole, runs=((1, begin, end - begin),))
        tokens, part = rows.tokens(where)._replace(output_state_rows=kept), slice(begin, end)
        if name == "causal_conv":
            out = torch.zeros(end - begin, 32, device=where)
            return out, (out, drawn(6, 32)[part].to(where), state, drawn(4, 32, seed=1).to(where), None, True, tokens)
        out = torch.zeros(end - begin, 64, device=where)
        if name == "gated_delta":
            gates = DeltaGates(
                drawn(6, 4, seed=2)[part].to(where), drawn(2, seed=3).to(where), drawn(2, seed=4).to(where)
            )
            return out, (out, drawn(6, 96)[part].to(where), state, gates, tokens, 1.0)
        weights = ScanWeights(*(drawn(2, seed=seed).to(where) for seed in (3, 4, 5)))
        return out, (
            out,
            drawn(6, 96)[part].to(where),
            state,
            drawn(6, 2, seed=2)[part].to(where),
            weights,
            tokens,
            0.0,
            9.0,
        )

    shape = (10, 3, 32) if name == "causal_conv" else (10, 2, 16, 32)
    one, many = torch.full(shape, 9.0, device=where), torch.full(shape, 9.0, device=where)
    at_once, arguments = given(0, 6, one)
    run(*arguments)
    parts = []
    for begin, end in ((0, 1), (1, 2), (2, 5), (5, 6)):
        part, arguments = given(begin, end, many)
        run(*arguments)
        parts.append(part)
    assert torch.equal(at_once, torch.cat(parts))
    assert torch.equal(one, many)
    assert (one[1:] == 9.0).all()  # the states of others
    verified = torch.full(shape, 9.0, device=where)
    _, arguments = given(0, 2, verified)
    run(*arguments)
    before = verified[0].clone()
    part, arguments = given(2, 6, verified, torch.tensor([5, 9, 6, 7], dtype=torch.int32, device=where))
    run(*arguments)
    assert torch.equal(part, at_once[2:])
    assert torch.equal(verified[0], before)  # drafts may be rejected
    for count, place in zip((3, 4, 5, 6), (5, 9, 6, 7), strict=True):
        some = torch.full(shape, 9.0, device=where)
        _, arguments = given(0, count, some)
        run(*arguments)
        assert torch.equal(verified[place], some[0])
    assert (verified[[1, 2, 3, 4, 8]] == 9.0).all()
