"""The attack, a little of it: `tools/attack` does the same for as long as one likes."""

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from attacks.http import HttpOutcome, Probed, Prober

ROOT = Path(__file__).parents[2]
KINDS, EACH, LIVES = 15, 7, 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_little_of_every_attack_finds_nothing() -> None:
    """What is accepted is compared with transformers, with the files' own bytes, and with answers alone.

    No input crashes, hangs or is accepted and wrong; an engine of any settings gives each request its own answer; a
    long life takes no more memory.
    """
    given = f"--inputs {KINDS * EACH} --together {EACH} --lives {LIVES} --adapters 1 --soak 1000".split()
    command = [sys.executable, str(ROOT / "tools" / "attack"), *given]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-5000:]
    lines = ran.stdout.splitlines()
    table = lines[1 : KINDS + 2]
    assert all(line.split()[-1] == "none" for line in table)
    kind, inputs, refused, right, _ = table[-1].split()
    assert (kind, int(inputs)) == ("all", KINDS * EACH)
    assert int(refused) + int(right) == KINDS * EACH
    assert min(int(refused), int(right)) > KINDS * EACH // 10  # both happen, or nothing is shown
    assert lines.count("0 lives with a difference") == 2  # of --lives and --adapters
    lives = next(line.split() for line in lines[KINDS + 2 :] if line.startswith("all "))
    assert int(lives[1]) == LIVES
    assert int(lives[3]) > 300  # tokens


GOOD = Probed([1.0, 90.0], [1.0], [2.0])
MEMORY = {"HTTP": 100, "engine": 300}


@pytest.mark.parametrize(
    ("failures", "probed", "after", "missed"),
    [
        ([], GOOD, {"HTTP": 110, "engine": 305}, ""),
        ([], Probed([1.0, 160.0], [1.0], [70.0]), MEMORY, ""),  # the machine itself was late by 70 ms
        (["mutated 7: /tokenize 500"], GOOD, MEMORY, "1 failures"),
        ([], Probed([1.0, 160.0], [1.0], [2.0]), MEMORY, "/health took 160 ms, but may take 102"),
        ([], Probed([1.0, 1200.0], [1.0], [1190.0]), MEMORY, "the server hung for 1200 ms"),
        ([], GOOD, {"HTTP": 100, "engine": 325}, "memory grew from 0 to 0 MB, by more than 5%"),
        ([], Probed([], [], [], "the prober hangs"), MEMORY, "/health: the prober hangs, /health was never answered"),
    ],
)
def test_each_goal_that_is_missed_is_named(failures, probed, after, missed):
    statuses = Counter({"200": 200, "503": 2})
    assert ", ".join(HttpOutcome(statuses, failures, probed, MEMORY, after).missed) == missed


def test_a_server_that_has_everybody_come_again_misses_a_goal() -> None:
    statuses = Counter({"200": 100, "503": 2})
    assert HttpOutcome(statuses, [], GOOD, MEMORY, MEMORY).missed == ["2 requests got 503"]


def test_a_prober_that_sees_nothing_says_so_and_keeps_nobody_waiting() -> None:
    prober, began = Prober("http://127.0.0.1:9"), time.monotonic()  # nobody listens there
    prober.load_begins()
    assert "ConnectError" in str(prober.end().error)
    assert time.monotonic() - began < 60
    wrong = Prober("no address")
    assert wrong.end().error is not None
