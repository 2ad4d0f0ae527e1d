"""A tuned ladder is tried out on the load that it was tuned for."""

from collections import Counter

import pytest

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.buckets import BucketLadder
from graphdecode.profiling.ladder_trial import LadderTrial, Ratio, Trial, trace_of, try_ladders
from graphdecode.profiling.tuner import StepCost, best_ladders, padding_share


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
