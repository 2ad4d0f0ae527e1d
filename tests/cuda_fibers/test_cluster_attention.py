"""Attention of one step in CUDA C++, run by fibers: against float64, and with each call that orders left out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fibers import CallSite, Memory, Order, Outcome, build, needs_compiler, run
from test_append_attention import Problem
from torch import Tensor

from graphdecode.kernels.attention.attention_records import AttentionOptions, QKNormRope
from graphdecode.kernels.cuda import decode_attention as by_clusters
from graphdecode.kernels.cuda.decode_attention import launch_decode_attention

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
    """A version of `append_attention` whose launch fibers run; it keeps the outcome of its schedule.

    Args:
        case: of which it takes the size of clusters.
        seed: of the order of threads.
        left_out: a call that does nothing.
        of_steps: `waits_first` for a second step, with one key more.
    """

    def __init__(self, case: dict[str, Any], seed: int, left_out: CallSite | None = None, **of_steps: bool) -> None:
        self.cluster, self.seed, self.left_out, self.of_steps = case["cluster"], seed, left_out, of_steps
        self.outcome, self.out, self.qkv = Outcome([], []), torch.empty(0), torch.empty(0)

    def __call__(self, out: Tensor, k_cache: Tensor, v_cache: Tensor, qkv: Tensor, table: Tensor, *others: Any) -> None:
        kv_lens, _, _, _, _, cos_sin, q_norm, k_norm, eps, _, *of_logits, k_unit, v_unit, _, _ = others
        rope, options = QKNormRope(cos_sin, q_norm, k_norm, eps), AttentionOptions(*of_logits)
        self.launch_over(out, k_cache, v_cache, qkv, table, kv_lens, rope, options, k_unit, v_unit)

    def launch_over(self, *arguments: Any) -> None:
        """Launch the kernel with the arguments of `launch_decode_attention`."""
        self.out, k_cache, _, self.qkv, *_ = arguments
        kv_heads, head_dim = k_cache.shape[2:]
        shared_bytes = by_clusters.shared_bytes(head_dim, self.out.shape[1] // kv_heads, k_cache.itemsize, 2)
        limits = by_clusters.Limits(len(self.out) * kv_heads * self.cluster, shared_bytes)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(by_clusters, "limits_of", lambda device: limits)
            patched.setattr(by_clusters, "loaded", self.loaded)
            launch_decode_attention(*arguments)

    def loaded(self, source: str, name: str, macros: tuple[tuple[str, int], ...], device: int) -> "OnFibers":
        """Compile the kernel, as `launch.loaded` does for a GPU."""
        driver = str(Path(source).with_suffix(".cpp"))
        self.library = build(driver, *(f"{name}={value}" for name, value in macros))
        return self

    def launch(self, grid: tuple[int, ...], threads: int, arguments: Sequence[Any], **options: Any) -> None:
        """Run a schedule."""
        assert options["starts_early"]
        numbers = [*grid, threads, options["cluster"], options["shared_bytes"], self.qkv.nbytes // 4]
        numbers += [1 + bool(self.of_steps), self.of_steps.get("waits_first", False)]
        numbers += [each for each in arguments if isinstance(each, int)]
        names = ["out", "keys", "values", "qkv", "table", "lens", "cos_sin", "q_norm", "k_norm", "sinks"]
        tensors = [None if t is None or not t.numel() else t for t in arguments[: len(names)]]
        memory: dict[str, Memory | Tensor | None] = dict(zip(names, tensors, strict=True))
        memory["qkv"] = Memory(torch.full_like(self.qkv, torch.nan), is_written=False)
        memory["product"] = Memory(self.qkv, is_constant=True)
        memory["next_lens"] = torch.where(arguments[5] > 0, arguments[5] + 1, 0)
        floats = [each for each in arguments if isinstance(each, float)]
        self.outcome = run(
            self.library, "run_attention", memory, numbers, floats, seed=self.seed, left_out=self.left_out
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


@pytest.mark.parametrize("case", [COMMON, HALVES, CHUNKS], ids=["sinks", "one block", "8 bits"])
def test_queries_that_are_nan_give_nan_to_their_row_alone(case: dict[str, Any]) -> None:
    case = case | {"lens": (130, 3)}
    outs = []
    for first in (slice(0), slice(0, case["group"] * case["kv_heads"] * case["head_dim"])):
        problem, version = Problem(case, "cpu", 1), OnFibers(case, 0)
        problem.qkv[0, first] = torch.nan
        problem.run(version)
        outs.append(version.out)
    assert outs[1][0].isnan().all()
    assert torch.equal(outs[0][1:], outs[1][1:])


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
