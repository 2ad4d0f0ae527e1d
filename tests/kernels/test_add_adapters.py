"""Adapters of a product against float64: mixtures in one pass, ranks below the capacity, padding, parts, neighbours."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from graphdecode.kernels.linear.add_adapters import (
    AdapterTokens,
    add_adapters,
    add_adapters_triton,
    add_embedding_adapters,
    add_embedding_adapters_triton,
)
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.registration import versions

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
SLOTS, RANK, RANKS = 4, 8, [8, 0, 3, 1]
PASSES = {  # adapters of the rows, rows of the tokens, live tokens
    "a mixture": ([2, -1, 0, 3, 0], [0, 1, 2, 3, 4], 5),
    "an empty slot": ([1, 0], [0, 1], 2),
    "chunks of two rows, and padding": ([0, 3, -1], [1, 1, 1, 0, 0, 2, 2], 5),
    "prompts of several blocks": ([3, 0, -1, 0], [0] * 20 + [1] * 30 + [2] * 9 + [3] * 12, 69),
    "nobody has one": ([-1, -1], [0, 1], 2),
    "nothing but padding": ([0, 0], [0, 1], 0),
}


@pytest.fixture(params=["torch", "triton", "compiled"])
def version(request: pytest.FixtureRequest, device: str):
    if request.param == "compiled" and native.library(torch.float32) is None:
        pytest.skip(str(native.unavailable_reason()))
    if request.param == "torch":
        flat = versions("add_adapters").torch
        return lambda *given: flat(*given[:-1], *given[-1]), "cpu"
    return (add_adapters_triton, device) if request.param == "triton" else (add_adapters, "cpu")


@pytest.fixture
def of_embedding(version, request: pytest.FixtureRequest):
    """Return the version of the embedding's operator."""
    kind, where = request.node.callspec.params["version"], version[1]
    if kind == "torch":
        flat = versions("add_embedding_adapters").torch
        return lambda *given: flat(*given[:-2], *given[-2], given[-1]), where
    return add_embedding_adapters_triton if kind == "triton" else add_embedding_adapters, where


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def tokens_of(adapters: list[int], rows: list[int], live: int, where: str) -> AdapterTokens:
    made = (torch.tensor(each, dtype=torch.int32, device=where) for each in (rows, [live], adapters, RANKS))
    return AdapterTokens(*made)


def reference(out: Tensor, x: Tensor, down: Tensor, up: Tensor, ends: list[int], tokens: AdapterTokens) -> Tensor:
    """Token by token, part by part, in float64."""
    found = out.double().clone()
    for token in range(int(tokens.live)):
        slot = int(tokens.adapters[tokens.rows[token]])
        if slot < 0:
            continue
        rank = RANKS[slot]
        for part, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            mid = down[slot, part, :rank].double() @ x[token].double()
            found[token, begin:end] += mid @ up[slot, :rank, begin:end].double()
    return found


def weights(parts: int, in_features: int, out_features: int, dtype: torch.dtype, where: str) -> tuple[Tensor, Tensor]:
    """Return both matrices of all slots, with NaN behind each adapter's rank: nobody reads there."""
    down = drawn(SLOTS, parts, RANK, in_features, dtype=dtype).to(where)
    up = drawn(SLOTS, RANK, out_features, dtype=dtype).to(where)
    for slot, rank in enumerate(RANKS):
        down[slot, :, rank:], up[slot, rank:] = torch.nan, torch.nan
    return down, up


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16,) * 2, (torch.bfloat16, None)])
@pytest.mark.parametrize("of_pass", PASSES.values(), ids=PASSES)
def test_each_token_has_its_rows_adapter(version, of_pass, dtypes):
    run, where = version
    dtype, out_dtype = dtypes[0], dtypes[1] or torch.float32
    tokens, count = tokens_of(*of_pass, where), len(of_pass[1])
    ends = [40, 47, 90]  # of three parts, none of them whole vectors
    down, up = weights(3, 70, 90, dtype, where)
    x, out = drawn(count, 70, dtype=dtype).to(where), drawn(count, 90, dtype=out_dtype).to(where)
    wanted = reference(out, x, down, up, ends, tokens)
    inner = torch.full((count, 3, RANK), torch.nan, device=where)
    slots = [of_pass[0][row] for row in of_pass[1]]
    untouched = [t for t in range(count) if t >= of_pass[2] or slots[t] < 0 or RANKS[slots[t]] == 0]
    before = out[untouched].clone()
    run(out, x, down, up, inner, torch.tensor(ends, dtype=torch.int32, device=where), tokens)
    torch.testing.assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=20 * TOLERANCE[dtype])
    assert torch.equal(out[untouched], before)


@pytest.fixture
def rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products of Triton's interpreter round once: BLAS may sum a row in an order that follows from the others."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, *_):
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("others", [2, 70])  # of which a decode step has a few and a prompt many
def test_a_row_has_its_bits_in_any_company(version, rounded_once, others, request: pytest.FixtureRequest):
    run, where = version
    if request.node.callspec.params["version"] == "torch" and others > 2:
        pytest.skip("torch's products of several rows have their own bits")
    count, adapters = others + 1, [0] * (others // 2) + [2] * (others - others // 2 - 1) + [3, 2]
    down, up = weights(1, 96, 64, torch.float32, where)
    x, out = drawn(count, 96).to(where), drawn(count, 64).to(where)
    ends, alone = torch.tensor([64], dtype=torch.int32, device=where), out[-1:].clone()
    run(alone, x[-1:], down, up, torch.zeros(1, 1, RANK, device=where), ends, tokens_of([2], [0], 1, where))
    x[0] = torch.nan
    tokens = tokens_of(adapters, list(range(count)), count, where)
    run(out, x, down, up, torch.zeros(count, 1, RANK, device=where), ends, tokens)
    assert torch.equal(out[-1:], alone)


def test_the_operator_passes_opcheck(device):
    down, up = weights(1, 32, 16, torch.float32, device)
    ends = torch.tensor([16], dtype=torch.int32, device=device)
    given = (torch.zeros(2, 16, device=device), torch.zeros(2, 32, device=device), down, up)
    rest = (torch.zeros(2, 1, RANK, device=device), ends, *tokens_of([0, -1], [0, 1], 2, device))
    torch.library.opcheck(torch.ops.graphdecode.add_adapters.default, (*given, *rest))
    table = torch.zeros(SLOTS, 5, RANK, device=device)
    given = (torch.zeros(2, 16, device=device), torch.tensor([4, 7], device=device), table, up)
    rest = (*tokens_of([0, -1], [0, 1], 2, device), 1.5)
    torch.library.opcheck(torch.ops.graphdecode.add_embedding_adapters.default, (*given, *rest))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16,) * 2, (torch.bfloat16, None)])
@pytest.mark.parametrize("of_pass", PASSES.values(), ids=PASSES)
def test_an_embedded_token_has_its_rows_adapter(of_embedding, of_pass, dtypes):
    run, where = of_embedding
    dtype, out_dtype, count, vocab = dtypes[0], dtypes[1] or torch.float32, len(of_pass[1]), 11
    ids = [(3 * token) % vocab for token in range(count)]
    ids[0], ids[-1] = vocab, -1  # such read row 0
    table, up = drawn(SLOTS, vocab, RANK, dtype=dtype).to(where), weights(1, 8, 90, dtype, where)[1]
    for slot, rank in enumerate(RANKS):
        table[slot, :, rank:] = torch.nan
    out = drawn(count, 90, dtype=out_dtype).to(where)
    wanted = out.double().clone()
    for token in range(of_pass[2]):
        slot, row = of_pass[0][of_pass[1][token]], ids[token] if 0 <= ids[token] < vocab else 0
        rank = RANKS[slot] if slot >= 0 else 0
        wanted[token] += 1.5 * table[slot, row, :rank].double() @ up[slot, :rank].double()
    run(out, torch.tensor(ids, device=where), table, up, tokens_of(*of_pass, where), 1.5)
    torch.testing.assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=20 * TOLERANCE[dtype])
    untouched = [t for t in range(count) if t >= of_pass[2] or of_pass[0][of_pass[1][t]] in (-1, RANKS.index(0))]
    assert torch.equal(out[untouched].double(), wanted[untouched])
