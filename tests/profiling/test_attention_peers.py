"""Peers of decode attention: compared with float64 first, timed in turn, left out with a reason."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import attention as attention_module
from benchmarks.attention import PEERS, SHAPES, AttentionProblem, AttentionShape, compare_attention, sdpa

ROOT = Path(__file__).parents[2]
SMALL = AttentionShape("small", 4, 2, 16, torch.float16, torch.float16)
Calls = list[Callable[[], Tensor]]


def broken(problem: AttentionProblem) -> Calls:
    raise RuntimeError("no kernel\nfor this")


def short(problem: AttentionProblem) -> Calls:
    """Forgets the newest key."""
    q = problem.q.unsqueeze(2)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    return [partial(attend, q, k[:, :, :-1], v[:, :, :-1]) for k, v in problem.contiguous]


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch, device: str) -> AttentionProblem:
    monkeypatch.setattr(attention_module, "_MOST_COPIES", 2)
    monkeypatch.setattr(attention_module, "read_bandwidth", lambda device, repeats: 1e10)
    torch.manual_seed(0)
    return AttentionProblem(SMALL, 3, 37, torch.device(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_outputs_are_compared_before_times_and_wrong_ones_have_none(problem, dtype):
    problem.shape = replace(SMALL, dtype=dtype, kv_dtype=dtype)
    problem.q, problem.out = problem.q.to(dtype), problem.out.to(dtype)
    problem.caches = [(k.to(dtype), v.to(dtype)) for k, v in problem.caches]
    peers = {name: PEERS[name] for name in ("sdpa", "gather+sdpa")} | {"broken": broken, "short": short}
    results = {row["peer"]: row for row in compare_attention(peers, problem)}
    assert list(results) == ["graphdecode", "sdpa", "gather+sdpa", "broken", "short"]
    for name in ("graphdecode", "sdpa", "gather+sdpa"):
        assert results[name]["note"] == ""
        assert results[name]["error"] <= problem.shape.tolerance
        assert len(results[name]["rounds_us"]) == attention_module.ROUNDS
        assert results[name]["us"] > 0
        assert results[name]["of_read_bandwidth"] == pytest.approx(results[name]["bytes_per_s"] / 1e10)
    assert results["graphdecode"]["times_graphdecode"] == 1.0
    assert results["broken"]["note"] == "RuntimeError: no kernel"
    assert results["short"]["note"].startswith("gives another output: ")
    assert results["short"]["error"] > problem.shape.tolerance
    assert [results[name]["us"] for name in ("broken", "short")] == [None] * 2


def test_every_cache_is_attended_over(problem: AttentionProblem) -> None:
    def stuck(problem: AttentionProblem) -> Calls:
        """Is right for the first cache, and then gives that output again."""
        return [sdpa(problem)[0]] * len(problem.caches)

    assert len(problem.caches) == 2
    assert compare_attention({"stuck": stuck}, problem)[1]["note"].startswith("gives another output: ")


def test_an_output_that_is_no_number_is_infinitely_far(problem: AttentionProblem) -> None:
    assert problem.error(torch.full_like(problem.q, torch.nan), 0) == torch.inf


@pytest.mark.slow
def test_flex_attention_is_compiled_or_says_why_not(problem: AttentionProblem) -> None:
    result = compare_attention({"flex": PEERS["flex"]}, problem)[1]
    assert result["note"] or result["error"] <= SMALL.tolerance


@pytest.mark.slow
def test_the_script_writes_its_points_and_refuses_unknown_names(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "tools" / "bench"), "attention", "--out", str(tmp_path), "--device", "cpu"]
    script += ["--batches", "1", "--contexts", "64", "--shapes", "qwen3"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = partial(subprocess.run, capture_output=True, text=True, env=environment, check=False)
    done = run([*script, "--peers", "sdpa,gather+sdpa"])
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "attention.json").read_text())
    assert [row["peer"] for row in report["rows"]] == ["graphdecode", "sdpa", "gather+sdpa"]
    assert report["tolerance"].keys() == {shape.name for shape in SHAPES}
    refused = run([*script, "--peers", "sdpo"])
    assert refused.returncode == 2
    assert "unknown peers: sdpo; there are sdpa, gather+sdpa, flex" in refused.stderr
