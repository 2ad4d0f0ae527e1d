"""The attack, a little of it: `tools/attack` does the same for as long as one likes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS, EACH, LIVES = 15, 7, 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_little_of_every_attack_finds_nothing() -> None:
    """What is accepted is compared with transformers, with the files' own bytes, and with answers alone.

    No input crashes, hangs or is accepted and wrong; an engine of any settings gives each request its own answer; a
    long life takes no more memory.
    """
    given = ("--inputs", str(KINDS * EACH), "--together", str(EACH), "--lives", str(LIVES), "--soak", "1000")
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
    assert "0 lives with a difference" in lines
    lives = next(line.split() for line in lines[KINDS + 2 :] if line.startswith("all "))
    assert int(lives[1]) == LIVES
    assert int(lives[3]) > 300  # tokens
