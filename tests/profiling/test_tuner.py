"""The tuner is exact: nothing of the same size serves the load faster."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from repeated import holds
from typer.testing import CliRunner

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.buckets import BucketLadder
from graphdecode.cli.app import app
from graphdecode.config import EngineConfig
from graphdecode.profiling.ladder_trial import LadderTrial, Ratio, Trial, trace_of, try_ladders
from graphdecode.profiling.tuner import (
    GraphCost,
    QueryCost,
    StepCost,
    best_ladders,
    check_record,
    compare_ladders,
    expected_step_ms,
    padding_share,
    query_costs,
    read_batch_sizes,
    record_batch_sizes,
)


def brute_force(counts: dict[int, int], cost: StepCost, max_batch_size: int, graphs: int) -> float:
    others = range(1, max_batch_size)
    return min(
        expected_step_ms(BucketLadder(sizes, max_batch_size), counts, cost)
        for taken in range(min(graphs, max_batch_size))
        for sizes in itertools.combinations(others, taken)
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_ladder_of_the_same_size_is_better(seed: int) -> None:
    rng = random.Random(seed)
    max_batch_size = rng.randint(1, 9)
    counts = {size: rng.randint(0, 50) for size in range(1, max_batch_size + 1)}
    counts[rng.randint(1, max_batch_size)] += 1
    # not only rising costs: a measured profile has dents
    cost = StepCost(np.array([rng.uniform(0.5, 3.0) for _ in range(max_batch_size + 1)]), "random")
    for graphs, ladder in enumerate(best_ladders(counts, cost, max_batch_size, 5), 1):
        assert len(ladder) <= graphs
        assert ladder.sizes[-1] == max_batch_size
        found = expected_step_ms(ladder, counts, cost)
        assert found == pytest.approx(brute_force(counts, cost, max_batch_size, graphs)), f"seed {seed}"


def test_more_graphs_never_cost_more() -> None:
    rng = random.Random(1)
    counts = {size: rng.randint(1, 100) for size in range(1, 65)}
    cost = StepCost.linear(64)
    times = [expected_step_ms(ladder, counts, cost) for ladder in best_ladders(counts, cost, 64, 64)]
    assert times == sorted(times, reverse=True)
    assert padding_share(best_ladders(counts, cost, 64, 64)[-1], counts) == 0.0


def test_the_tuned_ladder_beats_the_default_on_its_own_load() -> None:
    counts = {5: 900, 33: 90, 64: 10}
    cost = StepCost.linear(64)
    tuned = best_ladders(counts, cost, 64, 3)[-1]
    assert tuned.sizes == (5, 33, 64)
    assert expected_step_ms(tuned, counts, cost) < expected_step_ms(BucketLadder.auto(64, 3), counts, cost)


@pytest.mark.parametrize("counts", [{}, {0: 3}, {9: 3}, {3: 0}])
def test_a_load_outside_the_capacity_is_refused(counts: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="1..max_batch_size=8"):
        best_ladders(counts, StepCost.linear(8), 8, 2)


def test_a_bucket_may_be_a_size_that_does_not_occur_if_it_is_cheaper() -> None:
    cost = StepCost(np.array([0.0, 1.0, 5.0, 2.0, 4.0]), "with a dent at 3")
    assert [ladder.sizes for ladder in best_ladders({2: 5, 4: 1}, cost, 4, 8)] == [(4,), (3, 4)]


def test_a_large_capacity_costs_no_more_than_the_batch_sizes_that_occur() -> None:
    ladders = best_ladders({7: 3, 1000: 2, 60000: 1}, StepCost.linear(65536), 65536, 16)
    assert [ladder.sizes for ladder in ladders][-1] == (7, 1000, 60000, 65536)


def test_there_must_be_a_graph() -> None:
    with pytest.raises(ValueError, match="max_graphs .*0"):
        best_ladders({1: 1}, StepCost.linear(8), 8, 0)


def profile_of(buckets: tuple[int, ...]) -> dict:
    """What a tuner reads of a profile: a step of b + 1 at two contexts, a capture of 10 ms and 100 b bytes."""
    rows = [{"bucket": b, "context": c, "step_ms": {"p50": b + c}} for b in buckets for c in (0, 2)]
    captured = [{"bucket": b, "state": "captured", "capture_ms": 10.0, "pool_bytes": 100 * b} for b in buckets]
    return {"rows": rows, "captures": {"buckets": captured}}


def test_measured_costs_are_interpolated_and_continued() -> None:
    cost = StepCost.from_profile(profile_of((2, 3, 5)), 8)
    np.testing.assert_allclose(cost.step_ms[1:], [3, 3, 4, 5, 6, 7, 8, 9])
    assert cost.source == "measured at 3 buckets, extrapolated from 5 rows on"
    assert StepCost.from_profile(profile_of((2, 8)), 8).source == "measured at 2 buckets"
    graphs = GraphCost.from_profile(profile_of((2, 3, 5)), 8)
    assert graphs is not None
    np.testing.assert_allclose(graphs.pool_bytes[1:], [200, 200, 300, 400, 500, 600, 700, 800])
    np.testing.assert_allclose(graphs.capture_ms[1:], 10.0)


def test_a_profile_without_captures_says_nothing_of_their_cost() -> None:
    assert GraphCost.from_profile({"captures": {"buckets": [{"bucket": 1, "state": "eager"}]}}, 8) is None


def test_a_step_of_several_queries_breaks_even_where_it_gives_as_many_tokens_as_it_costs_plain_steps() -> None:
    measured = [(4, 2, 3.0), (1, 1, 1.0), (4, 1, 2.0), (1, 8, 1.5)]
    wide = [{"bucket": b, "queries": q, "context": 16, "step_ms": ms} for b, q, ms in measured]
    assert query_costs(profile_of((1, 4)) | {"wide_steps": wide}) == [
        QueryCost(1, 1, 1.0, 1.0),
        QueryCost(1, 8, 1.5, 1.5),
        QueryCost(4, 1, 2.0, 1.0),
        QueryCost(4, 2, 3.0, 1.5),
    ]
    assert query_costs(profile_of((1, 4))) == []


def test_todays_ladder_is_compared_with_the_best_of_each_size() -> None:
    counts = {5: 900, 33: 90, 64: 10}
    today = BucketLadder.auto(64, 16)
    graph_cost = GraphCost.from_profile(profile_of((1, 64)), 64)
    figures = compare_ladders(counts, today, StepCost.linear(64), 8, graph_cost)
    assert [row.name for row in figures] == ["today", "auto 8", "best of 1", "best of 2", "best of 3"]
    found = {row.name: row for row in figures}
    assert found["today"].ladder == today
    assert found["auto 8"].ladder == BucketLadder.auto(64, 8)
    assert found["best of 3"].sizes == (5, 33, 64)
    assert [row.gain_ms is None for row in figures] == [True, True, True, False, False]
    assert found["best of 3"].gain_ms == pytest.approx(found["best of 2"].expected_ms - found["best of 3"].expected_ms)
    assert (found["best of 3"].capture_ms, found["best of 3"].pool_bytes) == (30.0, 10200.0)
    assert found["today"].capture_ms == 160.0
    assert found["best of 3"].padding_share == 0.0 < found["today"].padding_share
    without = compare_ladders(counts, today, StepCost.linear(64), 16)
    assert [row.name for row in without] == ["today", "best of 1", "best of 2", "best of 3"]
    assert without[0].pool_bytes is without[0].capture_ms is None


def test_a_trace_has_the_proportions_of_the_record_and_is_always_the_same():
    counts = {1: 10, 3: 500, 7: 490}
    trace = trace_of(counts, 100)
    assert Counter(trace) == {1: 1, 3: 50, 7: 49}
    assert trace == trace_of(counts, 100)
    assert trace != sorted(trace)
    assert Counter(trace_of({2: 1, 5: 1, 6: 1}, 100)).total() == 100


def test_every_ladder_is_tried_on_the_same_load():
    ladders = {"one": BucketLadder([], 4), "all": BucketLadder([1, 2, 3, 4], 4)}
    found = try_ladders(ladders, {1: 3, 4: 1}, steps=20, rounds=2, progress=False).ladders
    assert found.keys() == ladders.keys()
    for trial in found.values():
        assert len(trial.rounds_ms) == 2
        assert trial.quiet_ms == min(trial.rounds_ms) <= trial.step_ms <= max(trial.rounds_ms)
        assert trial.capture_ms > 0
    assert found["all"].pool_bytes >= found["one"].pool_bytes > 0  # all buckets share a pool


def trial_of(**rounds_ms: list[float]) -> Trial:
    ladders = {name: LadderTrial(rounds[0], min(rounds), rounds, 1.0, 1) for name, rounds in rounds_ms.items()}
    return Trial("m", "float32", "recorded", 8, 16, 4, ladders)


def test_ladders_are_compared_round_by_round():
    drifting = [1.0, 2.0, 3.0, 4.0]  # the machine gets slower, for both alike
    trial = trial_of(today=drifting, tuned=[0.8 * value for value in drifting], same=[*drifting[:3], 4.04])
    assert trial.ratio("tuned", "today") == Ratio(pytest.approx(0.8), pytest.approx(0.8), pytest.approx(0.0))
    assert trial.ratio("tuned", "today").verdict == "quicker"
    assert trial.ratio("today", "tuned").verdict == "slower"
    assert trial.ratio("same", "today").verdict == "no difference beyond the noise of 0.1%"


def test_a_difference_within_the_noise_is_not_reported():
    trial = trial_of(today=[1.0] * 5, tuned=[0.6, 0.8, 0.9, 1.0, 2.0])
    assert trial.ratio("tuned", "today").noise == pytest.approx(0.1 / 0.9)
    assert trial.ratio("tuned", "today").verdict == "no difference beyond the noise of 11.1%"


@pytest.mark.alone
def test_a_tuned_ladder_beats_todays_on_a_recorded_run_measured():
    """An engine's run at batch sizes that the default ladder pads, recorded, tuned for, and replayed through both."""
    with LLM("demo", config=BucketConfig(max_batch_size=64, max_sequence_length=64), dtype="float32") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        for rows in (34, 34, 50):
            llm.generate([[97 + i % 26] for i in range(rows)], params, use_tqdm=False)
        counts = llm.stats.batch_sizes
    today = BucketLadder.auto(64, 8)
    tuned = best_ladders(counts, StepCost.linear(64, base_ms=0.1, row_ms=0.05), 64, 8)[-1]
    assert padding_share(tuned, counts) < 0.01 < padding_share(today, counts)

    def is_faster(_: int) -> bool:
        found = try_ladders({"today": today, "tuned": tuned}, counts, steps=64, rounds=10, progress=False).ladders
        return found["tuned"].quiet_ms < found["today"].quiet_ms

    assert holds(is_faster)


@pytest.mark.parametrize("options", [{"context": 0}, {"steps": 0}, {"rounds": 0}])
def test_impossible_numbers_are_refused(options):
    with pytest.raises(ValueError, match="must be >= 1"):
        try_ladders({"one": BucketLadder([], 2)}, {1: 1}, **options)


def test_records_of_several_runs_add_up(tmp_path: Path) -> None:
    path = tmp_path / "batches.json"
    check_record(path)
    record_batch_sizes(path, {1: 3, 4: 1})
    check_record(path)
    record_batch_sizes(path, {4: 2, 7: 5})
    record_batch_sizes(path, {})
    assert read_batch_sizes(path) == {1: 3, 4: 3, 7: 5}
    assert [file.name for file in tmp_path.iterdir()] == ["batches.json"]


def test_a_run_without_steps_can_be_added_to_but_not_tuned_for(tmp_path: Path) -> None:
    path = tmp_path / "batches.json"
    record_batch_sizes(path, {})
    with pytest.raises(ValueError, match=r"batches\.json"):
        read_batch_sizes(path)
    record_batch_sizes(path, {2: 1})
    assert read_batch_sizes(path) == {2: 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"batch_sizes": []}',
        '{"batch_sizes": {"a": 1}}',
        '{"batch_sizes": {"0": 1}}',
        '{"batch_sizes": {"1": -1}}',
        '{"batch_sizes": {"1": 1.5}}',
        '{"batch_sizes": {"1": true}}',
        '{"batch_sizes": {"1": "2"}}',
    ],
)
def test_an_invalid_record_is_named_and_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "batches.json"
    path.write_text(text)
    for refuse in (check_record, read_batch_sizes, lambda file: record_batch_sizes(file, {1: 1})):
        with pytest.raises(ValueError, match=r"batches\.json(?!.*Error)"):
            refuse(path)
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "batches.json", tmp_path / "batches.json" / "batches.json"):
        with pytest.raises(ValueError, match="folder"):
            check_record(path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bytes\.json"):
        check_record(tmp_path / "bytes.json")


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


def test_todays_ladder_is_that_of_the_configuration(folder: Path) -> None:
    config = ["--config", str(folder / "today.toml")]
    for options, today in ((config, (4, 8)), ([], BucketConfig().ladder.sizes)):
        for more in ([], ["--max-graphs", "3"]):
            assert tuple(report_of(folder, *options, *more)["ladders"][0]["sizes"]) == today
    assert len(BucketConfig.load(folder / "tuned.toml").ladder) == 3
    tune(folder, *config)
    assert BucketConfig.load(folder / "tuned.toml").ladder.sizes == (3, 8)
    assert BucketConfig.load(folder / "tuned.toml").max_graphs == 2


def test_a_record_of_few_steps_warns(folder: Path) -> None:
    assert "has only 42 steps" in " ".join(tune(folder).split())
    record_batch_sizes(folder / "batches.json", {3: 1000})
    assert "has only" not in tune(folder)


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


def test_query_costs_are_by_rows_and_queries(folder: Path) -> None:
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
        (["--profile", "none.json"], r"none\.json is not a profile"),
        (["--profile", "FOLDER/today.toml"], r"today\.toml is not a profile"),
        (["--profile", "FOLDER/batches.json"], r"batches\.json is not a profile: schema 2 is needed, got None"),
        (["--profile", "FOLDER/hollow.json"], r"hollow\.json is not a profile: KeyError\('bucket'\)"),
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
