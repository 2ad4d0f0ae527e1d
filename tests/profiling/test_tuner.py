"""The tuner is exact: nothing of the same size serves the load faster."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from graphdecode.buckets import BucketLadder
from graphdecode.profiling.tuner import (
    StepCost,
    best_ladders,
    expected_step_ms,
    padding_share,
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


def test_records_of_several_runs_add_up(tmp_path: Path) -> None:
    path = tmp_path / "batches.json"
    record_batch_sizes(path, {1: 3, 4: 1})
    record_batch_sizes(path, {4: 2, 7: 5})
    assert read_batch_sizes(path) == {1: 3, 4: 3, 7: 5}


@pytest.mark.parametrize("text", ["", "[]", '{"batch_sizes": {"a": 1}}', '{"batch_sizes": {"0": 1}}'])
def test_a_broken_record_is_named_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "batches.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"batches\.json"):
        record_batch_sizes(path, {1: 1})
    assert path.read_text() == text


def test_measured_costs_are_interpolated_and_continued(tmp_path: Path) -> None:
    rows = [{"bucket": b, "context": c, "step_ms": {"p50": b + c}} for b in (1, 3, 5) for c in (0, 1)]
    (tmp_path / "profile.json").write_text(json.dumps({"rows": rows}))
    cost = StepCost.from_profile(tmp_path / "profile.json", 8)
    np.testing.assert_allclose(cost.step_ms[1:], [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5])
    with pytest.raises(ValueError, match="is no profile"):
        StepCost.from_profile(tmp_path / "none.json", 8)
