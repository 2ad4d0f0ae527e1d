"""The attack over HTTP fails where one of its goals is missed, and where its prober does."""

import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from attacks.http import HttpOutcome, Probed, Prober

GOOD = Probed([1.0, 90.0], [1.0], [2.0])
MEMORY = {"HTTP": 100, "engine": 300}


@pytest.mark.parametrize(
    ("failures", "probed", "after", "missed"),
    [
        ([], GOOD, {"HTTP": 110, "engine": 305}, ""),
        ([], Probed([1.0, 160.0], [1.0], [70.0]), MEMORY, ""),  # the machine itself was late by 70 ms
        (["mutated 7: /tokenize 500"], GOOD, MEMORY, "1 failures"),
        ([], Probed([1.0, 160.0], [1.0], [2.0]), MEMORY, "/health took 160 ms, and may take 102"),
        ([], Probed([1.0, 1200.0], [1.0], [1190.0]), MEMORY, "the server hung for 1200 ms"),
        ([], GOOD, {"HTTP": 100, "engine": 325}, "memory grew from 0 to 0 MB, by more than 5%"),
        ([], Probed([], [], [], "the prober hangs"), MEMORY, "/health: the prober hangs, /health was never answered"),
    ],
)
def test_each_goal_that_is_missed_is_named(
    failures: list[str], probed: Probed, after: dict[str, int], missed: str
) -> None:
    statuses = Counter({"200": 200, "503": 2})
    assert ", ".join(HttpOutcome(statuses, failures, probed, MEMORY, after).missed) == missed


def test_a_server_that_has_everybody_come_again_misses_a_goal() -> None:
    statuses = Counter({"200": 100, "503": 2})
    assert HttpOutcome(statuses, [], GOOD, MEMORY, MEMORY).missed == ["2 requests were told to come again"]


def test_a_prober_that_sees_nothing_says_so_and_keeps_nobody_waiting() -> None:
    prober, began = Prober("http://127.0.0.1:9"), time.monotonic()  # nobody listens there
    prober.load_begins()
    assert "ConnectError" in str(prober.end().error)
    assert time.monotonic() - began < 60
    wrong = Prober("no address")
    assert wrong.end().error is not None
