"""Attention of one step in CUDA C++, run by fibers: against float64, and with each call that orders left out."""

from typing import Any

import pytest
import torch
from fibers import CallSite, Memory, Order, Outcome, build, needs_compiler, run
from test_append_attention import EPS, Problem
from torch import Tensor

from graphdecode.kernels.attention.attention_tile import LOG2_E

pytestmark = needs_compiler

COMMON = {
    "dtype": "bf16", "group": 3, "kv_heads": 2, "head_dim": 32, "rotated": 1.0, "norm": "of each head", "page_size": 3,
    "window_left": -1, "soft_cap": 0.0, "sinks": True, "padding": 2, "cluster": 2,
}  # fmt: skip
HALVES = COMMON | {"dtype": "fp16", "group": 8, "kv_heads": 1, "head_dim": 64, "norm": "", "page_size": 16,
                   "rotated": 0.5, "sinks": False, "cluster": 1}  # fmt: skip
CODES = COMMON | {"dtype": "bf16-e4m3", "group": 1, "head_dim": 80, "page_size": 1, "cluster": 4}
CHUNKS = COMMON | {"dtype": "fp16-e4m3", "group": 16, "rotated": 0.0, "page_size": 16, "norm": "", "is_chunked": True}
# rows of one key, of the last and the first key of a page, a tile and a block; more tiles than the ring has; a window
# that begins in a page, or is one key; a cap
CASES: dict[str, dict[str, Any]] = {
    "all keys": COMMON | {"lens": (1, 129, 64, 3, 4)},
    "a window": COMMON | {"window_left": 70, "lens": (5, 200, 70, 71, 72)},
    "one key": COMMON | {"window_left": 0, "lens": (5, 200), "soft_cap": 3.0},
    "one block": HALVES | {"lens": (1, 2, 16, 260)},
    "8 bits": CODES | {"soft_cap": 3.0, "lens": (130, 1, 64)},
    "16 heads": CHUNKS | {"window_left": 69, "lens": (71, 70, 140)},
}  # fmt: skip
THREE_TILES = [case | {"lens": (2 * 160,), "padding": 1} for case in (COMMON, CHUNKS | {"window_left": 400})]


class OnFibers:
    """A version of `append_attention` that fibers run; it keeps the outcome of its schedule."""

    def __init__(self, case: dict[str, Any], seed: int, left_out: CallSite | None = None, **of_steps: bool) -> None:
        self.cluster, self.seed, self.left_out, self.of_steps = case["cluster"], seed, left_out, of_steps
        self.outcome, self.out = Outcome([], []), torch.empty(0)

    def __call__(self, out: Tensor, k_cache: Tensor, v_cache: Tensor, qkv: Tensor, table: Tensor, *others: Any) -> None:
        kv_lens, _, _, _, _, cos_sin, q_norm, k_norm, _, _, scale, window, cap, sinks, is_chunked, *units = others
        k_unit, v_unit, *_ = units
        _, page_size, kv_heads, head_dim = k_cache.shape
        macros = {
            "HEAD_DIM": head_dim, "GROUP": out.shape[1] // kv_heads, "KV_HEADS": kv_heads, "PAGE_SIZE": page_size,
            "HALF": cos_sin.shape[-1], "IS_BF16": out.dtype == torch.bfloat16, "IS_WIDE": qkv.dtype == torch.float32,
            "IS_E4M3": k_cache.itemsize == 1, "HAS_NORM": q_norm is not None, "HAS_SINKS": sinks is not None,
            "IS_CHUNKED": is_chunked, "STAGES": 2, "CLUSTER": self.cluster,
        }  # fmt: skip
        constants = [torch.zeros(1) if t is None or not t.numel() else t for t in (cos_sin, q_norm, k_norm, sinks)]
        unwritten = Memory(torch.full_like(qkv, torch.nan), is_written=False)
        memory = {"out": out, "keys": k_cache, "values": v_cache, "qkv": unwritten, "table": table, "lens": kv_lens}
        memory |= dict(zip(("cos_sin", "q_norm", "k_norm", "sinks"), constants, strict=True))
        memory |= {"product": Memory(qkv, is_constant=True), "next_lens": torch.where(kv_lens > 0, kv_lens + 1, 0)}
        numbers = [len(out), qkv.nbytes // 4, 1 + bool(self.of_steps), self.of_steps.get("waits_first", False)]
        numbers += [qkv.stride(0), table.stride(0), window]
        floats = [scale * k_unit * LOG2_E, cap * LOG2_E, EPS, k_unit, v_unit]
        library = build("decode_attention.cpp", *(f"{name}={int(value)}" for name, value in macros.items()))
        self.outcome = run(
            library, "run_attention", memory, numbers, floats, seed=self.seed, left_out=self.left_out
        )  # fmt: skip


def outcome_of(case: dict[str, Any], seed: int, left_out: CallSite | None = None, **of_steps: bool) -> Outcome:
    version = OnFibers(case, seed, left_out, **of_steps)
    Problem(case, "cpu", 1).run(version)
    return version.outcome


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 103), marks=pytest.mark.slow)], ids=["3", "100"])
def test_it_agrees_with_float64_without_faults(name: str, seeds: range) -> None:
    problem = Problem(CASES[name], "cpu", 2 if name == "one block" else 1)  # even: the product is fp32
    versions = [OnFibers(CASES[name], seed) for seed in seeds]
    for version in versions:
        problem.check(version)
        assert version.outcome.faults == [], version.seed
        assert torch.equal(version.out, versions[0].out), "the order of threads changes no bit"


@pytest.mark.parametrize("case", THREE_TILES, ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(3, 23), marks=pytest.mark.slow)], ids=["2", "20"])
def test_each_call_that_orders_is_missed_when_it_is_left_out(case: dict[str, Any], seeds: range) -> None:
    sites = [site for site in outcome_of(case, 0).sites if ".cu" in site.place]
    assert {site.order for site in sites} >= {Order.WAIT, Order.MBARRIER, Order.CLUSTER_BARRIER, Order.WARP_SYNC}
    for site in sites:
        for seed in seeds:
            assert outcome_of(case, seed, site).faults, (site, seed)


def test_a_key_that_a_step_appends_may_be_read_early_behind_a_kernel_that_waits_first() -> None:
    case = COMMON | {"lens": (4, 33)}
    for seed in range(3):
        assert outcome_of(case, seed, waits_first=True).faults == [], seed
        faults = outcome_of(case, seed, waits_first=False).faults
        assert any(fault.startswith("race: keys written at decode_attention.cu") for fault in faults), seed
