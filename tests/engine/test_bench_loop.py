"""The script that times loops: it runs, it names the loop, and its answers agree."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_script_times_each_number_of_steps_and_finds_the_same_answers(tmp_path: Path) -> None:
    out = tmp_path / "loop.json"
    command = [sys.executable, str(ROOT / "tools" / "bench"), "loop", "--steps-per-launch", "1,3", "--out", str(out)]
    command += ["--new-tokens", "12", "--repeats", "1", "--batch-size", "2", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [(row["steps_per_launch"], row["loop"]) for row in result["rows"]] == [(1, None), (3, "host")]
    # a difference of two times: of so few tokens on a busy machine it may have either sign
    assert all(row["same_tokens"] and isinstance(row["us_per_token"], float) for row in result["rows"])
    assert (result["batch_size"], result["environment"]["torch"] != "") == (2, True)
