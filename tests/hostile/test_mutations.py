"""The attack, a little of it: `tools/attack` does the same for as long as one likes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INPUTS = 270


def attack(*arguments: str, timeout_s: int = 250) -> str:
    command = [sys.executable, str(ROOT / "tools" / "attack"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-5000:]
    return ran.stdout


@pytest.mark.slow
def test_no_mutated_input_crashes_hangs_or_is_accepted_and_wrong() -> None:
    """What is accepted is compared with transformers, with the files' own bytes, and with answers alone."""
    lines = attack("--inputs", str(INPUTS), "--together", "15").splitlines()
    kind, inputs, refused, right, failures = lines[-1].split()
    assert (kind, int(inputs), failures) == ("all", INPUTS, "none")
    assert int(refused) + int(right) == INPUTS
    assert min(int(refused), int(right)) > INPUTS // 10  # both happen, or nothing is shown
    assert all(line.split()[-1] == "none" for line in lines[1:])


@pytest.mark.slow
def test_an_engine_of_any_settings_gives_each_request_its_own_answer() -> None:
    assert attack("--lives", "3").endswith(" answers compared with those alone, 0 lives with a difference\n")


def test_a_long_life_takes_no_more_memory() -> None:
    attack("--soak", "3000")
