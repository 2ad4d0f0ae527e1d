"""A comparison of two profiles tells a slow-down from a repeat."""

import copy
import itertools
import json
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

from graphdecode import BucketConfig
from graphdecode.buckets import StepShape
from graphdecode.buffers import Batch
from graphdecode.cli import app
from graphdecode.engine.loading import make_runner
from graphdecode.engine.steps import DecodeStep
from graphdecode.models import Chunks, load_model
from graphdecode.profiling.comparison import compare_profiles, read_profile
from graphdecode.profiling.latency import LatencyProfiler


def profile_of(step_ms: dict[tuple[int, int], list[float]], noise: float = 0.01) -> dict:
    """A profile of schema 2 with these medians of rounds, and what a comparison reads of the rest."""
    rows = [
        {
            "bucket": bucket,
            "context": context,
            "step_ms": {"p50": sorted(rounds)[len(rounds) // 2]},
            "round_ms": rounds,
            "noise": noise,
        }
        for (bucket, context), rounds in step_ms.items()
    ]
    environment = {"device_name": "x", "threads": 2}
    captures = [{"bucket": bucket, "state": "eager", "capture_ms": 0.0, "pool_bytes": 0} for bucket, _ in step_ms]
    return {
        "schema": 2,
        "model": "m",
        "dtype": "float32",
        "backend": "recorded",
        "environment": environment,
        "captures": {"buckets": captures},
        "rows": rows,
    }


QUIET = {(bucket, 32): [1.0 + bucket / 10, 1.01 + bucket / 10, 1.02 + bucket / 10] for bucket in (1, 2, 4)}


def scaled(points: dict[tuple[int, int], list[float]], *factors: float) -> dict[tuple[int, int], list[float]]:
    return {
        point: [value * factor for value, factor in zip(rounds, factors, strict=True)]
        for point, rounds in points.items()
    }


def exit_code(before: dict, after: dict, folder: Path, *options: str) -> tuple[int, str]:
    paths = []
    for name, profile in (("before", before), ("after", after)):
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(profile))
    result = CliRunner().invoke(app, ["profile", "--compare", *map(str, paths), *options])
    return result.exit_code, result.output


@pytest.mark.parametrize(("factor", "code"), [(1.2, 1), (1.0, 0), (1.05, 0), (0.8, 0)])
def test_a_slow_down_of_a_fifth_exits_with_1(tmp_path: Path, factor: float, code: int) -> None:
    found, output = exit_code(profile_of(QUIET), profile_of(scaled(QUIET, factor, factor, factor)), tmp_path)
    assert found == code, output
    assert f"overall {factor:.3f}" in output


def test_tolerance_is_what_was_asked_for(tmp_path: Path) -> None:
    after = profile_of(scaled(QUIET, 1.2, 1.2, 1.2))
    assert exit_code(profile_of(QUIET), after, tmp_path, "--tolerance", "0.25")[0] == 0
    assert exit_code(profile_of(QUIET), after, tmp_path, "--tolerance", "0.15")[0] == 1


def test_rounds_that_a_neighbour_spoilt_are_no_slow_down(tmp_path: Path) -> None:
    spoilt = profile_of(scaled(QUIET, 1.0, 1.5, 1.5), noise=0.25)
    code, output = exit_code(profile_of(QUIET), spoilt, tmp_path)
    assert code == 0, output
    assert "too noisy to tell at 3 of 3 points" in output


def test_one_slower_bucket_is_found_among_many() -> None:
    after = copy.deepcopy(QUIET)
    after[2, 32] = [value * 1.3 for value in after[2, 32]]
    comparison = compare_profiles(profile_of(QUIET), profile_of(after))
    assert comparison.overall < 1.1
    assert [change.bucket for change in comparison.slower(0.1)] == [2]


def test_profiles_of_different_things_are_said_to_differ() -> None:
    other = profile_of(QUIET)
    other["environment"]["threads"] = 1
    other["model"] = "n"
    differences = compare_profiles(profile_of(QUIET), other).differences
    assert differences == ["model: m before, n after", "threads: 2 before, 1 after"]


def test_profiles_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    whole = profile_of(QUIET)
    assert exit_code(whole, whole, tmp_path)[0] == 0
    broken = [whole | {"rows": []}, whole | {"rows": [{}]}, whole | {"captures": {}}, whole | {"environment": {}}]
    for text in ("", "[]", '{"schema": 1}', '{"schema": 2}', *map(json.dumps, broken)):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"profile\.json is no profile"):
            read_profile(path)
    with pytest.raises(ValueError, match="in common"):
        compare_profiles(profile_of(QUIET), profile_of({(1, 7): [1.0]}))


@torch.library.custom_op("graphdecode_test::dawdle", mutates_args=("x",), device_types="cpu")
def dawdle(x: torch.Tensor, microseconds: float) -> None:
    end = time.perf_counter() + microseconds / 1e6
    while time.perf_counter() < end:
        pass


class DawdlingStep(DecodeStep):
    """Takes longer by what `delays_us` says for the bucket, in an operator of the graph."""

    delays_us: ClassVar[dict[int, float]] = {}

    def run(self, shape: StepShape, batch: Batch, chunks: Chunks | None = None) -> None:
        super().run(shape, batch, chunks)
        if self.delays_us:
            dawdle(batch.sampled, self.delays_us[batch.sampled.shape[0]])


def measured(monkeypatch: pytest.MonkeyPatch, delays_us: dict[int, float]) -> dict:
    monkeypatch.setattr(DawdlingStep, "delays_us", delays_us)
    config = BucketConfig(max_batch_size=4, max_sequence_length=128, batch_sizes=[1, 4])
    decoder = load_model("demo", device=torch.device("cpu"), max_sequence_length=128, batch_sizes=(1, 4))
    runner = make_runner(decoder, config, step=DawdlingStep)
    runner.graphs.capture(progress=False, kinds=["steps"])
    try:
        return LatencyProfiler(runner, steps=300).profile([32], model="demo", progress=False)
    finally:
        runner.close()


@pytest.mark.slow
@pytest.mark.alone
def test_ten_repeats_pass_and_a_real_slow_down_of_a_fifth_does_not(monkeypatch, tmp_path):
    # what memory can do is not compared, and takes longer to measure than the steps
    monkeypatch.setattr("graphdecode.profiling.latency.read_bandwidth", lambda *_, **__: 1e10)
    profiles = [measured(monkeypatch, {}) for _ in range(11)]
    for before, after in itertools.pairwise(profiles):
        code, output = exit_code(before, after, tmp_path)
        assert code == 0, output
    fifth = {row["bucket"]: 200 * min(row["round_ms"]) for row in profiles[-1]["rows"]}
    code, output = exit_code(profiles[-1], measured(monkeypatch, fifth), tmp_path)
    assert code == 1, output
