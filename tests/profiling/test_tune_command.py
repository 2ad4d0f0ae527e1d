"""`graphdecode buckets tune`: today's ladder beside the tuned ones, as a table, as JSON, and as a configuration."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphdecode.buckets import BucketLadder
from graphdecode.cli import app
from graphdecode.config import BucketConfig, EngineConfig
from graphdecode.profiling.tuner import record_batch_sizes


def tune(folder: Path, *options: str) -> str:
    arguments = ["buckets", "tune", "--record", str(folder / "batches.json"), "--out", str(folder / "tuned.toml")]
    result = CliRunner().invoke(app, [*arguments, *options], catch_exceptions=False, standalone_mode=False)
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    record_batch_sizes(tmp_path / "batches.json", {3: 40, 5: 2})
    rows = [
        {"bucket": b, "context": 32, "step_ms": {"p50": 1.0 + b}, "round_ms": [1.0 + b], "noise": 0.0} for b in (1, 8)
    ]
    captured = [{"bucket": b, "state": "captured", "capture_ms": 10.0, "pool_bytes": b << 20} for b in (1, 8)]
    profile = {"schema": 2, "rows": rows, "captures": {"buckets": captured}, "environment": {"device_name": "x"}}
    profile |= {"model": "m", "dtype": "float32", "backend": "recorded"}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    (tmp_path / "today.toml").write_text("[capacity]\nmax_batch_size = 8\n[buckets]\nbatch_sizes = [4]\n")
    return tmp_path


def report_of(folder: Path, *options: str) -> dict:
    tune(folder, "--report", str(folder / "tune.json"), *options)
    return json.loads((folder / "tune.json").read_text())


def test_todays_ladder_is_the_one_in_force_whatever_is_asked_for(folder: Path) -> None:
    config = ["--config", str(folder / "today.toml")]
    for options, today in ((config, (4, 8)), ([], BucketConfig().ladder.sizes)):
        for more in ([], ["--max-graphs", "3"]):
            assert tuple(report_of(folder, *options, *more)["ladders"][0]["sizes"]) == today
    assert len(BucketConfig.load(folder / "tuned.toml").ladder) == 3
    tune(folder, *config)
    assert BucketConfig.load(folder / "tuned.toml").ladder.sizes == (3, 8)
    assert BucketConfig.load(folder / "tuned.toml").max_graphs == 2


def test_a_record_of_few_steps_is_said_to_be_one(folder: Path) -> None:
    assert "has 42 steps alone" in " ".join(tune(folder).split())
    record_batch_sizes(folder / "batches.json", {3: 1000})
    assert "steps alone" not in tune(folder)


def test_the_engines_settings_are_kept_and_options_for_measuring_are_not_written(folder: Path) -> None:
    config = folder / "today.toml"
    config.write_text(config.read_text() + '[model]\nseed = 3\ndtype = "float16"\n')
    tune(folder, "--config", str(config), "--dtype", "float32", "--device", "cpu")
    tuned = EngineConfig.load(folder / "tuned.toml")
    assert (tuned.seed, tuned.dtype, tuned.device) == (3, "float16", "auto")
    assert tuned.buckets.ladder.sizes == (3, 8)


def test_a_profile_tells_what_the_graphs_cost_without_measuring(folder: Path) -> None:
    options = ["--config", str(folder / "today.toml"), "--profile", str(folder / "profile.json"), "--max-graphs", "3"]
    report = report_of(folder, *options)
    assert (report["schema"], report["trial"], report["max_batch_size"], report["max_graphs"]) == (1, None, 8, 3)
    assert report["cost"] == "measured at 2 buckets"
    assert report["batch_sizes"] == {"3": 40, "5": 2}
    assert report["environment"]["torch"]
    ladders = {row["name"]: row for row in report["ladders"]}
    assert list(ladders) == ["today", "auto 3", "best of 1", "best of 2", "best of 3"]
    assert ladders["auto 3"]["sizes"] == list(BucketLadder.auto(8, 3))
    best = ladders["best of 3"]
    assert (best["sizes"], best["padding_share"]) == ([3, 5, 8], 0.0)
    assert (best["capture_ms"], best["pool_bytes"]) == (pytest.approx(30), pytest.approx(16 << 20))
    assert best["expected_ms"] == pytest.approx((40 * 4 + 2 * 6) / 42)
    assert best["gain_ms"] == pytest.approx(ladders["best of 2"]["expected_ms"] - best["expected_ms"])
    shown = tune(folder, *options)
    for text in ("expected ms", "last graph saves", "padding", "capture ms", "graphs MiB", "16.00", "3 5 8"):
        assert text in shown


def test_the_steps_of_an_engine_that_speculates_stand_by_rows_and_queries(folder: Path) -> None:
    options = ["--profile", str(folder / "profile.json"), "--config", str(folder / "today.toml")]
    assert report_of(folder, *options)["query_costs"] == []
    profile = json.loads((folder / "profile.json").read_text())
    times = {(1, 1): 2.0, (1, 4): 3.0, (8, 1): 4.0, (8, 4): 9.0}
    wide = [{"bucket": b, "queries": q, "context": 32, "step_ms": ms} for (b, q), ms in times.items()]
    (folder / "profile.json").write_text(json.dumps(profile | {"wide_steps": wide}))
    found = report_of(folder, *options)["query_costs"]
    assert [(cost["bucket"], cost["queries"]) for cost in found] == list(times)
    assert [cost["break_even"] for cost in found] == [1.0, 1.5, 1.0, 2.25]
    shown = tune(folder, *options)
    for text in ("rows and queries", "4 queries", "3.0000 (1.50)", "9.0000 (2.25)"):
        assert text in shown


def test_measured_ladders_are_in_the_table_and_in_the_report(folder: Path) -> None:
    options = ["--config", str(folder / "today.toml"), "--max-graphs", "2", "--measure", "--context", "8"]
    report = report_of(folder, *options, "--rounds", "2", "--dtype", "float32")
    trial = report["trial"]
    assert (trial["model"], trial["dtype"], trial["context"], trial["rounds"]) == ("demo", "float32", 8, 2)
    assert list(trial["ladders"]) == [row["name"] for row in report["ladders"]] == ["today", "best of 1", "best of 2"]
    for row in trial["ladders"].values():
        assert 0 < row["quiet_ms"] <= row["step_ms"]
        assert len(row["rounds_ms"]) == 2
        assert row["capture_ms"] > 0 < row["pool_bytes"]
    shown = tune(folder, *options, "--rounds", "1")
    for text in ("measured: demo", "of today", "quietest round", "best of 2: "):
        assert text in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-graphs", "0"], "max_graphs must be an integer in 1.."),
        (["--profile", "none.json"], r"none\.json is no profile"),
        (["--profile", "FOLDER/today.toml"], r"today\.toml is no profile"),
        (["--profile", "FOLDER/batches.json"], r"batches\.json is no profile: schema 2 is needed, got None"),
        (["--profile", "FOLDER/hollow.json"], r"hollow\.json is no profile: KeyError\('bucket'\)"),
        (["--config", "FOLDER/small.toml"], r"batches of up to 5 rows, and max_batch_size is 4 in .*small\.toml"),
        (["--report", "FOLDER"], "--report must be a file in a folder that exists"),
        (["--out", "none/tuned.toml"], "--out must be a file in a folder that exists, got none/tuned.toml"),
        (["--measure", "--rounds", "0"], "context, steps and rounds must be >= 1"),
        (["--measure", "--context", "100000"], r"context must be in 1\.\.496 .*, got 100000"),
    ],
)
def test_bad_arguments_are_named(folder: Path, options: list[str], message: str) -> None:
    (folder / "small.toml").write_text("[capacity]\nmax_batch_size = 4\n")
    (folder / "hollow.json").write_text('{"schema": 2, "rows": [{}]}')
    with pytest.raises(ValueError, match=message):
        tune(folder, *(option.replace("FOLDER", str(folder)) for option in options))
