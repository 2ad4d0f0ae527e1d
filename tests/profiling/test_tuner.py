"""The tuner is exact: nothing of the same size serves the load faster."""

import itertools
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.buckets import BucketLadder
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


def test_a_bucket_may_stand_where_no_batch_does_if_it_is_cheaper_there() -> None:
    cost = StepCost(np.array([0.0, 1.0, 5.0, 2.0, 4.0]), "with a dent at 3")
    assert [ladder.sizes for ladder in best_ladders({2: 5, 4: 1}, cost, 4, 8)] == [(4,), (3, 4)]


def test_a_large_capacity_costs_no_more_than_the_batch_sizes_that_occur() -> None:
    ladders = best_ladders({7: 3, 1000: 2, 60000: 1}, StepCost.linear(65536), 65536, 16)
    assert [ladder.sizes for ladder in ladders][-1] == (7, 1000, 60000, 65536)


def test_there_must_be_a_graph() -> None:
    with pytest.raises(ValueError, match="max_graphs must be >= 1, got 0"):
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


def test_todays_ladder_stands_beside_the_best_of_each_number_of_graphs() -> None:
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


def test_a_difference_within_the_noise_is_none():
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
    found = try_ladders({"today": today, "tuned": tuned}, counts, steps=64, rounds=10, progress=False).ladders
    assert found["tuned"].quiet_ms < found["today"].quiet_ms


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
    with pytest.raises(ValueError, match=r"batches\.json counts no decode step"):
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
def test_a_broken_record_is_named_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "batches.json"
    path.write_text(text)
    for refuse in (check_record, read_batch_sizes, lambda file: record_batch_sizes(file, {1: 1})):
        with pytest.raises(ValueError, match=r"batches\.json is no record of batch sizes: (?!.*Error)"):
            refuse(path)
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "batches.json", tmp_path / "batches.json" / "batches.json"):
        with pytest.raises(ValueError, match="must be a file in a folder that exists"):
            check_record(path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bytes\.json is no record"):
        check_record(tmp_path / "bytes.json")
