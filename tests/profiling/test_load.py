"""A load is made, read and paced as it was asked for."""

import itertools
import json
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest

from serving_load import Arrival, Lengths, at_rate, offered_rate, poisson_arrivals, read_trace


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


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    records = [{"at": 0.2, "prompt_tokens": 3, "answer_tokens": 4}, {"at": 0, "prompt_tokens": 5, "answer_tokens": 6}]
    path.write_text("\n\n".join(json.dumps(record) for record in records) + "\n")
    assert read_trace(path) == [Arrival(0.0, 5, 6), Arrival(0.2, 3, 4)]


def line(**changes: object) -> str:
    return json.dumps({"at": 1, "prompt_tokens": 2, "answer_tokens": 3} | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"trace\.jsonl is no trace of arrivals: it is empty"),
        (" \n\n", r"trace\.jsonl is no trace of arrivals: it is empty"),
        (f"{line()}\n\n{{", r"trace\.jsonl:3 is no arrival"),
        ("[1]", r"trace\.jsonl:1 is no arrival"),
        ('{"at": 1}', r"trace\.jsonl:1 is no arrival: KeyError\('prompt_tokens'\)"),
        (line(at="x"), r"trace\.jsonl:1: at must be seconds >= 0, got 'x'"),
        (line(at=-1), r"at must be seconds >= 0, got -1"),
        (line(at=float("nan")), r"at must be seconds >= 0, got nan"),
        (line(prompt_tokens=0), r"prompt_tokens must be an integer >= 1, got 0"),
        (line(answer_tokens=1.5), r"answer_tokens must be an integer >= 1, got 1.5"),
    ],
)
def test_a_broken_trace_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path)
    with pytest.raises(ValueError, match=r"none\.jsonl is no trace of arrivals"):
        read_trace(tmp_path / "none.jsonl")


def test_a_trace_can_be_played_at_another_rate() -> None:
    trace = [Arrival(2.0, 1, 1), Arrival(2.5, 2, 2), Arrival(4.0, 3, 3)]
    assert offered_rate(trace) == 1.0
    assert at_rate(trace, 4.0) == [Arrival(0.0, 1, 1), Arrival(0.125, 2, 2), Arrival(0.5, 3, 3)]
    assert offered_rate(trace[:1]) is None
    with pytest.raises(ValueError, match="has no rate"):
        at_rate(trace[:1], 4.0)
    with pytest.raises(ValueError, match="rate must be > 0, got 0"):
        at_rate(trace, 0.0)
