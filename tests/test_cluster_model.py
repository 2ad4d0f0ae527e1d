"""The simulated cluster, beside queues whose figures are known."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

from cluster_model import Autoscaler, Bounds, Cluster, Replica, Request, StepCosts, arrivals, day, read_costs, requests

SECOND = StepCosts([0.0, 0.1], 0.0)  # one row, ten tokens a second
LENGTH = 10


def poisson(rate: float, seconds: float, seed: int) -> Iterator[float]:
    return arrivals(lambda _: rate, rate, seconds, random.Random(seed))


def jobs(rate: float, seconds: float, seed: int) -> list[Request]:
    return [Request(time, 0, 0, 0, LENGTH) for time in poisson(rate, seconds, seed)]


def mean_wait(done: list[Request]) -> float:
    return mean(request.finished - request.arrived for request in done) - LENGTH * SECOND.step_s[1]


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
def test_one_row_with_answers_of_one_length_waits_as_m_d_1(load: float) -> None:
    done = Cluster(SECOND, "random", 1).run(jobs(load, 40_000, 1)).requests
    assert mean_wait(done) == pytest.approx(load / (2 * (1 - load)), rel=0.08)  # Pollaczek and Khinchine


def test_rows_that_share_their_speed_are_processor_sharing() -> None:
    sharing = StepCosts([count * 0.001 for count in range(400)], 0.0)
    asked = requests(poisson(0.7, 30_000, 2), prefixes=1, sizes=(0, 0, 1000), seed=3)
    done = Cluster(sharing, "random", 1).run(asked).requests
    assert mean(request.finished - request.arrived for request in done) == pytest.approx(1 / (1 - 0.7), rel=0.08)


def test_chance_makes_a_queue_of_its_own_of_each_replica_and_who_looks_waits_less() -> None:
    def wait(policy: str) -> float:
        asked = requests(poisson(4 * 0.7, 15_000, 4), prefixes=1, sizes=(0, 0, LENGTH), seed=11)
        return mean_wait(Cluster(SECOND, policy, 4, seed=5).run(asked).requests)

    waits = {policy: wait(policy) for policy in ("random", "round robin", "least loaded")}
    # of M/M/1; lengths are rounded to whole tokens, and never none
    assert waits["random"] == pytest.approx(0.7 / (1 - 0.7), rel=0.1)
    assert waits["least loaded"] < waits["round robin"] < waits["random"]


def test_a_few_requests_by_hand() -> None:
    replica = Replica(StepCosts([0.0, 1.0, 1.5], 0.25))
    first, second, third = (Request(time, 0, 0, prompt, 4) for time, prompt in ((0.0, 4), (3.0, 2), (3.5, 0)))
    replica.add(first, 0.0)  # a second for its prompt, then a token a second
    assert replica.next_finish() == 5.0
    replica.add(second, 3.0)  # half a second for its prompt; the first one lacks two tokens of 1.5 s
    assert replica.next_finish() == 6.5
    replica.add(third, 3.5)  # there is no row
    assert (replica.load, replica.next_finish()) == (3, 6.5)
    assert replica.finish_next(6.5) is first
    assert (first.first_token, second.first_token, third.first_token) == (2.0, 5.0, 8.0)
    assert replica.next_finish() == 9.5
    assert replica.finish_next(9.5) is second
    assert replica.finish_next(11.5) is third  # two tokens beside the second one, two alone
    assert replica.next_finish() is None


def test_a_prefix_is_computed_once_where_it_decides_and_everywhere_where_chance_does() -> None:
    costs, replicas, prefixes = StepCosts([0.0, *[0.01] * 64], 0.0), 10, 200
    asked = [Request(time, index % prefixes, 1, 0, 1) for index, time in enumerate(poisson(50, 40, 6))]
    each = Counter(request.prefix for request in asked)

    def misses(policy: str) -> int:
        fresh = [Request(one.arrived, one.prefix, 1, 0, 1) for one in asked]
        done = Cluster(costs, policy, replicas, kept_prefixes=prefixes, slack=64, seed=7).run(fresh).requests
        return sum(not request.cached for request in done)

    assert misses("prefix") == len(each)
    expected = sum(replicas * (1 - (1 - 1 / replicas) ** count) for count in each.values())
    assert misses("random") == pytest.approx(expected, rel=0.05)


def test_a_cache_that_is_full_forgets_what_was_used_longest_ago() -> None:
    asked = [Request(float(10 * index), prefix, 1, 0, 1) for index, prefix in enumerate([0, 1, 0, 2, 0, 1])]
    done = Cluster(SECOND, "prefix", 1, kept_prefixes=2).run(asked).requests
    assert [request.cached for request in done] == [False, False, True, False, True, False]


def test_autoscaling_waits_for_a_wish_to_last_and_stays_in_its_bounds() -> None:
    scaler = Autoscaler(Bounds(1, 4, 10.0, 20.0, 60.0, 0.0, 10.0))
    told = [scaler.wanted(load, 1, time) for time, load in ((0, 35), (10, 5), (20, 35), (30, 35), (40, 35))]
    assert told == [1, 1, 1, 1, 4]
    assert [scaler.wanted(0, 4, time) for time in (50, 80, 109, 110)] == [4, 4, 4, 1]
    assert [scaler.wanted(10**6, 4, time) for time in (120, 150)] == [4, 4]


def test_autoscaling_looks_at_the_mean_of_a_while() -> None:
    scaler = Autoscaler(Bounds(1, 9, 10.0, 0.0, 0.0, 0.0, 30.0))
    assert [scaler.wanted(load, 1, time) for time, load in ((0, 10), (10, 10), (20, 70), (30, 70))] == [1, 1, 3, 5]


def test_autoscaling_goes_down_by_a_part_of_the_way_and_by_one_at_least() -> None:
    scaler = Autoscaler(Bounds(2, 24, 10.0, 0.0, 0.0, 0.0, 10.0, downscaling_factor=0.25))
    told = [17]
    for time in range(0, 120, 10):
        told.append(scaler.wanted(15, told[-1], time))
    assert told == [17, 14, 11, 9, 8, 7, 6, 5, 4, 3, 2, 2, 2]  # 17 - (17 - 1.5) / 4 = 13.1, and so on


def test_replicas_that_leave_finish_what_they_have_and_nothing_is_lost() -> None:
    costs, bounds = StepCosts([0.0, *[0.05] * 8], 0.001), Bounds(1, 12, 4.0, 10.0, 30.0, 15.0)
    rate = day(3.0, 3000, [(1500, 1600, 3.0)])
    asked = list(requests(arrivals(rate, 14.0, 3000, random.Random(8)), prefixes=5, sizes=(20, 10, 50), seed=9))
    outcome = Cluster(costs, "prefix", 1, bounds=bounds, kept_prefixes=4).run(asked)
    assert len(outcome.requests) == len(asked)
    assert all(one.arrived < one.first_token <= one.finished + 1e-9 for one in outcome.requests)
    replicas = [count for _, _, count in outcome.looks]
    assert max(replicas) > 3
    assert replicas[-1] < max(replicas) <= 12 + 11  # with those that only finish
    assert outcome.replica_seconds == pytest.approx(10 * sum(replicas), rel=0.15)


def test_a_day_has_as_many_requests_as_its_mean_says() -> None:
    rate = day(20.0, 1000, [])
    times = list(arrivals(rate, 30.0, 1000, random.Random(10)))
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert sum(time < 100 for time in times) == pytest.approx(2000 * 0.532, rel=0.1)  # 1 - sin(0.2 pi) / (0.4 pi)
    assert times == sorted(times)


def test_costs_are_those_of_the_profile(tmp_path: Path) -> None:
    rows = [(1, 100, 2.0), (4, 100, 4.0), (1, 300, 4.0), (4, 300, 8.0)]
    told = [{"bucket": bucket, "context": context, "step_ms": {"p50": ms}} for bucket, context, ms in rows]
    (tmp_path / "profile.json").write_text(json.dumps({"rows": told}))
    costs = read_costs(tmp_path / "profile.json", 200)
    assert list(costs.step_s) == pytest.approx([0.003, 0.003, 0.006, 0.006, 0.006])
    assert (costs.max_rows, costs.prompt_token_s) == (4, pytest.approx(0.001))
