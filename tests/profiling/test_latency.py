"""The profiler measures what it says, and a comparison tells a slow-down from a repeat."""

import copy
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphdecode import BucketConfig
from graphdecode.cli import app
from graphdecode.engine.loading import load_runner
from graphdecode.profiling.comparison import compare_profiles
from graphdecode.profiling.latency import LatencyProfiler
from graphdecode.profiling.report import write_report


@pytest.fixture(scope="module")
def profile() -> dict:
    runner = load_runner("demo", BucketConfig(max_batch_size=4, max_sequence_length=128, batch_sizes=[1, 4]))
    runner.graphs.capture(progress=False)
    result = LatencyProfiler(runner, steps=40).profile([16, 64], progress=False)
    assert runner.cache.pool.used == 0
    with pytest.raises(ValueError, match=r"a context must be in 1\.\."):
        LatencyProfiler(runner, steps=4).profile([1000], progress=False)
    runner.close()
    return json.loads(json.dumps(result))


def test_every_bucket_is_measured_at_every_context(profile: dict) -> None:
    assert {(row["bucket"], row["context"]) for row in profile["rows"]} == {(1, 16), (4, 16), (1, 64), (4, 64)}
    for row in profile["rows"]:
        assert 0 < row["step_ms"]["p50"] <= row["step_ms"]["p90"] <= row["step_ms"]["p99"] <= row["step_ms"]["max"]
        assert row["token_ms"]["p50"] >= row["step_ms"]["p50"] * 0.9
        assert len(row["samples_ms"]) == profile["steps"] == 40
        assert row["times_floor"] == pytest.approx(row["step_ms"]["p50"] / row["floor_ms"])


def test_bytes_are_weights_once_and_each_rows_keys_and_values(profile: dict) -> None:
    token_bytes = 2 * 4 * 2 * 32 * 4  # keys and values, layers, heads, channels, float32
    for row in profile["rows"]:
        assert row["bytes_moved"] == profile["weight_bytes"] + row["bucket"] * (row["context"] + 1) * token_bytes


def test_the_report_is_self_contained(profile: dict, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = {path.name for path in write_report(profile, tmp_path)}
    assert written == {"latency.png", "padding.png", "replay.png", "histogram.png", "report.html"}
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page
    assert profile["environment"]["device_name"] in page


def slowed(profile: dict, factor: float) -> dict:
    slower = copy.deepcopy(profile)
    for row in slower["rows"]:
        row["step_ms"]["p50"] *= factor
    return slower


@pytest.mark.parametrize(("factor", "code"), [(1.2, 1), (1.0, 0), (1.05, 0), (0.8, 0)])
def test_a_slow_down_of_a_fifth_exits_with_1(profile: dict, tmp_path: Path, factor: float, code: int) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(profile))
    after.write_text(json.dumps(slowed(profile, factor)))
    result = CliRunner().invoke(app, ["profile", "--compare", str(before), str(after)])
    assert result.exit_code == code, result.output
    assert f"overall {factor:.3f}" in result.output


def test_profiles_that_cannot_be_compared_are_refused(profile: dict) -> None:
    with pytest.raises(ValueError, match="schema 1"):
        compare_profiles(profile, {"schema": 2})
    other = copy.deepcopy(profile)
    other["rows"] = [{**row, "context": 7} for row in other["rows"]]
    with pytest.raises(ValueError, match="in common"):
        compare_profiles(profile, other)
