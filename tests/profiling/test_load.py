"""A load is made as it was asked for."""

import itertools
import random
import statistics
from collections import Counter

import pytest

from benchmarks.serving import Arrival, Lengths, offered_rate, poisson_arrivals


def test_poisson_arrivals_keep_rate_and_lengths() -> None:
    def made(rate: float) -> list[Arrival]:
        return poisson_arrivals(rate, 4000, Lengths(3, 9), Lengths(1, 5), seed=1)

    arrivals = made(50.0)
    assert arrivals == made(50.0)
    assert offered_rate(arrivals) == pytest.approx(50.0, rel=0.06)
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(arrivals)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)  # as of an exponential distribution
    assert {a.prompt_tokens for a in arrivals} == set(range(3, 10))
    assert {a.answer_tokens for a in arrivals} == set(range(1, 6))
    assert [(a.prompt_tokens, a.answer_tokens) for a in made(5.0)] == [
        (a.prompt_tokens, a.answer_tokens) for a in arrivals
    ]


def test_bursts_arrive_together_at_the_same_mean_rate() -> None:
    arrivals = poisson_arrivals(50.0, 40000, Lengths(3, 9), Lengths(1, 5), burst=40)
    assert sorted(Counter(arrival.at for arrival in arrivals).values()) == [40] * 1000
    assert offered_rate(arrivals) == pytest.approx(50.0, rel=0.1)


def test_lengths_are_drawn_from_what_was_asked_for() -> None:
    rng = random.Random(2)
    assert {Lengths.parse("--l", "7").draw(rng) for _ in range(20)} == {7}
    lengths = Lengths.parse("--l", "lognormal:64:0.8:400")
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(64, rel=0.08)
    assert min(drawn) >= 1
    assert max(drawn) == 400
    assert statistics.mean(drawn) > 75  # the long tail


@pytest.mark.parametrize("text", ["", "a", "0", "9-3", "-3", "lognormal:64", "lognormal:64:0.8", "lognormal:a:1:9"])
def test_impossible_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--l must be"):
        Lengths.parse("--l", text)


@pytest.mark.parametrize("text", ["lognormal:0.5:1:9", "lognormal:10:1:9", "lognormal:5:-1:9", "lognormal:5:nan:9"])
def test_impossible_distributions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="sigma in 0..10, got"):
        Lengths.parse("--l", text)


@pytest.mark.parametrize(("rate", "count"), [(0, 1), (-1, 1), (float("nan"), 1), (float("inf"), 1), (1, 0)])
def test_impossible_loads_are_refused(rate: float, count: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        poisson_arrivals(rate, count, Lengths(1, 2), Lengths(1, 1))
    with pytest.raises(ValueError, match="a burst >= 1, got 1, 1 and 0"):
        poisson_arrivals(1, 1, Lengths(1, 2), Lengths(1, 1), burst=0)
