"""The tuner is exact: nothing of the same size serves the load faster."""

import itertools
import random

import numpy as np
import pytest

from graphdecode.buckets import BucketLadder
from graphdecode.profiling.tuner import (
    GraphCost,
    QueryCost,
    StepCost,
    best_ladders,
    compare_ladders,
    expected_step_ms,
    padding_share,
    query_costs,
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
