"""A comparison of two profiles tells a slow-down from a repeat."""

import copy
import io
import itertools
import json
import time
from itertools import chain
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from repeated import holds
from rich.console import Console
from typer.testing import CliRunner

from graphdecode import BucketConfig, EngineConfig
from graphdecode.buckets import StepShape
from graphdecode.buffers import Batch
from graphdecode.cli.app import app
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.loading import load_runner
from graphdecode.engine.steps import DecodeStep
from graphdecode.models import Chunks, load_model
from graphdecode.profiling.comparison import compare_profiles, read_profile
from graphdecode.profiling.latency import LatencyProfiler, spread_of
from graphdecode.profiling.report import (
    floor_columns,
    plot_profile,
    profile_tables,
    summary,
    time_columns,
    write_report,
)


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


@pytest.mark.parametrize(
    ("factor", "tolerance", "code"),
    [(1.2, "0.1", 1), (1.0, "0.1", 0), (1.05, "0.1", 0), (0.8, "0.1", 0), (1.2, "0.25", 0), (1.2, "0.15", 1)],
)
def test_a_slow_down_beyond_the_tolerance_exits_with_1(
    tmp_path: Path, factor: float, tolerance: str, code: int
) -> None:
    after = profile_of(scaled(QUIET, factor, factor, factor))
    found, output = exit_code(profile_of(QUIET), after, tmp_path, "--tolerance", tolerance)
    assert found == code, output
    assert f"overall {factor:.3f}" in output


def test_noisy_rounds_are_no_slow_down(tmp_path: Path) -> None:
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


def test_profiles_of_different_models_or_machines_differ() -> None:
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
        with pytest.raises(ValueError, match=r"profile\.json"):
            read_profile(path)
    with pytest.raises(ValueError, match="bucket and context"):
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

    def is_as_fast(before: dict, after: dict) -> bool:
        return exit_code(before, after, tmp_path)[0] == 0

    def again() -> tuple[dict, dict]:
        return measured(monkeypatch, {}), measured(monkeypatch, {})

    for before, after in itertools.pairwise(profiles):
        # another program may have run beside one of the two
        assert holds(lambda attempt, pair=(before, after): is_as_fast(*(pair if attempt == 0 else again())))
    fifth = {row["bucket"]: 200 * min(row["round_ms"]) for row in profiles[-1]["rows"]}
    code, output = exit_code(profiles[-1], measured(monkeypatch, fifth), tmp_path)
    assert code == 1, output


STEPS = 40


@pytest.fixture(scope="module")
def trace_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.json"


@pytest.fixture(scope="module")
def profile(trace_path: Path) -> dict:
    runner = load_runner("demo", BucketConfig(max_batch_size=4, max_sequence_length=128, batch_sizes=[1, 4]))
    runner.graphs.capture(progress=False, kinds=["steps"])
    profiler = LatencyProfiler(runner, steps=STEPS)
    result = profiler.profile([16, 64], model="demo", progress=False)
    profiler.write_trace(trace_path, 16)
    assert runner.cache.pool.used == 0
    with pytest.raises(ValueError, match=r"context .*1\.\..*1000"):
        profiler.profile([1000], model="demo", progress=False)
    with pytest.raises(ValueError, match="steps .*0"):
        LatencyProfiler(runner, steps=0)
    runner.close()
    return json.loads(json.dumps(result))


def test_an_engine_that_speculates_is_measured_by_rows_and_queries(profile: dict) -> None:
    assert profile["wide_steps"] == []
    limits = {"max_batch_size": 4, "max_sequence_length": 64, "batch_sizes": [1, 4]}
    speculation = {"method": "ngram", "num_tokens": 3}
    runner = load_runner("demo", EngineConfig.of(None, speculation=speculation, **limits))
    runner.graphs.capture(progress=False, kinds=["steps"])
    found = LatencyProfiler(runner, steps=1).profile([16], model="demo", progress=False)
    points = [(row["bucket"], row["queries"]) for row in found["wide_steps"]]
    assert points == [(bucket, queries) for bucket in (1, 4) for queries in (1, 2, 4)]
    assert all(row["context"] == 16 and row["step_ms"] > 0 for row in found["wide_steps"])
    captured = {(each["bucket"], each["queries"]) for each in found["captures"]["buckets"]}
    assert captured == set(points)
    assert runner.cache.pool.used == 0
    runner.close()


@pytest.mark.alone
def test_every_bucket_is_measured_at_every_context(profile: dict) -> None:
    assert {(row["bucket"], row["context"]) for row in profile["rows"]} == {(1, 16), (4, 16), (1, 64), (4, 64)}
    for row in profile["rows"]:
        for kind in ("launch_us", "step_ms", "token_ms", "eager_ms"):
            assert 0 < row[kind]["p50"] <= row[kind]["p90"] <= row[kind]["p99"] <= row[kind]["max"]
        assert row["token_ms"]["max"] >= row["step_ms"]["p50"] * 0.9
        assert row["replay_speedup"] == pytest.approx(row["eager_ms"]["p50"] / row["step_ms"]["p50"])
        assert profile["steps"] == STEPS
        rounds = row["eager_round_ms"], row["round_ms"], profile["read_bandwidth_rounds"]
        assert {profile["rounds"], *map(len, rounds)} == {5}


def test_every_step_stands_next_to_its_floor(profile: dict) -> None:
    token_bytes = 2 * 4 * 2 * 32 * 4  # keys and values, layers, heads, channels, float32
    bandwidth = profile["read_bandwidth"]
    for row in profile["rows"]:
        moved = profile["weight_bytes"] + row["bucket"] * (row["context"] + 1) * token_bytes
        seconds = row["step_ms"]["p50"] / 1000
        assert row["bytes_moved"] == moved
        assert row["floor_ms"] == pytest.approx(1000 * moved / bandwidth)
        assert row["achieved_bytes_per_second"] == pytest.approx(moved / seconds)
        assert row["bandwidth_share"] == pytest.approx(moved / seconds / bandwidth)
        assert row["times_floor"] == pytest.approx(1 / row["bandwidth_share"])
        assert row["in_cache"] == (moved <= profile["environment"]["cache_bytes"])


def test_the_profile_says_what_it_was_taken_on(profile: dict) -> None:
    facts = profile["environment"]
    for fact in ("device_name", "torch", "triton", "commit", "cpu_mhz", "threads", "load_average"):
        assert facts[fact] not in ("", None), fact
    assert (profile["model"], profile["dtype"], profile["backend"]) == ("demo", "float32", "recorded")
    for capture in profile["captures"]["buckets"]:
        assert capture["capture_ms"] > 0
        assert sum(capture["nodes"].values()) > 0


@pytest.mark.parametrize("width", [60, 80, 118])
def test_no_figure_is_cut_in_a_narrow_terminal(profile: dict, width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    for table in profile_tables(profile, width):
        console.print(table)
    shown = console.file.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for heads, rows in (time_columns(profile), floor_columns(profile)):
        assert {word for text in (*heads, *chain(*rows)) for word in text.split()} <= set(shown.split())


def test_noisy_profiles_say_so(profile: dict) -> None:
    at_rest = {"noise": 0.01, "noisy": False, "eager_noise": 0.01}
    quiet = {**profile, "rows": [{**row, **at_rest} for row in profile["rows"]]}
    assert not any("too noisy" in line for line in summary(quiet))
    quiet["rows"][0] |= {"noise": 0.4, "noisy": True}
    assert "too noisy to tell at 1 of 4 points" in summary(quiet)[-1]
    quiet["rows"][1] |= {"eager_noise": 0.2}
    assert any("eager steps are too noisy for a ratio within 10% at 1 of 4 points" in s for s in summary(quiet))
    assert [cells[4].endswith("?") for cells in floor_columns(quiet)[1]] == [False, True, False, False]


@pytest.mark.parametrize(
    ("medians", "spread"), [([2.0], 0.0), ([1.0, 1.2], 0.1 / 1.1), ([1, 1, 1, 9], 0.0), ([1, 1.1, 1.2, 9], 0.1 / 1.15)]
)
def test_one_spoilt_round_is_no_noise_and_two_are(medians: list[float], spread: float) -> None:
    assert spread_of(medians) == pytest.approx(spread)


def test_the_report_is_self_contained(profile: dict, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = {path.name for path in write_report(profile, tmp_path)}
    assert written == {"latency.png", "padding.png", "report.html"}
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "://" not in page
    for text in (profile["environment"]["device_name"], "capture ms", "pool bytes", "of bandwidth", "recorded backend"):
        assert text in page


def test_without_matplotlib_there_is_a_report_and_a_reason(profile, tmp_path, monkeypatch):
    assert [path.name for path in write_report(profile, tmp_path, draw=False)] == ["report.html"]
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'graphdecode\[plot\]'"):
        plot_profile(profile)


def test_the_trace_holds_ten_steps(profile: dict, trace_path: Path) -> None:
    events = json.loads(trace_path.read_text())["traceEvents"]
    assert sum(event.get("name") == "decode step" for event in events) == 10


def test_the_command_writes_everything_that_it_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "b.toml").write_text("[capacity]\nmax_batch_size = 2\nmax_sequence_length = 64\n")
    out = tmp_path / "p"
    options = ["--config", str(tmp_path / "b.toml"), "--contexts", "8", "--steps", "2", "--trace", "--out", str(out)]
    result = CliRunner().invoke(app, ["profile", *options], catch_exceptions=False)
    assert result.exit_code == 0
    names = {"profile.json", "report.html", "trace.json", "latency.png", "padding.png"}
    assert {path.name for path in out.iterdir()} == names
    assert all(name in result.output for name in names)
    assert "…" not in result.output
    written = json.loads((out / "profile.json").read_text())
    assert (written["schema"], written["steps"], written["rounds"]) == (2, 2, 2)
    assert [row["bucket"] for row in written["rows"]] == [1, 2]


def test_without_a_configuration_the_default_ladder_is_measured_with_a_cache_for_its_contexts(monkeypatch, tmp_path):
    seen = []

    def record(model: str, settings: EngineConfig, **_: object) -> None:
        seen.append(settings.buckets)
        raise ValueError("seen")

    monkeypatch.setattr("graphdecode.engine.loading.load_runner", record)
    with pytest.raises(ValueError, match="seen"):
        CliRunner().invoke(
            app,
            ["profile", "--contexts", "32,400", "--out", str(tmp_path)],
            catch_exceptions=False,
            standalone_mode=False,
        )
    assert seen[0].ladder == BucketConfig().ladder
    assert seen[0].max_sequence_length == 416


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be >= 1, got 0"),
        (["--contexts", "a"], "--contexts must be whole numbers separated by commas, such as 1,8,64; got 'a'"),
        (["--contexts", ""], "--contexts must be whole numbers"),
        (["--contexts", "100000"], r"a context must be in 1\.\."),
        (["--model", "shape:llama-7t"], "unknown shape"),
        (["--compare", "none.json", "none.json"], "none.json"),
        (["--out", "FILE"], "--out must be a folder, or not exist"),
        (["--contexts", "0"], r"a context must be in 1\.\."),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(
            app,
            ["profile", "--out", str(tmp_path / "p"), *(__file__ if word == "FILE" else word for word in arguments)],
            catch_exceptions=False,
            standalone_mode=False,
        )
    assert not list(tmp_path.iterdir())
